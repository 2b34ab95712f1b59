"""The queue of services to look at: each at most once, by one worker at a time, changed ones first."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

SOON_S: Final = 0.05
FIRST_RETRY_S: Final = 0.2
LONGEST_RETRY_S: Final = 15.0
"""After a fault of the API server everything is tried again within this time."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """A service's place: what the queue holds instead of objects."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """As kubectl users write it."""
        return f"{self.namespace}/{self.name}"


class Urgency(IntEnum):
    """Why a key is queued. Lower is sooner."""

    CHANGED = 0
    RESYNC = 1


class KeyedQueue:
    """Keys that want a look.

    A key queued while a worker has it is handed out again after `done`. A key that waits for a later
    moment is handed out at the earliest of all moments asked for; a change hands it out at once.
    """

    def __init__(self, *, monotonic: Callable[[], float], jitter: Callable[[float], float]) -> None:
        self._monotonic = monotonic
        self._jitter = jitter
        self._ready: tuple[OrderedDict[Key, None], OrderedDict[Key, None]] = (
            OrderedDict(),
            OrderedDict(),
        )
        self._working: set[Key] = set()
        self._again: dict[Key, Urgency] = {}
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._tries: dict[Key, int] = {}
        self._added = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        """Keys that could be handed out now."""
        return sum(map(len, self._ready))

    @property
    def waiting(self) -> int:
        """Keys that wait for a moment."""
        return len(self._due)

    @property
    def working(self) -> int:
        """Keys that workers have."""
        return len(self._working)

    def add(self, key: Key, urgency: Urgency = Urgency.CHANGED) -> None:
        """Queues the key now. What is queued as changed stays so when a resync comes by."""
        if key in self._working:
            self._again[key] = min(urgency, self._again.get(key, urgency))
            return
        changed, resync = self._ready
        if key in changed or (urgency is Urgency.RESYNC and key in resync):
            return
        resync.pop(key, None)
        self._ready[urgency][key] = None
        self._added.set()

    def add_soon(self, key: Key) -> None:
        """Queues the key in a moment, so that changes in a row are one look."""
        self.add_after(key, SOON_S)

    def add_after(self, key: Key, delay_s: float) -> None:
        """Queues the key after `delay_s` seconds, or sooner where that was asked for."""
        due = self._monotonic() + max(delay_s, 0.0)
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            heapq.heappush(self._heap, (due, key))
            self._added.set()

    def retry(self, key: Key) -> float:
        """Queues the key after its next back-off, in seconds returned: doubling, with jitter."""
        tries = self._tries.get(key, 0)
        self._tries[key] = tries + 1
        delay_s = self._jitter(min(FIRST_RETRY_S * 2 ** min(tries, 16), LONGEST_RETRY_S))
        self.add_after(key, delay_s)
        return delay_s

    def succeeded(self, key: Key) -> None:
        """Forgets the key's failures."""
        self._tries.pop(key, None)

    def forget(self, key: Key) -> None:
        """Drops the key and all that is known of it: the service is gone."""
        self._tries.pop(key, None)
        self._due.pop(key, None)
        for ready in self._ready:
            ready.pop(key, None)
        self._again.pop(key, None)

    def close(self) -> None:
        """Hands out nothing more."""
        self._closed = True
        self._added.set()

    async def get(self) -> Key | None:
        """The next key, the worker's until `done`; None once closed. For one caller at a time."""
        while not self._closed:
            self._release_due()
            for ready in self._ready:
                if ready:
                    key, _ = ready.popitem(last=False)
                    self._due.pop(key, None)
                    self._working.add(key)
                    return key
            await self._wait()
        return None

    def done(self, key: Key) -> None:
        """The worker is through with the key."""
        self._working.discard(key)
        urgency = self._again.pop(key, None)
        if urgency is not None:
            self.add(key, urgency)

    def _release_due(self) -> None:
        now = self._monotonic()
        while self._heap and self._heap[0][0] <= now:
            due, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                del self._due[key]
                self.add(key)

    async def _wait(self) -> None:
        """Until something is added or due."""
        self._added.clear()
        delay_s = self._heap[0][0] - self._monotonic() if self._heap else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._added.wait()

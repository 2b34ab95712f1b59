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

SOON_S: Final = 0.2
"""A pod that starts moves a dozen objects within a second: that many looks would say nothing more."""
TURN_OF_MOVED: Final = 4
"""Every so many keys one that merely moved goes first: a long burst of changes keeps no status back."""
CALM_S: Final = 0.5
"""Pods that start in a burst have one look after another: only a pause of this length is calm."""
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
    """The service itself, or what it asks for."""
    MOVED = 1
    """What it owns moved on, or a moment came that was asked for."""
    RESYNC = 2


class _ByNamespace:
    """Keys in the order they came, where namespaces take turns.

    A thousand services that one tenant creates at once delay the service of another by one of them.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[str, OrderedDict[Key, None]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of keys."""
        return sum(map(len, self._keys.values()))

    def __bool__(self) -> bool:
        """Return whether there is a key."""
        return bool(self._keys)

    def __contains__(self, key: Key) -> bool:
        """Return whether the key is here."""
        return key in self._keys.get(key.namespace, ())

    def add(self, key: Key) -> None:
        """Add the key behind those of its namespace."""
        self._keys.setdefault(key.namespace, OrderedDict())[key] = None

    def discard(self, key: Key) -> None:
        """Remove the key, if it is here."""
        keys = self._keys.get(key.namespace)
        if keys is not None:
            keys.pop(key, None)
            if not keys:
                del self._keys[key.namespace]

    def pop(self) -> Key:
        """Remove and return the first key of the namespace whose turn it is."""
        namespace, keys = next(iter(self._keys.items()))
        key, _ = keys.popitem(last=False)
        if keys:
            self._keys.move_to_end(namespace)
        else:
            del self._keys[namespace]
        return key


class KeyedQueue:
    """Keys that want a look.

    A key queued while a worker has it is handed out again after `done`. A key that waits for a later
    moment is handed out at the earliest of all moments asked for; a change hands it out at once. In a
    burst new services come before those that start, whose movements so become one look.
    """

    def __init__(self, *, monotonic: Callable[[], float], jitter: Callable[[float], float]) -> None:
        self._monotonic = monotonic
        self._jitter = jitter
        self._ready = {urgency: _ByNamespace() for urgency in Urgency}
        self._handed_out = 0
        self._working: set[Key] = set()
        self._again: dict[Key, Urgency] = {}
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._tries: dict[Key, int] = {}
        self._added = asyncio.Event()
        self._idle = asyncio.Event()
        self._busy = asyncio.Event()
        self._idle_since = monotonic()
        self._idle.set()
        self._closed = False

    def __len__(self) -> int:
        """Keys that could be handed out now."""
        return sum(map(len, self._ready.values()))

    @property
    def waiting(self) -> int:
        """Keys that wait for a moment."""
        return len(self._due)

    @property
    def working(self) -> int:
        """Keys that workers have."""
        return len(self._working)

    def add(self, key: Key, urgency: Urgency = Urgency.CHANGED) -> None:
        """Queues the key now. What is queued as more urgent stays so."""
        if key in self._working:
            self._again[key] = min(urgency, self._again.get(key, urgency))
            return
        for known, ready in self._ready.items():
            if key in ready:
                if known <= urgency:
                    return
                ready.discard(key)
        self._ready[urgency].add(key)
        self._added.set()
        self._note_work()

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
        for ready in self._ready.values():
            ready.discard(key)
        self._again.pop(key, None)
        self._note_work()

    def close(self) -> None:
        """Hands out nothing more."""
        self._closed = True
        self._added.set()

    async def get(self) -> Key | None:
        """The next key, the worker's until `done`; None once closed. For one caller at a time."""
        while not self._closed:
            self._release_due()
            if (ready := self._next()) is not None:
                key = ready.pop()
                self._due.pop(key, None)
                self._working.add(key)
                self._handed_out += 1
                return key
            await self._wait()
        return None

    def _next(self) -> _ByNamespace | None:
        moved = self._ready[Urgency.MOVED]
        if moved and self._handed_out % TURN_OF_MOVED == 0:
            return moved
        return next((ready for ready in self._ready.values() if ready), None)

    def done(self, key: Key) -> None:
        """The worker is through with the key."""
        self._working.discard(key)
        urgency = self._again.pop(key, None)
        if urgency is not None:
            self.add(key, urgency)
        self._note_work()

    async def calm(self) -> None:
        """Returns once no key has been handed out or been ready to be for `CALM_S`."""
        while True:
            await self._idle.wait()
            left_s = self._idle_since + CALM_S - self._monotonic()
            if left_s <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._busy.wait()

    def _note_work(self) -> None:
        """Keeps what `calm` waits for: the two events are never both set."""
        if self._working or any(self._ready.values()):
            self._idle.clear()
            self._busy.set()
        elif not self._idle.is_set():
            self._busy.clear()
            self._idle.set()
            self._idle_since = self._monotonic()

    def _release_due(self) -> None:
        now = self._monotonic()
        while self._heap and self._heap[0][0] <= now:
            due, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                del self._due[key]
                self.add(key, Urgency.MOVED)

    async def _wait(self) -> None:
        """Until something is added or due."""
        self._added.clear()
        delay_s = self._heap[0][0] - self._monotonic() if self._heap else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._added.wait()

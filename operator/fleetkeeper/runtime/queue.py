"""The queue of services to reconcile: each at most once, by one worker at a time, edited ones first."""

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
"""A starting pod changes a dozen objects within a second: one reconcile for all of them is enough."""
TURN_OF_MOVED: Final = 4
"""Every fourth key is one with a status change only, so that a burst of edits delays no status."""
CALM_S: Final = 0.5
"""Pods that start in a burst cause one reconcile after another: only a longer pause counts as idle."""
FIRST_RETRY_S: Final = 0.2
MAX_RETRY_S: Final = 15.0
"""After a failure of the API server everything is retried within this time."""
PAUSE_AFTER_FAILURE_S: Final = 1.0
"""An event queues a key after this time if its last reconcile failed: such an event is often the key's own
write, whose response was lost."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """The namespace and name of a service. The queue holds these instead of objects."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """Return NAMESPACE/NAME, as kubectl users write it."""
        return f"{self.namespace}/{self.name}"


class Urgency(IntEnum):
    """The reason why a key is queued. Lower is sooner."""

    CHANGED = 0
    """The service itself, or a field that we set on its objects, was edited."""
    MOVED = 1
    """The status of its objects changed, or a requested time came."""
    RESYNC = 2


class _ByNamespace:
    """Keys in the order they came; namespaces take turns.

    A thousand services that one tenant creates at once delay the service of another by one of them.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[str, OrderedDict[Key, None]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of keys."""
        return sum(map(len, self._keys.values()))

    def __bool__(self) -> bool:
        """Return whether there are keys."""
        return bool(self._keys)

    def __contains__(self, key: Key) -> bool:
        """Return whether the key is here."""
        return key in self._keys.get(key.namespace, ())

    def add(self, key: Key) -> None:
        """Add the key after those of its namespace."""
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
    """Keys of services to reconcile.

    A key queued while a worker has it is handed out again after `done`. A key with several due times
    is handed out at the earliest of them; an edit hands it out at once. In a burst, new services come
    before starting ones, so that several changes of a starting service become one reconcile.
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
        """Return the number of keys that could be handed out now."""
        return sum(map(len, self._ready.values()))

    @property
    def waiting(self) -> int:
        """The number of keys that wait for a later time."""
        return len(self._due)

    @property
    def working(self) -> int:
        """The number of keys that workers have."""
        return len(self._working)

    def add(self, key: Key, urgency: Urgency = Urgency.CHANGED) -> None:
        """Queue the key now, or after `PAUSE_AFTER_FAILURE_S` if its last reconcile failed.

        A key that is already queued as more urgent stays so.
        """
        if key in self._tries and key not in self._working:
            self.add_after(key, PAUSE_AFTER_FAILURE_S)
        else:
            self._add_now(key, urgency)

    def _add_now(self, key: Key, urgency: Urgency) -> None:
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
        """Queue the key after `SOON_S`, so that several changes become one reconcile."""
        self.add_after(key, SOON_S)

    def add_after(self, key: Key, delay_s: float) -> None:
        """Queue the key after `delay_s` seconds, or sooner if a sooner time is already set."""
        due = self._monotonic() + max(delay_s, 0.0)
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            heapq.heappush(self._heap, (due, key))
            self._added.set()

    def retry(self, key: Key) -> float:
        """Queue the key after its next back-off; return it in seconds. It doubles, with jitter."""
        tries = self._tries.get(key, 0)
        self._tries[key] = tries + 1
        delay_s = self._jitter(min(FIRST_RETRY_S * 2 ** min(tries, 16), MAX_RETRY_S))
        self.add_after(key, delay_s)
        return delay_s

    def succeeded(self, key: Key) -> None:
        """Reset the key's back-off."""
        self._tries.pop(key, None)

    def forget(self, key: Key) -> None:
        """Forget the key of a deleted service."""
        self._tries.pop(key, None)
        self._due.pop(key, None)
        for ready in self._ready.values():
            ready.discard(key)
        self._again.pop(key, None)
        self._note_work()

    def close(self) -> None:
        """Hand out no more keys."""
        self._closed = True
        self._added.set()

    async def get(self) -> Key | None:
        """Return the next key, which the worker has until `done`; None once the queue is closed.

        Only one caller may wait at a time.
        """
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
        """Take the key back from its worker."""
        self._working.discard(key)
        urgency = self._again.pop(key, None)
        if urgency is not None:
            self.add(key, urgency)
        self._note_work()

    async def idle(self) -> None:
        """Return once the queue has been idle for `CALM_S`: no key ready, none with a worker."""
        while True:
            await self._idle.wait()
            left_s = self._idle_since + CALM_S - self._monotonic()
            if left_s <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._busy.wait()

    def _note_work(self) -> None:
        """Update the two events that `idle` waits for; never are both set."""
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
                self._add_now(key, Urgency.MOVED)

    async def _wait(self) -> None:
        """Wait until a key is added or due."""
        self._added.clear()
        delay_s = self._heap[0][0] - self._monotonic() if self._heap else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._added.wait()

"""List and watch of one kind, with a new list when the watch cannot be resumed.

An object that a finished list did not contain is gone, even if its DELETED event was never seen (the
watch was cut, and the server's history does not reach back that far). A watch that is silent for longer
than the interval of bookmarks is cut and resumed where it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from fleetkeeper.adapters.kubernetes.bounds import decoded_event
from fleetkeeper.adapters.kubernetes.client import KubernetesClient
from fleetkeeper.adapters.kubernetes.errors import ApiError, BrokenAnswer, failure_of
from fleetkeeper.adapters.kubernetes.reading import Unreadable, as_map, digits, text
from fleetkeeper.adapters.kubernetes.records import Place, place_of
from fleetkeeper.adapters.kubernetes.resources import Resource
from fleetkeeper.api.names import LABEL_MANAGED_BY, MANAGED_BY

SELECTOR: Final = f"{LABEL_MANAGED_BY}={MANAGED_BY}"
SILENCE_S: Final = 70.0
"""The API server sends a bookmark about every minute: a watch without any is dead."""
SERVER_TIMEOUT_S: Final = 290
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 3.0
MAX_DENIED_PAUSE_S: Final = 30.0
"""The pause after a denial: somebody must restore the rights."""
TRIES_BEFORE_LIST: Final = 3
"""Watches in a row that may break without an event before the list is read again."""


Report = Callable[[ApiError | None], None]
"""Called with the reason why a kind cannot be read, or None after it was read."""


class Sink(Protocol):
    """The receiver of a reflector's objects. It is called in order, from one task."""

    def take(self, kind: str, live: Mapping[str, Any]) -> Place | None:
        """Store an object, which may be anything: whoever may write it must not stop the watch.

        Return which object it is, or None if not even that can be read.
        """

    def gone(self, found: Place) -> None:
        """Remove an object that was deleted or lost our label; `found` is its last state."""

    def listed(
        self, kind: str, namespace: str | None, names: frozenset[tuple[str, str]], version: int
    ) -> None:
        """Remove what a finished list did not contain: all but `names` (namespace, name).

        An object written after `version` may exist although the list does not contain it.
        """


class ReflectorClock(Protocol):
    """The clocks that a reflector needs."""

    def monotonic(self) -> float:
        """Return the seconds since some fixed moment."""

    def jitter(self, seconds: float) -> float:
        """Return somewhat less than `seconds`."""


class Reflector:
    """The list and watch of one kind, in one namespace or in all."""

    def __init__(
        self,
        client: KubernetesClient,
        resource: Resource,
        namespace: str | None,
        sink: Sink,
        clock: ReflectorClock,
        *,
        silence_s: float = SILENCE_S,
        report: Report | None = None,
    ) -> None:
        """With `report` a denial is reported and retried; without it, a denial ends the reflector."""
        self.resource = resource
        self.namespace = namespace
        self.epoch = 0
        """Number of finished lists."""
        self.synced = asyncio.Event()
        """Set when the first list is finished."""
        self.failures = 0
        """Number of failed lists and watches since the start."""
        self._client = client
        self._sink = sink
        self._clock = clock
        self._silence_s = silence_s
        self._report = report
        self.settled = asyncio.Event()
        """Set when the first list is finished, or its failure was reported."""
        self._version = ""

    async def run(self) -> None:
        """List and watch; never return. No response of the server ends it, with one exception.

        Raises:
            ApiError: reading the kind is denied (401, 403) before the first list, and there is no
                `report`: waiting would hide it.
        """
        pause_s, broken = FIRST_PAUSE_S, 0
        while True:
            try:
                if not self._version:
                    await self._list()
                if await self._watch():
                    pause_s, broken = FIRST_PAUSE_S, 0
                continue
            except ApiError as problem:
                self.failures += 1
                broken += 1
                longest_s = self._report_failure(problem)
                if problem.is_expired or broken >= TRIES_BEFORE_LIST:
                    self._version, broken = "", 0
                wait_s = problem.retry_after_s or 0.0
            await asyncio.sleep(self._clock.jitter(max(pause_s, min(wait_s, longest_s))))
            pause_s = min(pause_s * 2, longest_s)

    def _report_failure(self, problem: ApiError) -> float:
        """Report a failure that leaves the kind unread; return the longest pause before a retry."""
        is_synced = self.synced.is_set()
        if self._report is None:
            if problem.is_denial and not is_synced:
                raise problem
        elif problem.is_denial or not is_synced:
            self._report(problem)
            self.settled.set()
            if problem.is_denial:
                self._version = ""  # once access is back, only a list shows what exists
                return MAX_DENIED_PAUSE_S
        return MAX_PAUSE_S

    async def _list(self) -> None:
        names: set[tuple[str, str]] = set()
        version, is_whole = "", True
        pages = self._client.list_pages(self.resource, self.namespace, selector=SELECTOR)
        async for page in pages:
            version = text(as_map(page.get("metadata")).get("resourceVersion"))
            items = page.get("items")
            if not version or not isinstance(items, list):
                raise BrokenAnswer(f"the list of {self.resource.plural} has no items or version")
            while items:
                place = self._take_item(items.pop())
                if place is None:
                    is_whole = False
                else:
                    names.add((place.namespace, place.name))
        if is_whole:  # otherwise a missing object may be the one that could not be identified
            self._sink.listed(self.resource.kind, self.namespace, frozenset(names), digits(version))
        self._version = version
        self.epoch += 1
        self.synced.set()
        self.settled.set()
        if self._report is not None:
            self._report(None)

    def _take_item(self, live: object) -> Place | None:
        return self._sink.take(self.resource.kind, live if isinstance(live, dict) else {})

    def _place_of(self, live: Mapping[str, Any]) -> Place:
        try:
            return place_of(self.resource.kind, live)
        except Unreadable as problem:  # 410, because a new list shows what is gone
            raise ApiError(
                410, "Unreadable", f"a deleted {self.resource.kind}: {problem}"
            ) from problem

    async def _watch(self) -> bool:
        """Watch until the server ends it; return whether anything was received.

        Raises:
            ApiError: the watch failed, fell silent, or ended without any event.
        """
        heard = False
        async with self._client.watch(
            self.resource,
            self.namespace,
            resource_version=self._version,
            selector=SELECTOR,
            server_timeout_s=SERVER_TIMEOUT_S,
        ) as lines:
            try:
                async with asyncio.timeout(self._silence_s) as silence:
                    async for line in lines:
                        self._take(decoded_event(line))
                        heard = True
                        silence.reschedule(asyncio.get_running_loop().time() + self._silence_s)
            except TimeoutError as problem:
                raise ApiError(
                    0,
                    "SilentWatch",
                    f"no event or bookmark of {self.resource.plural} for {self._silence_s:g} s",
                ) from problem
        if not heard:
            raise ApiError(
                0, "WatchCut", f"the watch of {self.resource.plural} ended without events"
            )
        return heard

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, live = event.get("type"), event.get("object")
        if not isinstance(live, dict):
            raise BrokenAnswer(f"a watch event of {self.resource.plural} has no object")
        if kind == "ERROR":
            raise failure_of(live)
        version = text(as_map(live.get("metadata")).get("resourceVersion"))
        if kind in {"ADDED", "MODIFIED"}:
            self._take_item(live)
        elif kind == "DELETED":
            self._sink.gone(self._place_of(live))
        elif kind != "BOOKMARK":
            raise BrokenAnswer(f"a watch event of {self.resource.plural} has type {kind!r}")
        self._version = version or self._version


async def all_synced(reflectors: list[Reflector]) -> None:
    """Wait until every reflector has finished a list, or has reported why it cannot."""
    for reflector in reflectors:
        await reflector.settled.wait()

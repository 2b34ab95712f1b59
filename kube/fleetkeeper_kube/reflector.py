"""List and watch of one resource, with a new list when the watch cannot be resumed.

An object that a finished list did not contain is gone, even if its DELETED event was never seen (the
watch was cut, and the server's history does not reach back that far). Lists are consistent reads (no
resourceVersion): a list from the server's cache may be older than what is known, and would bring back
what was deleted. A watch that is silent for longer than the interval of bookmarks is cut and resumed
where it was.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from fleetkeeper_kube.bounds import decoded_event
from fleetkeeper_kube.client import PAGE, KubernetesClient
from fleetkeeper_kube.errors import ApiError, BrokenAnswer, failure_of
from fleetkeeper_kube.reading import Place, Unreadable, as_map, digits, place_of, text
from fleetkeeper_kube.resource import Resource

SILENCE_S: Final = 70.0
"""The API server sends a bookmark about every minute: a watch without any is dead."""
SERVER_TIMEOUT_S: Final = 290
"""After this time the server ends a watch, and it is resumed."""
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 3.0
MAX_DENIED_PAUSE_S: Final = 30.0
"""The pause after a denial: somebody must restore the rights."""
MAX_RETRY_AFTER_S: Final = 30.0
TRIES_BEFORE_LIST: Final = 3
"""Watches in a row that may break without an event before the list is read again."""


class Sink(Protocol):
    """The receiver of a reflector's objects. It is called in order, from one task."""

    def take(self, kind: str, live: Mapping[str, Any]) -> Place | None:
        """Store an object with any content: its writer must not be able to stop the watch.

        Return the object's place, or None if not even that can be read.
        """

    def gone(self, found: Place) -> None:
        """Remove an object that was deleted or lost the label; `found` is its last state."""

    def listed(
        self, kind: str, namespace: str | None, names: frozenset[tuple[str, str]], version: int
    ) -> None:
        """Remove what a finished list did not contain: all but `names` (namespace, name).

        An object written after `version` may exist although the list does not contain it.
        """


class Observer(Protocol):
    """The receiver of a reflector's failures."""

    def failed(self, reflector: Reflector, problem: ApiError) -> None:
        """Handle a failed list or watch, which is retried. An exception ends the reflector.

        It may set `settled`, so that nothing waits for the first list.
        """

    def recovered(self, reflector: Reflector) -> None:
        """Handle the first list or event after failures."""


def jittered(seconds: float) -> float:
    """Return somewhat less: processes that lost the same server do not come back in step."""
    return seconds * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards no secret


class Reflector:
    """The list and watch of one resource, in one namespace or in all."""

    def __init__(
        self,
        client: KubernetesClient,
        resource: Resource,
        namespace: str | None,
        sink: Sink,
        observer: Observer,
        *,
        selector: str = "",
        fields: str = "",
        page_size: int = PAGE,
        silence_s: float = SILENCE_S,
        monotonic: Callable[[], float] = time.monotonic,
        jitter: Callable[[float], float] = jittered,
    ) -> None:
        """`selector` selects objects by label and `fields` by field, for example `metadata.name=NAME`."""
        self.resource = resource
        self.namespace = namespace
        self.lists = 0
        """Number of finished lists since the start."""
        self.failures = 0
        """Number of failed lists and watches since the start."""
        self.last_contact: float | None = None
        """Monotonic time at which the server last confirmed what we know; None: never."""
        self.synced = asyncio.Event()
        """Set when the first list is finished."""
        self.settled = asyncio.Event()
        """Set when the first list is finished, or earlier by the observer."""
        self._client = client
        self._sink = sink
        self._observer = observer
        self._selector = selector
        self._fields = fields
        self._page_size = page_size
        self._silence_s = silence_s
        self._monotonic = monotonic
        self._jitter = jitter
        self._version = ""
        self._heard = False
        """True if the current watch had an event."""
        self._is_failing = False

    async def run(self) -> None:
        """List and watch until cancelled. No response of the server ends it, only the observer.

        Raises:
            Exception: of the observer.
        """
        pause_s, broken = FIRST_PAUSE_S, 0
        while True:
            self._heard = False
            problem = await self._until_broken()
            if self._heard:  # what ends a watch after an event is new, not one more in a row
                pause_s, broken = FIRST_PAUSE_S, 0
                if problem is None:
                    continue
            wait_s, limit_s = 0.0, MAX_PAUSE_S
            broken += 1
            if problem is not None:
                self.failures += 1
                self._is_failing = True
                self._observer.failed(self, problem)
                wait_s = min(problem.retry_after_s or 0.0, MAX_RETRY_AFTER_S)
                limit_s = MAX_DENIED_PAUSE_S if problem.is_denial else MAX_PAUSE_S
                if problem.is_expired or problem.is_refusal:
                    self._version = ""  # once access is back, only a list shows what exists
            if broken >= TRIES_BEFORE_LIST:
                self._version, broken = "", 0
            await asyncio.sleep(self._jitter(max(pause_s, wait_s)))
            pause_s = min(pause_s * 2, limit_s)

    async def _until_broken(self) -> ApiError | None:
        """List if needed, and watch; return what failed, or None if the server ended the watch."""
        try:
            if not self._version:
                await self._list()
            await self._watch()
        except ApiError as problem:
            return problem
        return None

    async def _list(self) -> None:
        names: set[tuple[str, str]] = set()
        version, is_whole = "", True
        pages = self._client.list_pages(
            self.resource,
            self.namespace,
            selector=self._selector,
            field_selector=self._fields,
            page_size=self._page_size,
        )
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
        self.lists += 1
        self.synced.set()
        self.settled.set()
        self._note_contact()

    def _take_item(self, live: object) -> Place | None:
        return self._sink.take(self.resource.kind, live if isinstance(live, dict) else {})

    def _place_of(self, live: Mapping[str, Any]) -> Place:
        try:
            return place_of(self.resource.kind, live)
        except Unreadable as problem:  # 410, because a new list shows what is gone
            raise ApiError(
                410, "Unreadable", f"a deleted {self.resource.kind}: {problem}"
            ) from problem

    async def _watch(self) -> None:
        """Watch until the server ends it.

        Raises:
            ApiError: the watch failed or fell silent.
        """
        async with self._client.watch(
            self.resource,
            self.namespace,
            resource_version=self._version,
            selector=self._selector,
            field_selector=self._fields,
            server_timeout_s=SERVER_TIMEOUT_S,
        ) as lines:
            try:
                async with asyncio.timeout(self._silence_s) as silence:
                    async for line in lines:
                        self._take(decoded_event(line))
                        self._heard = True
                        self._note_contact()
                        silence.reschedule(asyncio.get_running_loop().time() + self._silence_s)
            except TimeoutError as problem:
                raise ApiError(
                    0,
                    "SilentWatch",
                    f"no event or bookmark of {self.resource.plural} for {self._silence_s:g} s",
                ) from problem

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

    def _note_contact(self) -> None:
        self.last_contact = self._monotonic()
        if self._is_failing:
            self._is_failing = False
            self._observer.recovered(self)

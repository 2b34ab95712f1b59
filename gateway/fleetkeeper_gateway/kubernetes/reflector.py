"""List and watch of one resource, with a new list when the watch cannot be resumed.

An object that a finished list did not contain is gone, even if its DELETED event was never seen. Lists
are consistent reads (no resourceVersion): a list from the server's cache may be older than what we
know, and would bring a revoked key back.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import structlog

from fleetkeeper_gateway.kubernetes.client import KubernetesClient, Resource
from fleetkeeper_gateway.kubernetes.errors import ApiError, failure_of

log = structlog.get_logger(__name__)

SILENCE_S: Final = 70.0
"""The API server sends a bookmark about every minute: a watch without any is dead."""
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 5.0
MAX_RETRY_AFTER_S: Final = 30.0
TRIES_BEFORE_LIST: Final = 3
"""Watches in a row that may break without an event before the list is read again."""

Place = tuple[str, str]
"""Namespace and name of an object."""


class Sink(Protocol):
    """The receiver of the objects. It is called in order, and must accept any object.

    Objects are as the API server sent them: their authors may have written anything that the
    resource's schema allows.
    """

    def put(self, place: Place, found: Mapping[str, Any]) -> None:
        """Store an object that is new or changed."""

    def remove(self, place: Place) -> None:
        """Remove an object that was deleted or lost the label."""

    def listed(self) -> None:
        """Note that a list was finished: what was put and removed before it is the whole."""


class Reflector:
    """The list and watch of one resource in one namespace, or in all."""

    def __init__(
        self,
        client: KubernetesClient,
        resource: Resource,
        sink: Sink,
        *,
        namespace: str | None = None,
        selector: str = "",
        silence_s: float = SILENCE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.synced = asyncio.Event()
        """Set when the first list is finished."""
        self.settled = asyncio.Event()
        """Set when the first list is finished, or was refused for lack of rights."""
        self.last_contact: float | None = None
        """Monotonic time at which the server last confirmed what we know; None: never."""
        self.failures = 0
        """Number of failed lists and watches since the start."""
        self.lists = 0
        """Number of finished lists since the start."""
        self._client = client
        self._resource = resource
        self._sink = sink
        self._namespace = namespace
        self._selector = selector
        self._silence_s = silence_s
        self._monotonic = monotonic
        self._version = ""
        self._known: dict[Place, str] = {}
        """The resourceVersion of each object."""
        self._problem = ""
        self._heard = False
        """Whether the current watch had an event."""

    async def run(self) -> None:
        """List and watch until cancelled. No response of the server ends it."""
        pause_s, broken = FIRST_PAUSE_S, 0
        while True:
            wait_s = 0.0
            self._heard = False
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                if self._heard:
                    pause_s, broken = FIRST_PAUSE_S, 0
                    continue
                broken += 1
            except ApiError as problem:
                # A watch that breaks after an event is a new failure, not one more in a row.
                pause_s, broken = (FIRST_PAUSE_S, 1) if self._heard else (pause_s, broken + 1)
                self._note_failure(problem)
                wait_s = min(problem.retry_after_s or 0.0, MAX_RETRY_AFTER_S)
                if problem.is_expired or problem.is_refusal:
                    self._version = ""  # once access is back, only a list shows what exists
            if broken >= TRIES_BEFORE_LIST:
                self._version, broken = "", 0
            # Replicas of the gateway that lost the same server do not come back in step.
            await asyncio.sleep(max(pause_s, wait_s) * random.uniform(0.7, 1.0))  # noqa: S311 - no secret
            pause_s = min(pause_s * 2, MAX_PAUSE_S)

    async def _list(self) -> None:
        seen: set[Place] = set()
        version = ""
        pages = self._client.list_pages(self._resource, self._namespace, selector=self._selector)
        async for page in pages:
            version = str(page["metadata"].get("resourceVersion") or "")
            for found in page["items"]:
                seen.add(self._put(found))
            await asyncio.sleep(0)  # requests are served between two pages
        if not version:
            raise ApiError(0, "BrokenAnswer", f"a list of {self._resource.plural} has no version")
        for place in self._known.keys() - seen:
            self._remove(place)
        self._version = version
        self.lists += 1
        self._note_contact()
        self._sink.listed()
        self.synced.set()
        self.settled.set()

    async def _watch(self) -> None:
        """Watch until the server ends it.

        Raises:
            ApiError: the watch failed or fell silent.
        """
        async with self._client.watch(
            self._resource,
            self._namespace,
            version=self._version,
            selector=self._selector,
            silence_s=self._silence_s,
        ) as events:
            async for event in events:
                self._take(event)
                self._heard = True
                self._note_contact()

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, found = event.get("type"), event.get("object")
        if kind == "ERROR" and isinstance(found, dict):
            raise failure_of(found)
        if kind not in {"ADDED", "MODIFIED", "DELETED", "BOOKMARK"}:
            raise ApiError(0, "BrokenAnswer", f"an event of {self._resource.plural} has no type")
        if kind in {"ADDED", "MODIFIED"}:
            self._put(found)
        elif kind == "DELETED":
            self._remove(_place_of(found)[0])
        self._version = _version_of(found) or self._version

    def _put(self, found: object) -> Place:
        place, version = _place_of(found)
        if self._known.get(place) != version:  # a new list repeats what is known
            assert isinstance(found, dict)  # noqa: S101 - _place_of read it
            self._known[place] = version
            self._sink.put(place, found)
        return place

    def _remove(self, place: Place) -> None:
        if self._known.pop(place, None) is not None:
            self._sink.remove(place)

    def _note_contact(self) -> None:
        self.last_contact = self._monotonic()
        if self._problem:
            self._problem = ""
            log.info("watch restored", resource=self._resource.plural, namespace=self._namespace)

    def _note_failure(self, problem: ApiError) -> None:
        """Log a failure once, not each retry."""
        self.failures += 1
        if problem.is_refusal:
            self.settled.set()
        if problem.is_expired or self._problem == problem.reason:
            return
        self._problem = problem.reason
        log.warning(
            "watch failed; retrying",
            resource=self._resource.plural,
            namespace=self._namespace,
            error=str(problem),
        )


class Watch:
    """The reflectors of one resource in some namespaces, or in all."""

    def __init__(
        self,
        client: KubernetesClient,
        resource: Resource,
        sink: Sink,
        *,
        namespaces: Iterable[str] = (),
        selector: str = "",
        silence_s: float = SILENCE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the watch. Without `namespaces` it covers all namespaces."""
        self.reflectors: Sequence[Reflector] = [
            Reflector(
                client,
                resource,
                sink,
                namespace=namespace,
                selector=selector,
                silence_s=silence_s,
                monotonic=monotonic,
            )
            for namespace in (tuple(dict.fromkeys(namespaces)) or (None,))
        ]

    @property
    def synced(self) -> bool:
        """Return whether the objects were listed.

        A namespace that may not be read, or does not exist yet, does not keep the others waiting.
        """
        return all(one.settled.is_set() for one in self.reflectors) and any(
            one.synced.is_set() for one in self.reflectors
        )

    @property
    def last_contact(self) -> float | None:
        """Return the monotonic time of the last contact, the oldest of all namespaces."""
        times = [one.last_contact for one in self.reflectors]
        return None if None in times else min(time for time in times if time is not None)

    @property
    def failures(self) -> int:
        """Return the number of failed lists and watches since the start."""
        return sum(one.failures for one in self.reflectors)

    async def run(self) -> None:
        """List and watch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for reflector in self.reflectors:
                tasks.create_task(reflector.run())


def _place_of(found: object) -> tuple[Place, str]:
    """Return the place and the resourceVersion of an object.

    Raises:
        ApiError: 410, because only a new list shows what the object was.
    """
    metadata = found.get("metadata") if isinstance(found, dict) else None
    if isinstance(metadata, dict):
        name, version = metadata.get("name"), metadata.get("resourceVersion")
        if isinstance(name, str) and isinstance(version, str):
            return (str(metadata.get("namespace") or ""), name), version
    raise ApiError(410, "BrokenAnswer", "an object has no name or resourceVersion")


def _version_of(found: object) -> str:
    metadata = found.get("metadata") if isinstance(found, dict) else None
    version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    return version if isinstance(version, str) else ""

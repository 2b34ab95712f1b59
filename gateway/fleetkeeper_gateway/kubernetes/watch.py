"""The watch of one resource in some namespaces, or in all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import structlog

from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_kube.reading import Place, Unreadable, place_of
from fleetkeeper_kube.reflector import SILENCE_S, Reflector
from fleetkeeper_kube.resource import Resource

log = structlog.get_logger(__name__)

USER_AGENT: Final = "fleetkeeper-gateway"
PAGE: Final = 100
"""Objects in a page of a list. While one is decoded, no request is served: 100 services take 10 ms."""

ObjectName = tuple[str, str]
"""Namespace and name of an object."""


class Sink(Protocol):
    """The receiver of the objects. It is called in order, and must accept any object.

    Objects are as the API server sent them: their authors may have written anything that the
    resource's schema allows. One that cannot be read at all is only its metadata.
    """

    def put(self, place: ObjectName, found: Mapping[str, Any]) -> None:
        """Store an object that is new or changed."""

    def remove(self, place: ObjectName) -> None:
        """Remove an object that was deleted or lost the label."""

    def listed(self) -> None:
        """Note the end of a list: the objects put and removed before it are complete."""


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
        fields: str = "",
        silence_s: float = SILENCE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the parts. Without `namespaces` the watch covers all namespaces."""
        self.reflectors: Sequence[Reflector] = [
            Reflector(
                client,
                resource,
                namespace,
                _Changes(sink),
                _Failures(),
                selector=selector,
                fields=fields,
                page_size=PAGE,
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
        return all(reflector.settled.is_set() for reflector in self.reflectors) and any(
            reflector.synced.is_set() for reflector in self.reflectors
        )

    @property
    def last_contact(self) -> float | None:
        """Return the monotonic time of the last contact, the oldest of all namespaces."""
        times = [reflector.last_contact for reflector in self.reflectors]
        return None if None in times else min(time for time in times if time is not None)

    @property
    def failures(self) -> int:
        """Return the number of failed lists and watches since the start."""
        return sum(reflector.failures for reflector in self.reflectors)

    async def run(self) -> None:
        """List and watch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for reflector in self.reflectors:
                tasks.create_task(reflector.run())


class _Changes:
    """Forwards only new, changed and removed objects; a new list repeats known objects."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._known: dict[ObjectName, int] = {}
        """The version of each object."""

    def take(self, kind: str, live: Mapping[str, Any]) -> Place | None:
        try:
            place = place_of(kind, live)
        except Unreadable as problem:
            log.warning(
                "object skipped: no readable name or namespace", kind=kind, why=str(problem)
            )
            return None
        name = place.namespace, place.name
        if self._known.get(name) != place.version:
            self._known[name] = place.version
            self._sink.put(name, live)
        return place

    def gone(self, found: Place) -> None:
        self._remove((found.namespace, found.name))

    def listed(
        self, kind: str, namespace: str | None, names: frozenset[ObjectName], version: int
    ) -> None:
        del kind, namespace, version
        for name in self._known.keys() - names:
            self._remove(name)
        self._sink.listed()

    def _remove(self, name: ObjectName) -> None:
        if self._known.pop(name, None) is not None:
            self._sink.remove(name)


class _Failures:
    """Logs a failure once, not each retry."""

    def __init__(self) -> None:
        self._problem = ""

    def failed(self, reflector: Reflector, problem: ApiError) -> None:
        if problem.is_refusal:
            reflector.settled.set()
        if problem.is_expired or self._problem == problem.reason:
            return
        self._problem = problem.reason
        log.warning(
            "watch failed; retrying",
            resource=reflector.resource.plural,
            namespace=reflector.namespace,
            error=str(problem),
        )

    def recovered(self, reflector: Reflector) -> None:
        if self._problem:
            self._problem = ""
            log.info(
                "watch restored",
                resource=reflector.resource.plural,
                namespace=reflector.namespace,
            )

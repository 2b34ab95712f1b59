"""Keeps one kind in view: list, watch, and list again when the watch lost its place.

What a finished list did not contain is gone, also when its DELETED event was never seen (the watch
was cut, and the server forgot that far back). A watch that says nothing for longer than bookmarks
take is cut and taken up again where it was.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final, Protocol

from fleetkeeper.adapters.kubernetes.client import KubernetesClient
from fleetkeeper.adapters.kubernetes.errors import ApiError, BrokenAnswer, failure_of
from fleetkeeper.adapters.kubernetes.records import Seen, seen, version_of
from fleetkeeper.adapters.kubernetes.resources import Resource
from fleetkeeper.api.names import LABEL_MANAGED_BY, MANAGED_BY

SELECTOR: Final = f"{LABEL_MANAGED_BY}={MANAGED_BY}"
SILENCE_S: Final = 70.0
"""The API server sends a bookmark about every minute: a watch without one is dead."""
SERVER_TIMEOUT_S: Final = 290
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 3.0
TRIES_BEFORE_LIST: Final = 3
"""Watches in a row that broke without an event, before the list is read again."""


class Sink(Protocol):
    """Where a reflector puts what it sees. Called in order, from one task."""

    def known(self, kind: str, namespace: str, name: str) -> Seen | None:
        """What is held of an object now."""

    def put(self, found: Seen) -> None:
        """An object is so now."""

    def gone(self, found: Seen) -> None:
        """An object was deleted, or lost our label; `found` is its last state."""

    def listed(
        self, kind: str, namespace: str | None, names: frozenset[tuple[str, str]], version: int
    ) -> None:
        """A list is finished: what is not among `names` (namespace, name) is gone.

        An object written after `version` may be missing in the list and there all the same.
        """


class ReflectorClock(Protocol):
    """The clocks that a reflector needs."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment."""

    def jitter(self, seconds: float) -> float:
        """Somewhat less than `seconds`."""


class Reflector:
    """One kind, in one namespace or in all."""

    def __init__(
        self,
        client: KubernetesClient,
        resource: Resource,
        namespace: str | None,
        sink: Sink,
        clock: ReflectorClock,
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.resource = resource
        self.namespace = namespace
        self.epoch = 0
        """How many lists were finished."""
        self.synced = asyncio.Event()
        """Set when the first list is finished."""
        self.failures = 0
        """How many lists and watches failed, ever."""
        self._client = client
        self._sink = sink
        self._clock = clock
        self._silence_s = silence_s
        self._version = ""

    async def run(self) -> None:
        """Never ends. Everything that the server may answer is survived.

        Raises:
            ApiError: the kind may not be read at all (401, 403): waiting would hide it.
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
                if problem.status in {401, 403} and not self.synced.is_set():
                    raise
                if problem.is_expired or broken >= TRIES_BEFORE_LIST:
                    self._version, broken = "", 0
                wait_s = problem.retry_after_s or 0.0
            await asyncio.sleep(self._clock.jitter(max(pause_s, min(wait_s, LONGEST_PAUSE_S))))
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _list(self) -> None:
        names: set[tuple[str, str]] = set()
        version = ""
        pages = self._client.list_pages(self.resource, self.namespace, selector=SELECTOR)
        async for page in pages:
            version = str((page.get("metadata") or {}).get("resourceVersion") or "")
            items = page.get("items")
            if not version or not isinstance(items, list):
                raise BrokenAnswer(f"the list of {self.resource.plural} has no items or version")
            while items:
                live = items.pop()
                meta = live["metadata"]
                names.add((meta["namespace"], meta["name"]))
                self._put(live)
        self._sink.listed(
            self.resource.kind,
            self.namespace,
            frozenset(names),
            int(version) if version.isdigit() else 0,
        )
        self._version = version
        self.epoch += 1
        self.synced.set()

    def _put(self, live: Mapping[str, Any]) -> None:
        """Hands an object on, unless it is known as it is: the answer to our own write came first."""
        meta = live["metadata"]
        before = self._sink.known(self.resource.kind, meta["namespace"], meta["name"])
        if before is None or before.version < version_of(live):
            self._sink.put(seen(self.resource.kind, live, before))

    async def _watch(self) -> bool:
        """Whether anything was seen before the watch ended in good order or fell silent."""
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
                        self._take(_event(line))
                        heard = True
                        silence.reschedule(asyncio.get_running_loop().time() + self._silence_s)
            except TimeoutError as problem:
                raise ApiError(
                    0,
                    "SilentWatch",
                    f"nothing from {self.resource.plural} for {self._silence_s:g} s",
                ) from problem
        if not heard:
            raise ApiError(0, "WatchCut", f"the watch of {self.resource.plural} ended at once")
        return heard

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, live = event.get("type"), event.get("object")
        if not isinstance(live, dict):
            raise BrokenAnswer(f"a watch event of {self.resource.plural} has no object")
        if kind == "ERROR":
            raise failure_of(live)
        version = str((live.get("metadata") or {}).get("resourceVersion") or "")
        if kind in {"ADDED", "MODIFIED"}:
            self._put(live)
        elif kind == "DELETED":
            self._sink.gone(seen(self.resource.kind, live))
        elif kind != "BOOKMARK":
            raise BrokenAnswer(f"a watch event of {self.resource.plural} is of type {kind!r}")
        self._version = version or self._version


def _event(line: bytes) -> Mapping[str, Any]:
    try:
        event = json.loads(line)
    except ValueError as problem:
        raise BrokenAnswer(f"a watch line is not JSON: {line[:120]!r}") from problem
    if not isinstance(event, dict):
        raise BrokenAnswer(f"a watch line is no event: {line[:120]!r}")
    return event


async def all_synced(reflectors: list[Reflector]) -> None:
    """Waits until every reflector has finished a list."""
    for reflector in reflectors:
        await reflector.synced.wait()

"""The recorder of Kubernetes Events, which posts those of the planner and of the control loop.

An event costs the API server as much as a Deployment, and no pod waits for it. So events are posted
one at a time, when the queue is idle, or after a few seconds at the latest.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

from fleetkeeper.adapters.kubernetes.resources import EVENT, INFERENCE_SERVICE, LEASE
from fleetkeeper.adapters.kubernetes.writes import KubernetesWriter
from fleetkeeper.common.values import Event, Manifest
from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.service_entry import ServiceEntry
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper_contract import rfc3339
from fleetkeeper_kube.errors import ApiError

log = structlog.get_logger(__name__)


MAX_WAIT_S: Final = 5.0
"""After this an event is posted even if the queue is busy."""
MAX_WAITING: Final = 4096
"""Events that can wait; beyond this the oldest are dropped."""
DRAIN_S: Final = 2.0
"""Time to post the remaining events when the process ends."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An event, and until when it may wait (time of the event loop)."""

    key: Key
    manifest: Manifest
    due: float


class EventRecorder:
    """The event recorder. Events are for people, so a refused one is logged and dropped."""

    def __init__(
        self,
        writer: KubernetesWriter,
        cache: Cache,
        metrics: OperatorMetrics,
        *,
        now: Callable[[], float],
        instance: str,
        defects: Defects,
        lease: Key,
    ) -> None:
        """`lease` is the operator's Lease, on which events about the fleet are posted."""
        self._writer = writer
        self._cache = cache
        self._metrics = metrics
        self._now = now
        self._instance = instance
        self._defects = defects
        self._lease = lease
        self._waiting: deque[_Waiting] = deque()
        self._added = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of events that wait to be posted."""
        return len(self._waiting)

    def record(self, key: Key, event: Event) -> None:
        """Queue an event, as of now, on a service that still exists; `run` posts it."""
        with self._defects.contained("event", key):
            entry = self._cache.service(key)
            if entry is not None:
                self._add(key, _service_reference(entry), event)

    def record_fleet(self, event: Event) -> None:
        """Queue an event about the fleet, as of now, on the operator's Lease."""
        self._add(self._lease, {"apiVersion": LEASE.api_version, "kind": LEASE.kind}, event)

    def _add(self, key: Key, about: Mapping[str, str], event: Event) -> None:
        if len(self._waiting) == MAX_WAITING:
            log.warning("event dropped: queue full", waiting=MAX_WAITING)
            self._waiting.popleft()
        manifest = event_manifest(key, about, event, self._now(), self._instance)
        due = asyncio.get_running_loop().time() + MAX_WAIT_S
        self._waiting.append(_Waiting(key, manifest, due))
        self._added.set()

    async def run(self, idle: Callable[[], Awaitable[None]]) -> None:
        """Post the queued events in order; never return. `idle` returns when the queue is idle.

        Raises:
            LeaseLost: this process must not write anymore.
        """
        while True:
            await self._added.wait()
            self._added.clear()
            while self._waiting:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._waiting[0].due):
                        await idle()
                await self._post_first()

    async def drain(self) -> None:
        """Post the remaining events for at most `DRAIN_S`. Do not call this while `run` runs.

        Raises:
            LeaseLost: this process must not write anymore.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while self._waiting:
                    await self._post_first()

    async def _post_first(self) -> None:
        """Post the first event, then remove it, unless it was dropped meanwhile.

        If the post is cancelled, the event is sent again; its name prevents a duplicate.
        """
        first = self._waiting[0]
        await self._send(first.key, first.manifest)
        if self._waiting[0] is first:
            self._waiting.popleft()

    async def _send(self, key: Key, manifest: Manifest) -> None:
        with self._defects.contained("event", key):
            try:
                await self._writer.post_event(key.namespace, manifest)
            except ApiError as problem:
                self._metrics.errors.labels(problem.reason).inc()
                log.warning("event not posted", service=str(key), error=str(problem))


def _service_reference(entry: ServiceEntry) -> dict[str, str]:
    return {
        "apiVersion": INFERENCE_SERVICE.api_version,
        "kind": INFERENCE_SERVICE.kind,
        "uid": entry.uid,
        "resourceVersion": str(entry.version),
    }


def event_manifest(
    key: Key, about: Mapping[str, str], event: Event, moment: float, instance: str
) -> dict[str, Any]:
    """Return a Kubernetes Event on the object `about`. Its name makes a repeated post harmless."""
    stamp = rfc3339.format(moment)
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": f"{key.name}.{int(moment * 1e6):x}", "namespace": key.namespace},
        "involvedObject": {**about, "namespace": key.namespace, "name": key.name},
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:1024],
        "source": {"component": "fleetkeeper"},
        "reportingComponent": "fleetkeeper.io/operator",
        "reportingInstance": instance[:128],
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }

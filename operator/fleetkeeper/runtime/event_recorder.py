"""The recorder of Kubernetes Events: all events of the planner and the control loop are posted here.

An event costs the API server as much as a Deployment, and no pod waits for it. So the planner's
events are posted one at a time, when the queue is idle, or after a few seconds at the latest.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import structlog

from fleetkeeper.adapters.kubernetes.errors import ApiError
from fleetkeeper.adapters.kubernetes.resources import EVENT, INFERENCE_SERVICE, LEASE
from fleetkeeper.adapters.kubernetes.writes import KubernetesWriter
from fleetkeeper.api import rfc3339
from fleetkeeper.common.values import Event, Manifest
from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.metrics import OperatorMetrics
from fleetkeeper.runtime.queue import Key

log = structlog.get_logger(__name__)


MAX_WAIT_S: Final = 5.0
"""After this an event is posted even if the queue is busy."""
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
        metrics: OperatorMetrics,
        *,
        now: Callable[[], float],
        instance: str,
        defects: Defects,
    ) -> None:
        self._writer = writer
        self._metrics = metrics
        self._now = now
        self._instance = instance
        self._defects = defects
        self._waiting: deque[_Waiting] = deque()
        self._added = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of events that wait to be posted."""
        return len(self._waiting)

    def record(self, key: Key, resource: Manifest, event: Event) -> None:
        """Queue an event, as of now, on the service with the manifest `resource`; `run` posts it."""
        manifest = event_manifest(key, resource, event, self._now(), self._instance)
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
        """Post the first event, then remove it.

        If the post is cancelled, the event is sent again; its name prevents a duplicate.
        """
        first = self._waiting[0]
        await self._send(first.key, first.manifest)
        self._waiting.popleft()

    async def post(self, key: Key, resource: Manifest, event: Event) -> None:
        """Post one event at once on the service with the manifest `resource`.

        Raises:
            LeaseLost: this process must not write anymore.
        """
        await self._send(key, event_manifest(key, resource, event, self._now(), self._instance))

    async def post_fleet(self, lease: Key, event: Event) -> None:
        """Post one event about the fleet on the operator's Lease.

        Raises:
            LeaseLost: this process must not write anymore.
        """
        about = {"apiVersion": LEASE.api_version, "kind": LEASE.kind}
        manifest = _event(lease, about, event, self._now(), self._instance)
        await self._send(lease, manifest)

    async def _send(self, key: Key, manifest: Manifest) -> None:
        with self._defects.contained("notice", key):
            try:
                await self._writer.post_event(key.namespace, manifest)
            except ApiError as problem:
                self._metrics.errors.labels(problem.reason).inc()
                log.warning("event not posted", service=str(key), error=str(problem))


def event_manifest(
    key: Key, resource: Manifest, event: Event, moment: float, instance: str
) -> dict[str, Any]:
    """Return a Kubernetes Event on the InferenceService. Its name makes a repeated post harmless."""
    about = {
        "apiVersion": INFERENCE_SERVICE.api_version,
        "kind": INFERENCE_SERVICE.kind,
        "uid": resource["metadata"].get("uid", ""),
        "resourceVersion": resource["metadata"].get("resourceVersion", ""),
    }
    return _event(key, about, event, moment, instance)


def _event(
    key: Key, about: dict[str, str], event: Event, moment: float, instance: str
) -> dict[str, Any]:
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

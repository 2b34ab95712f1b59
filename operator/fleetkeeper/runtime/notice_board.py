"""Events on a service: the one place that posts what the planner and the control loop have to tell.

An event costs the API server as much as a Deployment, and no pod waits for it: what the planner has
to tell is posted one at a time, when no service wants a look, and a few seconds later anyhow.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import structlog

from fleetkeeper.adapters.kubernetes.errors import ApiError
from fleetkeeper.adapters.kubernetes.resources import EVENT, INFERENCE_SERVICE, LEASE
from fleetkeeper.adapters.kubernetes.writes import KubernetesWriter
from fleetkeeper.plan.model import Manifest, Notice
from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.metrics import OperatorMetrics
from fleetkeeper.runtime.queue import Key

log = structlog.get_logger(__name__)


LONGEST_WAIT_S: Final = 5.0
"""After this a notice is posted whatever else is under way."""
DRAIN_S: Final = 2.0
"""For what is left to post when the process ends."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A notice as the event that it will be, and until when it may wait (the loop's clock)."""

    key: Key
    manifest: Manifest
    due: float


class NoticeBoard:
    """Posts notices; they are for people, so one that the server does not take is logged and let go."""

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
        """Notices that wait to be posted."""
        return len(self._waiting)

    def tell(self, key: Key, resource: Manifest, notice: Notice) -> None:
        """Takes a notice of this moment on the service whose manifest `resource` is; `run` posts it."""
        manifest = event_manifest(key, resource, notice, self._now(), self._instance)
        due = asyncio.get_running_loop().time() + LONGEST_WAIT_S
        self._waiting.append(_Waiting(key, manifest, due))
        self._added.set()

    async def run(self, calm: Callable[[], Awaitable[None]]) -> None:
        """Posts what was told, in order; never ends. `calm` returns when no service wants a look.

        Raises:
            LeaseLost: this process may not write any more.
        """
        while True:
            await self._added.wait()
            self._added.clear()
            while self._waiting:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._waiting[0].due):
                        await calm()
                await self._post_first()

    async def drain(self) -> None:
        """Posts what is left, for `DRAIN_S` at most. Not beside `run`.

        Raises:
            LeaseLost: this process may not write any more.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while self._waiting:
                    await self._post_first()

    async def _post_first(self) -> None:
        """Taken off only when posted: one that was cut off is sent again, and its name makes it one."""
        first = self._waiting[0]
        await self._send(first.key, first.manifest)
        self._waiting.popleft()

    async def post(self, key: Key, resource: Manifest, notice: Notice) -> None:
        """One event, at once, on the service whose manifest `resource` is.

        Raises:
            LeaseLost: this process may not write any more.
        """
        await self._send(key, event_manifest(key, resource, notice, self._now(), self._instance))

    async def post_fleet(self, lease: Key, notice: Notice) -> None:
        """Post one event about the fleet, on the operator's Lease.

        Raises:
            LeaseLost: this process may not write any more.
        """
        about = {"apiVersion": LEASE.api_version, "kind": LEASE.kind}
        manifest = _event(lease, about, notice, self._now(), self._instance)
        await self._send(lease, manifest)

    async def _send(self, key: Key, manifest: Manifest) -> None:
        with self._defects.contained("notice", key):
            try:
                await self._writer.post_event(key.namespace, manifest)
            except ApiError as problem:
                self._metrics.errors.labels(problem.reason).inc()
                log.warning("event not posted", service=str(key), error=str(problem))


def event_manifest(
    key: Key, resource: Manifest, notice: Notice, moment: float, instance: str
) -> dict[str, Any]:
    """A Kubernetes event on the InferenceService. Its name makes it one, however often it is sent."""
    about = {
        "apiVersion": INFERENCE_SERVICE.api_version,
        "kind": INFERENCE_SERVICE.kind,
        "uid": resource["metadata"].get("uid", ""),
        "resourceVersion": resource["metadata"].get("resourceVersion", ""),
    }
    return _event(key, about, notice, moment, instance)


def _event(
    key: Key, about: dict[str, str], notice: Notice, moment: float, instance: str
) -> dict[str, Any]:
    stamp = _timestamp(moment)
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": f"{key.name}.{int(moment * 1e6):x}", "namespace": key.namespace},
        "involvedObject": {**about, "namespace": key.namespace, "name": key.name},
        "type": notice.type,
        "reason": notice.reason,
        "message": notice.message[:1024],
        "source": {"component": "fleetkeeper"},
        "reportingComponent": "fleetkeeper.io/operator",
        "reportingInstance": instance[:128],
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }


def _timestamp(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

"""Events on a service: the one place that posts what the planner and the control loop have to tell."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import structlog

from fleetkeeper.adapters.kubernetes.errors import ApiError
from fleetkeeper.adapters.kubernetes.resources import EVENT, INFERENCE_SERVICE
from fleetkeeper.adapters.kubernetes.writes import KubernetesWriter
from fleetkeeper.plan.model import Manifest, Notice
from fleetkeeper.runtime.metrics import OperatorMetrics
from fleetkeeper.runtime.queue import Key

log = structlog.get_logger(__name__)


class NoticeBoard:
    """Posts notices; they are for people, so one that the server does not take is logged and let go."""

    def __init__(
        self,
        writer: KubernetesWriter,
        metrics: OperatorMetrics,
        *,
        now: Callable[[], float],
        instance: str,
    ) -> None:
        self._writer = writer
        self._metrics = metrics
        self._now = now
        self._instance = instance

    async def post(self, key: Key, resource: Manifest, notice: Notice) -> None:
        """One event on the service whose manifest `resource` is.

        Raises:
            LeaseLost: this process may not write any more.
        """
        manifest = event_manifest(key, resource, notice, self._now(), self._instance)
        try:
            await self._writer.post_event(key.namespace, manifest)
        except ApiError as problem:
            self._metrics.errors.labels(problem.reason).inc()
            log.warning("event not posted", service=str(key), error=str(problem))


def event_manifest(
    key: Key, resource: Manifest, notice: Notice, moment: float, instance: str
) -> dict[str, Any]:
    """A Kubernetes event on the InferenceService. Its name makes it one, however often it is sent."""
    stamp = _timestamp(moment)
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": f"{key.name}.{int(moment * 1e6):x}", "namespace": key.namespace},
        "involvedObject": {
            "apiVersion": INFERENCE_SERVICE.api_version,
            "kind": INFERENCE_SERVICE.kind,
            "namespace": key.namespace,
            "name": key.name,
            "uid": resource["metadata"].get("uid", ""),
            "resourceVersion": resource["metadata"].get("resourceVersion", ""),
        },
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

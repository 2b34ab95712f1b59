"""What the control loop does to the cluster besides orders: pods replaced, events posted."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from fleetkeeper.adapters.kubernetes.errors import ApiError
from fleetkeeper.adapters.kubernetes.resources import POD
from fleetkeeper.adapters.kubernetes.writes import KubernetesWriter
from fleetkeeper.plan.model import Notice
from fleetkeeper.runtime.cache import Cache
from fleetkeeper.runtime.metrics import OperatorMetrics
from fleetkeeper.runtime.notice_board import NoticeBoard
from fleetkeeper.runtime.queue import Key

log = structlog.get_logger(__name__)


class ControlActs:
    """Writes that no look of the planner makes."""

    def __init__(
        self,
        writer: KubernetesWriter,
        cache: Cache,
        metrics: OperatorMetrics,
        *,
        now: Callable[[], float],
        instance: str,
    ) -> None:
        self._writer = writer
        self._cache = cache
        self._metrics = metrics
        self._board = NoticeBoard(writer, metrics, now=now, instance=instance)

    async def replace_pod(self, key: Key, pod: str, uid: str, why: str) -> None:
        """Deletes that very pod as it was last seen, with its own grace period, in which it drains.

        Its ReplicaSet makes another. A refusal is logged: a later tick decides afresh.
        """
        version = self._cache.version(key, POD.kind, pod)
        if version is None:
            return
        try:
            await self._writer.delete(
                POD, key.namespace, pod, uid=uid, resource_version=str(version)
            )
        except ApiError as problem:
            self._metrics.errors.labels(problem.reason).inc()
            log.warning("pod not replaced", service=str(key), pod=pod, why=why, error=str(problem))
            return
        self._cache.deleting(key, POD.kind, pod)
        log.info("replaced", service=str(key), pod=pod, why=why)

    async def post_notice(self, key: Key, notice: Notice) -> None:
        """Posts an event on the service, if it still exists."""
        entry = self._cache.service(key)
        if entry is None:
            return
        await self._board.post(key, entry.unpack(), notice)

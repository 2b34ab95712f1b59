"""Replacement of pods that confirm in a direct read why they must be replaced."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from fleetkeeper.adapters.kubernetes.resources import POD
from fleetkeeper.adapters.kubernetes.writes import KubernetesWriter
from fleetkeeper.autoscale.rules.removal import Removal
from fleetkeeper.autoscale.signals.samples import PodSample
from fleetkeeper.autoscale.types import PodView
from fleetkeeper.common.values import Manifest
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper_kube.errors import ApiError

log = structlog.get_logger(__name__)

ReadPod = Callable[[PodView], Awaitable[PodSample | None]]
"""Reads one pod's metrics port; returns None if there is no usable answer."""
IsUnchanged = Callable[[Key, Manifest], Awaitable[bool]]
"""Reads a service from the API server; returns whether it is still the cached one."""


class PodReplacer:
    """The deletion of pods that the control loop wants replaced."""

    def __init__(
        self,
        writer: KubernetesWriter,
        cache: Cache,
        metrics: OperatorMetrics,
        *,
        is_unchanged: IsUnchanged,
        read_pod: ReadPod | None,
    ) -> None:
        """With `read_pod=None` pods may not be read directly, and none is ever deleted."""
        self._writer = writer
        self._cache = cache
        self._metrics = metrics
        self._is_unchanged = is_unchanged
        self._read_pod = read_pod

    async def replace(self, key: Key, pod: PodView, removal: Removal) -> bool:
        """Delete exactly this pod in its last seen version; return whether it was deleted.

        The pod drains within its own grace period, and its ReplicaSet creates another. It is deleted
        only if a direct read confirms the cause; without a usable answer it is kept. It is kept, too,
        if the API server holds another version of its service than the one that was decided on: the
        service may be about to be deleted without its pods. A refusal is logged, and a later tick
        decides again.
        """
        if self._cache.unreadable(key):
            log.warning("pod kept: an object of its service is unreadable", service=str(key))
            return False
        entry = self._cache.service(key)
        version = self._cache.version(key, POD.kind, pod.name)
        if entry is None or version is None:
            return False
        about = {"service": str(key), "pod": pod.name, "why": removal.why}
        sample = await self._read_pod(pod) if self._read_pod is not None else None
        if not removal.is_confirmed_by(sample):
            said = "no usable answer" if sample is None else "its metrics do not show the cause"
            log.warning("pod kept: not confirmed by a direct read", **about, said=said)
            return False
        try:
            if not await self._is_unchanged(key, entry.unpack()):
                log.info("pod kept: its service changed", **about)
                return False
            await self._writer.delete(
                POD, key.namespace, pod.name, uid=pod.uid, resource_version=str(version)
            )
        except ApiError as problem:
            self._metrics.errors.labels(problem.reason).inc()
            log.warning("pod replacement failed", **about, error=str(problem))
            return False
        self._cache.deleting(key, POD.kind, pod.name)
        log.info("pod replaced", **about)
        return True

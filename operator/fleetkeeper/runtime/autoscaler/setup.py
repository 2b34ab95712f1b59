"""Construction of the control loop from the settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache as once
from functools import partial

import structlog

from fleetkeeper.adapters.clock import SystemClock
from fleetkeeper.adapters.engine import Engines
from fleetkeeper.adapters.kubernetes.lease import LeaderLease
from fleetkeeper.adapters.kubernetes.writes import KubernetesWriter
from fleetkeeper.adapters.prometheus import Prometheus, PrometheusSettings
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.runtime.autoscaler.acts import ControlActs
from fleetkeeper.runtime.autoscaler.loop import ControlLoop
from fleetkeeper.runtime.autoscaler.metrics import ControlMetrics
from fleetkeeper.runtime.autoscaler.sources import (
    Keyless,
    MeasuredSource,
    SignedEngines,
    read_control_key,
    read_pod,
)
from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.metrics import OperatorMetrics
from fleetkeeper.runtime.queue import Key, KeyedQueue
from fleetkeeper.runtime.settings import Settings
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.gpu_ledger import GpuLedger

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ControlParts:
    """The control loop and what must be closed after it."""

    loop: ControlLoop
    engines: Engines
    prometheus: Prometheus | None

    async def close(self) -> None:
        """Close connections and threads."""
        await self.engines.close()
        if self.prometheus is not None:
            self.prometheus.close()


def build_control(
    settings: Settings,
    context: PlanContext,
    *,
    cache: Cache,
    queue: KeyedQueue,
    writer: KubernetesWriter,
    lease: LeaderLease,
    metrics: OperatorMetrics,
    defects: Defects,
    clock: SystemClock,
    ledger: GpuLedger,
) -> ControlParts:
    """Return the control loop, connected to Prometheus and the engines' control ports.

    Raises:
        SettingsError: The control key cannot be used.
    """
    has_lease = settings.leader.enabled

    def may_send() -> bool:
        return lease.holds or not has_lease

    @once
    def started() -> int:
        return int(clock.now())

    def epoch() -> int:
        return lease.epoch if has_lease else started()

    key = read_control_key(settings.control_key_file) if settings.control_key_file else None
    if key is None:
        log.warning("no control key: limits are reported but not applied", setting="controlKeyFile")
    prometheus = _prometheus(settings, clock)
    if prometheus is None:
        how = "pods are read directly" if settings.direct_reads else "nothing is measured"
        log.warning("no Prometheus configured", then=how, setting="prometheusUrl")
    engines = Engines(clock.now)
    acts = ControlActs(
        writer,
        cache,
        metrics,
        read_pod=partial(read_pod, engines) if settings.direct_reads else None,
        now=clock.now,
        instance=settings.process_identity,
        defects=defects,
        lease=Key(settings.operator_namespace, settings.leader.lease_name),
    )
    loop = ControlLoop(
        cache=cache,
        queue=queue,
        context=context,
        source=MeasuredSource(
            prometheus,
            engines if settings.direct_reads else None,
            may_send=may_send,
            monotonic=clock.monotonic,
            deadline_s=min(4.0, 0.8 * settings.tick_s),
        ),
        engines=Keyless()
        if key is None
        else SignedEngines(engines, key, epoch=epoch, may_send=may_send, now=clock.now),
        replace_pod=acts.replace_pod,
        post_event=acts.post_event,
        post_fleet_event=acts.post_fleet_event,
        metrics=ControlMetrics(metrics.registry),
        defects=defects,
        now=clock.now,
        monotonic=clock.monotonic,
        can_steer=key is not None,
        tick_s=settings.tick_s,
        ledger=ledger,
    )
    return ControlParts(loop, engines, prometheus)


def _prometheus(settings: Settings, clock: SystemClock) -> Prometheus | None:
    url = settings.prometheus_url.get_secret_value()
    if not url:
        return None
    return Prometheus(
        PrometheusSettings(
            url,
            selector=settings.prometheus_selector,
            ca_file=settings.prometheus_ca_file,
            token_file=settings.prometheus_token_file,
            deadline_s=min(4.0, 0.8 * settings.tick_s),
        ),
        clock.monotonic,
    )

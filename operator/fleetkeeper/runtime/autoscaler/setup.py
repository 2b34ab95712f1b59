"""Construction of the control loop from the settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Final

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetkeeper.adapters.clock import SystemClock
from fleetkeeper.adapters.engine import Engines, Signer, read_signing_key
from fleetkeeper.adapters.kubernetes.lease import LeaderLease
from fleetkeeper.adapters.kubernetes.writes import KubernetesWriter
from fleetkeeper.adapters.prometheus import Prometheus, PrometheusSettings
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.runtime.autoscaler.loop import ControlLoop
from fleetkeeper.runtime.autoscaler.metrics import ControlMetrics
from fleetkeeper.runtime.autoscaler.pod_replacement import IsUnchanged, PodReplacer
from fleetkeeper.runtime.autoscaler.sources import MeasuredSource, read_pod
from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.event_recorder import EventRecorder
from fleetkeeper.runtime.queue import KeyedQueue
from fleetkeeper.runtime.settings import Settings, SettingsError
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.gpu_ledger import GpuLedger
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics

log = structlog.get_logger(__name__)

DEADLINE_S: Final = 4.0
"""Time for all measurements of a tick, which takes 5 s."""


@dataclass(frozen=True, slots=True)
class ControlParts:
    """The control loop and what must be closed after it."""

    loop: ControlLoop
    engines: Engines
    prometheus: Prometheus | None

    async def close(self) -> None:
        """Close connections."""
        await self.engines.close()
        if self.prometheus is not None:
            await self.prometheus.close()


def build_control(
    settings: Settings,
    context: PlanContext,
    *,
    cache: Cache,
    queue: KeyedQueue,
    writer: KubernetesWriter,
    is_unchanged: IsUnchanged,
    lease: LeaderLease,
    recorder: EventRecorder,
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

    signer = None
    if settings.control_key_file:
        key = _read_control_key(settings.control_key_file)
        signer = Signer(key, epoch=epoch, may_sign=may_send)
    else:
        log.warning("no control key: limits are reported but not applied", setting="controlKeyFile")
    prometheus = _prometheus(settings)
    if prometheus is None:
        how = "pods are read directly" if settings.direct_reads else "nothing is measured"
        log.warning("no Prometheus configured", then=how, setting="prometheusUrl")
    engines = Engines(clock.now, signer)
    replacer = PodReplacer(
        writer,
        cache,
        metrics,
        is_unchanged=is_unchanged,
        read_pod=partial(read_pod, engines) if settings.direct_reads else None,
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
            defects=defects,
            deadline_s=DEADLINE_S,
        ),
        engines=engines,
        replace_pod=replacer.replace,
        recorder=recorder,
        metrics=ControlMetrics(metrics.registry),
        defects=defects,
        now=clock.now,
        monotonic=clock.monotonic,
        can_steer=signer is not None,
        ledger=ledger,
    )
    return ControlParts(loop, engines, prometheus)


def _prometheus(settings: Settings) -> Prometheus | None:
    url = settings.prometheus_url.get_secret_value()
    if not url:
        return None
    return Prometheus(
        PrometheusSettings(
            url,
            selector=settings.prometheus_selector,
            batch_selector=settings.prometheus_batch_selector,
            ca_file=settings.prometheus_ca_file,
            token_file=settings.prometheus_token_file,
            deadline_s=DEADLINE_S,
        )
    )


def _read_control_key(file: Path) -> Ed25519PrivateKey:
    """Return the private key that signs limits requests.

    Raises:
        SettingsError: The file cannot be read, or is not an Ed25519 private key in PEM.
    """
    try:
        return read_signing_key(file.read_bytes())
    except (OSError, TypeError, ValueError) as problem:
        raise SettingsError(
            f"cannot use the control key in {file}: {problem}. "
            "Create a key pair with `fleetkeeper signing-keys create`."
        ) from problem

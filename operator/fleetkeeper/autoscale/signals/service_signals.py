"""The signals of a service, with a grade of their reliability, and the memory that they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from fleetkeeper.autoscale.signals.pod_history import PodTrack
from fleetkeeper.autoscale.signals.reported_runs import Run
from fleetkeeper.autoscale.signals.samples import Counters, Gauges, Source
from fleetkeeper.autoscale.signals.windows import Window
from fleetkeeper.autoscale.types import Grade

NO_COUNTERS: Final = Counters()
NO_GAUGES: Final = Gauges()


@dataclass(frozen=True, slots=True)
class TokenUse:
    """Exponentially weighted sums; their quotients are tokens per request."""

    requests: float = 0.0
    prompt: float = 0.0
    generation: float = 0.0


@dataclass(frozen=True, slots=True)
class SignalsMemory:
    """State that the next tick needs: samples by pod, last windows, slowest step, token use, hung pods."""

    tracks: Mapping[str, PodTrack] = field(default_factory=lambda: MappingProxyType({}))
    windows: tuple[Window, ...] = ()
    window_start: float = 0.0
    slowest_step_s: float = 0.0
    tokens: TokenUse = TokenUse()
    hangs: Mapping[str, Run] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Signals:
    """The measurements of a service. Sums over the reporting pods unless noted otherwise."""

    grade: Grade = Grade.STALE
    coverage: float = 0.0
    """Reporting pods divided by ready pods."""
    ready_pods: int = 0
    reporting_pods: int = 0
    """Pods with rates."""
    source: Source = Source.PROMETHEUS
    rates: Counters = NO_COUNTERS
    """Per second over 30 s."""
    gauges: Gauges = NO_GAUGES
    """Current values, summed, except the oldest waits (mean over pods)."""
    queue_wait_s: float = 0.0
    batch_time_s: float = 0.0
    waiting: float = 0.0
    kv_ratio: float = 0.0
    kv_ratio_max: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    memory_used_ratio: float = 0.0
    memory_peak_ratio: float = 0.0
    memory_peak_pod: str = ""
    memory_own: bool = True
    live_limits: bool = True
    hung_pods: tuple[str, ...] = ()
    """Pods that report a hung engine. They need not be ready."""
    long_hung_pods: tuple[str, ...] = ()
    """Pods that have reported a hung engine for HANG_S. They need not be ready."""
    running_by_pod: tuple[tuple[str, float], ...] = ()
    generation_by_pod: tuple[tuple[str, float], ...] = ()
    missing: tuple[str, ...] = ()
    windows: tuple[Window, ...] = ()
    window: Window | None = None
    """The window that closed in this tick, if any."""
    overdue_pods: int = 0
    """Reporting pods whose next scrape is late."""
    warmed_up_pods: int = 0
    old_pods: int = 0
    """Warmed-up pods whose newest sample is too old to be used."""
    rejudged: bool = False
    """True if the objectives changed, and attainment is counted from zero."""
    is_direct: bool = False
    """True if every sample of the rates was read directly from its pod."""
    ttft_s: float | None = None
    """Mean of streamed answers over 30 s, for display; no decision uses it."""
    itl_s: float | None = None
    """Mean of streamed answers over 30 s, for display; no decision uses it."""

    @property
    def known(self) -> bool:
        """Return whether any decision may use these signals."""
        return self.grade is not Grade.STALE

    @property
    def arrivals_per_s(self) -> float:
        """Distinct requests that arrive per second, all tiers, including those that are refused."""
        rates = self.rates
        return rates.arrivals_realtime + rates.arrivals_standard + rates.arrivals_batch

    @property
    def served_per_s(self) -> float:
        """Requests that are first scheduled per second, all tiers."""
        rates = self.rates
        return rates.wait_count_realtime + rates.wait_count_standard + rates.wait_count_batch

    @property
    def preemptions_per_pod_s(self) -> float:
        """Preemptions per second and pod."""
        return self.rates.preemptions / self.reporting_pods if self.reporting_pods else 0.0

    @property
    def idle(self) -> bool:
        """Return whether every ready pod reports no arrivals for 30 s, no waiting and no running requests."""
        return (
            self.known
            and self.coverage >= 1.0
            and self.arrivals_per_s == 0.0
            and self.gauges.running == 0.0
            and self.waiting == 0.0
        )

    def without_batch(self) -> Signals:
        """Return the signals of realtime and standard alone.

        The batch process sends as much as engines take. So requests of tier batch that arrive, run or wait
        say nothing about the replicas that are needed: the deadlines do. Samples hold what runs of all tiers
        together, so batch is taken to have the share of it that it has of the scheduled requests.
        """
        rates, gauges = self.rates, self.gauges
        served = self.served_per_s
        left = 1.0 - rates.wait_count_batch / served if served > 0 else 1.0
        others = rates.arrivals_realtime + rates.arrivals_standard
        is_alone = others + gauges.waiting_realtime + gauges.waiting_standard == 0
        return replace(
            self,
            rates=rates._replace(
                arrivals_batch=0.0,
                wait_count_batch=0.0,
                wait_sum_s_batch=0.0,
                wait_within_batch=0.0,
            ),
            gauges=gauges._replace(
                waiting_batch=0.0, oldest_wait_s_batch=0.0, running=gauges.running * left
            ),
            kv_ratio=self.kv_ratio * left,
            queue_wait_s=0.0 if is_alone else self.queue_wait_s,
            waiting=gauges.waiting_realtime + gauges.waiting_standard,
        )

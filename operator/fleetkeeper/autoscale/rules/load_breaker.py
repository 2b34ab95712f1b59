"""The load breaker: one state machine per tier that protects users until new replicas are ready.

Pressure x = max(W / objective, B / objective, KV / 0.95, Q / (C* x ready)), of the judged tiers.
W: queue wait. B: batch time. KV: used share of the KV cache. Q: waiting requests. C*: capacity.

- Batch opens first, if there are batch requests. Standard follows and sheds a share of its requests,
  unless its queue drains: a draining queue does not need load shedding, however long its last requests
  waited. Realtime never opens on pressure, only if its oldest request waits longer than a client does.
- Without signals the breaker closes: live traffic is never shed because metrics are missing (the
  engines have an admission rule of their own).
- On aging signals no tier opens or admits less: the overload may be over.
- While every ready replica is warming up, at most a minute, the tiers stay as they are.
- Prometheus alone never sheds more if the pods can be read directly: from the first tick above a
  threshold they are read, and only their own samples let a tier open or admit less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.autoscale.constants import (
    ADMIT_STEP,
    BATCH_OPEN,
    BATCH_OPEN_TICKS,
    CLEAN,
    CLEAN_TICKS,
    CLIENT_WAIT_S,
    HALF_OPEN_RATIO,
    LOAD_OPEN_S,
    MIN_REQUESTS,
    PRESSURE_KV_RATIO,
    RATE_S,
    REJECT_MAX,
    REJECT_STEP,
    SERVED_FACTOR,
    STANDARD_OPEN,
    STANDARD_OPEN_TICKS,
    WARM_UP_S,
)
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import Admission, ControlSettings, Grade
from fleetkeeper_contract.tiers import TIER_LABELS


@dataclass(frozen=True, slots=True)
class TierBreaker:
    """The breaker of one tier."""

    state: BreakerState = BreakerState.CLOSED
    since: float = 0.0
    over: int = 0
    """Consecutive ticks above its threshold."""
    clean: int = 0
    """Clean ticks while half-open."""
    admit: float = 1.0
    """Admitted share of arrivals."""
    wait_s: float = LOAD_OPEN_S[0]
    """Time for which it stays open before it is half-open."""
    reason: str = ""

    @property
    def is_closed(self) -> bool:
        """Return whether every request of the tier is admitted."""
        return self.state is BreakerState.CLOSED


@dataclass(frozen=True, slots=True)
class LoadBreaker:
    """The breakers of the three tiers."""

    realtime: TierBreaker = TierBreaker()
    standard: TierBreaker = TierBreaker()
    batch: TierBreaker = TierBreaker()

    @property
    def is_closed(self) -> bool:
        """Return whether every tier is closed."""
        return self.realtime.is_closed and self.standard.is_closed and self.batch.is_closed

    def by_tier(self) -> dict[str, TierBreaker]:
        """Return the breakers by the tier's label."""
        return dict(zip(TIER_LABELS, (self.realtime, self.standard, self.batch), strict=True))


@dataclass(frozen=True, slots=True)
class _TierView:
    """Inputs of one tier's state machine in a tick."""

    over: bool
    ticks: int
    clean: bool
    open_admit: float
    why: str
    may_close: bool = True
    """True if it may admit less than now."""


def pressure(signals: Signals, settings: ControlSettings, capacity: float) -> float:
    """Return the pressure x. `capacity`: sequences per replica; 0 if unknown, which leaves out Q.

    Example: wait 0.4 s of 0.5 s, step 30 ms of 50 ms, KV 0.5, nothing waiting: 0.8.
    """
    queue = 0.0
    if capacity > 0 and signals.ready_pods:
        queue = signals.waiting / (capacity * signals.ready_pods)
    return max(
        signals.queue_wait_s / settings.queue_wait_objective_s,
        signals.batch_time_s / settings.batch_time_objective_s,
        signals.kv_ratio / PRESSURE_KV_RATIO,
        queue,
    )


def rejected_ratio(served_per_s: float, offered_per_s: float, waiting: float = 0.0) -> float:
    """Return the share to shed; 0 below 20 requests in 30 s.

    What is admitted is nine tenths of what is served, less what drains the queue in 30 s:
    clip(1 - (0.9 served - waiting / 30 s) / offered, 0, 0.95).

    Example: 4/s served of 10/s offered: 0.64 is shed, and 3.6/s are admitted. With 60 that wait, 0.84.
    """
    if offered_per_s * RATE_S < MIN_REQUESTS:
        return 0.0
    admitted = SERVED_FACTOR * served_per_s - waiting / CLIENT_WAIT_S
    return min(REJECT_MAX, max(0.0, 1.0 - admitted / offered_per_s))


def _towards(current: float, wanted: float) -> float:
    return max(current - REJECT_STEP, min(current + ADMIT_STEP, wanted))


def _opened(view: _TierView, now: float, wait_s: float) -> TierBreaker:
    return TierBreaker(BreakerState.OPEN, now, view.ticks, 0, view.open_admit, wait_s, view.why)


def _stepped(breaker: TierBreaker, view: _TierView, now: float) -> TierBreaker:
    """Return a tier's breaker after one tick."""
    over = min(breaker.over + 1, 1000) if view.over else 0
    breaker = breaker if over == breaker.over else replace(breaker, over=over)
    if breaker.state is BreakerState.CLOSED:
        opens = over >= view.ticks and view.may_close
        return _opened(view, now, breaker.wait_s) if opens else breaker
    if breaker.state is BreakerState.OPEN:
        return _tried(breaker, view, now)
    return _tested(breaker, view, now)


def _tried(breaker: TierBreaker, view: _TierView, now: float) -> TierBreaker:
    """Handle open: go half-open once the waiting time is over and the tier is below its threshold."""
    if now - breaker.since < breaker.wait_s or view.over:
        least = 0.0 if view.may_close else breaker.admit
        return replace(breaker, admit=max(least, view.open_admit))
    admit = max(HALF_OPEN_RATIO, breaker.admit)
    return replace(breaker, state=BreakerState.HALF_OPEN, since=now, clean=0, admit=admit)


def _tested(breaker: TierBreaker, view: _TierView, now: float) -> TierBreaker:
    """Handle half-open: open again above the threshold, for twice as long; admit more in clean ticks."""
    if view.over and view.may_close:
        return _opened(view, now, min(LOAD_OPEN_S[1], 2 * breaker.wait_s))
    if view.over or not view.clean:
        return replace(breaker, clean=0) if breaker.clean else breaker
    if breaker.clean + 1 >= CLEAN_TICKS:
        return TierBreaker(since=now)
    return replace(breaker, clean=breaker.clean + 1, admit=min(1.0, 2 * breaker.admit))


def decide_load_breaker(
    signals: Signals,
    settings: ControlSettings,
    capacity: float,
    breaker: LoadBreaker,
    now: float,
    *,
    checks_directly: bool = False,
) -> LoadBreaker:
    """Return the breakers after one tick. Unknown signals close them all, unless every pod is warming up.

    `checks_directly`: the pods can be read directly, so Prometheus alone sheds no requests.
    """
    if not signals.known:
        return _blind(signals, breaker, now)
    if signals.grade is not Grade.FRESH:
        return _ageing(breaker)
    x = pressure(signals, settings, capacity)
    enough = _enough(signals)
    if breaker.is_closed and x <= BATCH_OPEN:
        return LoadBreaker()  # Counters and waiting times start again.
    clean = x < CLEAN
    views = (
        _realtime_view(signals, breaker, clean=clean),
        _standard_view(signals, settings, breaker, x, now, enough=enough, clean=clean),
        _batch_view(signals, settings, x, enough=enough, clean=clean),
    )
    may_close = signals.is_direct or not checks_directly
    tiers = (breaker.realtime, breaker.standard, breaker.batch)
    realtime, standard, batch = (
        _stepped(tier, replace(view, may_close=may_close), now)
        for tier, view in zip(tiers, views, strict=True)
    )
    return LoadBreaker(realtime, standard, batch)


def _blind(signals: Signals, breaker: LoadBreaker, now: float) -> LoadBreaker:
    """Handle unknown signals: close every tier.

    While every ready pod is warming up, a tier stays as it is for at most a minute beyond its waiting
    time.
    """
    warming_up = signals.ready_pods > 0 and signals.warmed_up_pods == 0
    if breaker.is_closed or not warming_up:
        return breaker if breaker.is_closed else LoadBreaker()
    tiers = (breaker.realtime, breaker.standard, breaker.batch)
    is_due = [not tier.is_closed and now - tier.since >= tier.wait_s + WARM_UP_S for tier in tiers]
    closed = TierBreaker(since=now)
    return LoadBreaker(*(closed if due else t for t, due in zip(tiers, is_due, strict=True)))


def _ageing(breaker: LoadBreaker) -> LoadBreaker:
    """Return the breaker as it is: on aging signals no tier opens or admits less.

    Counts of ticks in a row restart. Aging signals are fresh again or lost within a minute.
    """
    if breaker.is_closed:
        return LoadBreaker()
    tiers = (breaker.realtime, breaker.standard, breaker.batch)
    return LoadBreaker(*(replace(tier, over=0) for tier in tiers))


def _enough(signals: Signals) -> bool:
    """Return whether at least 20 requests arrived, were served or wait; fewer are not judged."""
    rates = signals.rates
    seen = max(signals.arrivals_per_s, signals.served_per_s) * RATE_S
    return max(seen, signals.waiting, rates.batch_time_count * RATE_S / 100) >= MIN_REQUESTS


def _batch_view(
    signals: Signals, settings: ControlSettings, x: float, *, enough: bool, clean: bool
) -> _TierView:
    rates = signals.rates
    has_requests = rates.arrivals_batch + rates.wait_count_batch + signals.gauges.waiting_batch > 0
    return _TierView(
        over=has_requests and x > BATCH_OPEN and enough,
        ticks=BATCH_OPEN_TICKS,
        clean=clean,
        open_admit=settings.batch_floor_ratio,
        why=f"pressure {x:.2f} above {BATCH_OPEN}",
    )


def _standard_view(
    signals: Signals,
    settings: ControlSettings,
    breaker: LoadBreaker,
    x: float,
    now: float,
    *,
    enough: bool,
    clean: bool,
) -> _TierView:
    batch, rates = breaker.batch, signals.rates
    # Without batch requests, shedding batch cannot be enough.
    after_batch = (
        (batch.state is BreakerState.OPEN and now - batch.since >= LOAD_OPEN_S[0])
        or rates.arrivals_batch == 0.0
        or not breaker.standard.is_closed
    )
    wanted = 1.0
    drained = settings.queue_wait_objective_s * rates.wait_count_standard
    if x > 1.0 and signals.gauges.waiting_standard > drained:
        # Queue wait is a mean of 30 s, so it stays long after the queue is gone. Then what is served is
        # what is admitted, and says nothing about the capacity.
        wanted -= rejected_ratio(
            rates.wait_count_standard, rates.arrivals_standard, signals.gauges.waiting_standard
        )
    return _TierView(
        over=x > STANDARD_OPEN and enough and after_batch and wanted < 1.0,
        ticks=STANDARD_OPEN_TICKS,
        clean=clean,
        open_admit=_towards(breaker.standard.admit, wanted),
        why=f"pressure {x:.2f} above {STANDARD_OPEN}",
    )


def _realtime_view(signals: Signals, breaker: LoadBreaker, *, clean: bool) -> _TierView:
    oldest_s = signals.gauges.oldest_wait_s_realtime
    rates = signals.rates
    wanted = 1.0 - rejected_ratio(rates.wait_count_realtime, rates.arrivals_realtime)
    return _TierView(
        over=oldest_s > CLIENT_WAIT_S,
        ticks=STANDARD_OPEN_TICKS,
        clean=clean and oldest_s < CLIENT_WAIT_S / 2,
        open_admit=_towards(breaker.realtime.admit, wanted),
        why=f"the oldest realtime request has waited {oldest_s:.0f} s",
    )


def admission_of(breaker: LoadBreaker, settings: ControlSettings) -> Admission:
    """Return the admitted share of each tier, and batch's share of sequences.

    While batch is not closed, that share is its floor, or what the half-open breaker admits. The status
    does not hold admitted shares, so a new leader begins with the floor.
    """
    share = settings.batch_share_ratio
    if not breaker.batch.is_closed:
        tried = breaker.batch.admit if breaker.batch.state is BreakerState.HALF_OPEN else 0.0
        share = min(share, max(settings.batch_floor_ratio, tried))
    admit = (
        round(breaker.realtime.admit, 3),
        round(breaker.standard.admit, 3),
        round(max(breaker.batch.admit, settings.batch_floor_ratio), 3),
    )
    return Admission(admit, round(max(share, min(settings.batch_floor_ratio, 1.0)), 3))

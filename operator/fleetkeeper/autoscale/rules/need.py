"""What is asked of the replicas: by arrivals, by requests that wait, by steps that are too long, by deadlines.

Batch limits act faster than replicas. So requests that wait ask for replicas only if the limits cannot be
raised, and long steps only if the limits are at their floor.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.autoscale.capacity.demand import needed_replicas
from fleetkeeper.autoscale.constants import DEMAND_TICKS, LOAD_OPEN_S
from fleetkeeper.autoscale.rules.batch.raises import step_up_possible
from fleetkeeper.autoscale.rules.batch.values import BatchMemory
from fleetkeeper.autoscale.rules.deadline import DeadlineNeed, deadline_need
from fleetkeeper.autoscale.rules.fleet_limits import batch_view
from fleetkeeper.autoscale.rules.objectives import (
    is_slow,
    judged_since,
    refuses,
    wait_is_broken,
    wait_lasts,
)
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.state import TickState


@dataclass(frozen=True, slots=True)
class Need:
    """What is asked of the replicas."""

    signals: Signals
    """The measurements. While a backlog is known, only `deadline` includes tier batch."""
    needed: int | None = None
    """Replicas that the arrivals need; None: unknown."""
    capacity: float = 0.0
    """Sequences that a replica can run within the objectives."""
    is_trusted: bool = False
    """True if arrivals add replicas before requests wait."""
    waits: bool = False
    """True if requests wait too long or are refused, and batch limits cannot be raised."""
    wait_lasts: bool = False
    """True if requests wait too long or are refused, and not only by a short queue."""
    too_slow: bool = False
    """True if steps are too long although batch limits are at their floor."""
    deadline: DeadlineNeed | None = None
    """The replicas that the backlog requires (None: nothing is known)."""


def need_of(state: TickState, batch: BatchMemory, now: float) -> Need:
    """Return what is asked of the replicas under the limits of `batch`."""
    signals, estimate = state.planned, state.estimate
    carried_per_s = _carried_per_s(state)
    is_trusted = estimate.targets is not None and estimate.demand.seen >= DEMAND_TICKS
    counts = signals.known and not _batch_yields_first(state, now)
    is_broken = counts and wait_is_broken(signals, state.settings)
    # The demand of a trusted model includes refused requests. Without one, a queue that is short because
    # of them shows nothing.
    is_refused = not is_trusted and (
        (counts and _queue_is_full(state)) or (is_broken and _sheds_batch(state))
    )
    at_limit = not step_up_possible(batch_view(state), batch)
    return Need(
        signals,
        _needed(state, carried_per_s),
        estimate.capacity,
        is_trusted,
        waits=(is_broken or is_refused) and at_limit,
        wait_lasts=is_refused or (counts and wait_lasts(signals, state.settings)),
        too_slow=_is_slow_at_floor(state, batch),
        deadline=deadline_need(state, carried_per_s, now),
    )


def _queue_is_full(state: TickState) -> bool:
    """Return whether a full queue refuses requests of realtime or standard.

    The load breaker refuses them only at a wait so long that it needs no such sign.
    """
    load = state.breakers.load
    admits = load.realtime.is_closed and load.standard.is_closed
    return admits and refuses(state.planned, state.settings)


def _sheds_batch(state: TickState) -> bool:
    """Return whether batch requests arrive, and the load breaker does not admit them all."""
    is_open = not state.breakers.load.batch.is_closed
    return state.settings.gates and is_open and state.planned.rates.arrivals_batch > 0


def _batch_yields_first(state: TickState, now: float) -> bool:
    """Return whether requests may wait for those of a backlog, which has not been shed for long enough.

    As before requests of tier standard are shed: to shed batch may be enough.
    """
    batch, rates = state.breakers.load.batch, state.signals.rates
    comes = rates.arrivals_batch + rates.wait_count_batch > 0
    if state.backlog is None or not state.settings.gates or not comes:
        return False
    return batch.state is not BreakerState.OPEN or now - batch.since < LOAD_OPEN_S[0]


def _is_slow_at_floor(state: TickState, batch: BatchMemory) -> bool:
    """Return whether limits are at their floor and batch time attainment is still low."""
    limits, settings, signals = batch.limits, state.settings, state.signals
    if limits is None or not signals.known:
        return False
    if state.backlog is not None and state.planned.idle:
        return False  # No client waits for the tokens of a backlog without other load.
    at_floor = limits.sequences <= settings.min_sequences and limits.tokens <= settings.min_tokens
    return at_floor and is_slow(judged_since(signals.windows, batch.changed), settings)


def _carried_per_s(state: TickState) -> float:
    """Return the requests/s that a replica carries within the objectives; 0 if unknown.

    It is computed at the limits that the replica would be given, not at those it has now: an engine
    whose limits are low because few requests came carries as much as any other.
    """
    signals, estimate = state.signals, state.estimate
    if estimate.targets is not None:
        return estimate.targets.carried_per_s
    if estimate.capacity <= 0 or signals.served_per_s <= 0:
        return 0.0
    measured_s = signals.gauges.running / signals.served_per_s
    return estimate.capacity / measured_s if measured_s else 0.0


def _needed(state: TickState, carried_per_s: float) -> int | None:
    """Return the replicas that the arrivals need; None if unknown."""
    if not state.planned.known or state.estimate.capacity <= 0:
        return None
    return needed_replicas(state.estimate.demand.per_s, carried_per_s)

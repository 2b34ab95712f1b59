"""The inputs of the replica rules: signals, what the load needs, and what the batch limits allow.

Batch limits act faster than replicas. At their floor with a missed objective they set `demand`, which
scales up.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.autoscale.capacity.staffing import needed_replicas
from fleetkeeper.autoscale.capacity.supply import Supply, hung_in_supply
from fleetkeeper.autoscale.constants import DEMAND_TICKS, STANDARD_AFTER_BATCH_S, TICK_S
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
from fleetkeeper.autoscale.types import ControlInputs, ControlSettings


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """Inputs of the replica rules. While a backlog is known, only `deadline` includes tier batch."""

    inputs: ControlInputs
    signals: Signals
    supply: Supply
    needed_up: int | None = None
    """Required replicas if pods that do not report are idle; None: unknown."""
    needed_down: int | None = None
    """Required replicas if pods that do not report are full; None: unknown."""
    capacity: float = 0.0
    """Sequences that a replica can run within the objectives."""
    model_trusted: bool = False
    wait_broken: bool = False
    """True if the queue wait objective is missed, or requests are refused instead."""
    wait_lasts: bool = False
    """True if that is not only by a short queue."""
    batch_at_limit: bool = False
    """True if batch limits cannot be raised."""
    demand: bool = False
    """True if batch limits are at their floor and batch time is still too long."""
    raise_first: bool = False
    """True if batch limits were just raised, which may be enough."""
    breakers_closed: bool = True
    floor: int = 0
    """Number of replicas below which the control breaker allows no scale-down."""
    hung: int = 0
    """Hung pods that the supply counts."""
    deadline: DeadlineNeed | None = None
    """The replicas that the backlog requires (None: nothing is known)."""
    adds_for_deadline: bool = True
    """True if replicas may be added for the backlog."""
    releases: bool = False
    """True if another service needs a replica that this one keeps for the next surge."""

    @property
    def settings(self) -> ControlSettings:
        """The settings of the service."""
        return self.inputs.settings

    @property
    def replicas(self) -> int:
        """The live Deployment's number of replicas."""
        return self.inputs.replicas


def replica_view(
    state: TickState, memory: BatchMemory, now: float, *, releases: bool = False
) -> ReplicaView:
    """Return the inputs of the replica rules."""
    inputs, settings = state.inputs, state.settings
    signals, estimate = state.planned, state.estimate
    carried_per_s = _carried_per_s(state)
    waits_count = signals.known and not _batch_yields_first(state, now)
    needed_up, needed_down = _needed(state, signals, carried_per_s)
    model_trusted = estimate.targets is not None and estimate.demand.seen >= DEMAND_TICKS
    wait_broken = waits_count and wait_is_broken(signals, settings)
    # The demand of a trusted model includes refused requests. Without one, a queue that is short because
    # of them shows nothing.
    refused = not model_trusted and (
        (waits_count and _queue_is_full(state, signals))
        or (wait_broken and _sheds_batch(state, signals))
    )
    hung = 0
    if signals.hung_pods:
        cold_start_s = estimate.cold_start.seconds
        hung = hung_in_supply(inputs.pods, signals.hung_pods, cold_start_s, now)
    return ReplicaView(
        inputs,
        signals,
        estimate.supply,
        needed_up=needed_up,
        needed_down=needed_down,
        capacity=estimate.capacity,
        model_trusted=model_trusted,
        wait_broken=wait_broken or refused,
        wait_lasts=refused or (waits_count and wait_lasts(signals, settings)),
        batch_at_limit=not step_up_possible(batch_view(state, now), memory),
        demand=_at_floor_and_slow(state, memory),
        raise_first=memory.replicas_wait_ticks > 0,
        breakers_closed=state.breakers_closed,
        floor=_fallback_floor(state),
        hung=hung,
        deadline=deadline_need(state, carried_per_s),
        adds_for_deadline=not state.keeps_safe_limits and _may_not_wait(state, now),
        releases=releases,
    )


def _may_not_wait(state: TickState, now: float) -> bool:
    """Return whether the demand of the others is known, or a deadline is too near to wait for that.

    After a start of the operator, the first means of it are chance.
    """
    near_s = 2 * DEMAND_TICKS * TICK_S
    is_near = state.backlog is not None and state.backlog.deadline - now < near_s
    return is_near or state.estimate.demand.seen >= DEMAND_TICKS


def _queue_is_full(state: TickState, signals: Signals) -> bool:
    """Return whether a full queue refuses requests of realtime or standard.

    The load breaker refuses them only at a wait so long that it needs no such sign.
    """
    load = state.breakers.load
    admits = load.realtime.is_closed and load.standard.is_closed
    return admits and refuses(signals, state.settings)


def _sheds_batch(state: TickState, signals: Signals) -> bool:
    """Return whether batch requests arrive, and the load breaker does not admit them all."""
    is_open = not state.breakers.load.batch.is_closed
    return state.settings.gates and is_open and signals.rates.arrivals_batch > 0


def _batch_yields_first(state: TickState, now: float) -> bool:
    """Return whether requests may wait for those of a backlog, which has not been shed for long enough.

    As before requests of tier standard are shed: to shed batch may be enough.
    """
    batch, rates = state.breakers.load.batch, state.signals.rates
    comes = rates.arrivals_batch + rates.wait_count_batch > 0
    if state.backlog is None or not state.settings.gates or not comes:
        return False
    return batch.state is not BreakerState.OPEN or now - batch.since < STANDARD_AFTER_BATCH_S


def _at_floor_and_slow(state: TickState, memory: BatchMemory) -> bool:
    """Return whether limits are at their floor and batch time attainment is still low."""
    limits, settings, signals = memory.limits, state.settings, state.signals
    if limits is None or not signals.known:
        return False
    if state.backlog is not None and state.planned.idle:
        return False  # No client waits for the tokens of a backlog without other load.
    at_floor = limits.sequences <= settings.min_sequences and limits.tokens <= settings.min_tokens
    return at_floor and is_slow(judged_since(signals.windows, memory.changed), settings)


def _fallback_floor(state: TickState) -> int:
    """Return the floor of replicas: while the control breaker is open max(current, fallback), else 0."""
    is_open = state.breakers.control.state is BreakerState.OPEN
    if not (is_open and state.settings.breakers_act):
        return 0
    return max(state.inputs.replicas, state.settings.fallback_replicas or 0)


def _carried_per_s(state: TickState) -> float:
    """Return the requests/s that a replica carries within the objectives; 0 if unknown.

    It is computed at the limits that the replica would be given, not at those it has now: an engine
    whose limits are low because few requests came carries as much as any other.
    """
    signals, estimate = state.signals, state.estimate
    targets = estimate.targets
    if targets is not None:
        return targets.carried_per_s
    if estimate.capacity <= 0 or signals.served_per_s <= 0:
        return 0.0
    measured_s = signals.gauges.running / signals.served_per_s
    return estimate.capacity / measured_s if measured_s else 0.0


def _needed(state: TickState, signals: Signals, carried: float) -> tuple[int | None, int | None]:
    """Return the replicas needed, counting pods that do not report as idle (up) and as full (down)."""
    if not signals.known or state.estimate.capacity <= 0:
        return None, None
    arrivals_per_s = state.estimate.demand.per_s
    silent = max(0, signals.ready_pods - signals.reporting_pods)
    up = needed_replicas(arrivals_per_s, carried)
    down = needed_replicas(arrivals_per_s + silent * carried, carried)
    if state.estimate.targets is None and not signals.idle:
        by_running = -int(-signals.gauges.running // max(state.estimate.capacity, 1.0))
        return up, max(down, by_running, 1)
    return up, down

"""The inputs of the replica rules: signals, what the load needs, and what the batch limits allow.

Batch limits act faster than replicas. At their floor with a missed objective they set `demand`, which
scales up.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetkeeper.autoscale.capacity.forecast import expected_per_s
from fleetkeeper.autoscale.capacity.staffing import Load, backlog_counts, headroom, needed_replicas
from fleetkeeper.autoscale.capacity.supply import Supply, hung_in_supply
from fleetkeeper.autoscale.rules.batch.raises import step_up_possible
from fleetkeeper.autoscale.rules.batch.values import BatchMemory
from fleetkeeper.autoscale.rules.fleet_limits import batch_view
from fleetkeeper.autoscale.rules.objectives import is_slow, judged_since, wait_is_broken
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.state import TickState
from fleetkeeper.autoscale.types import BreakerState, ControlInputs, ControlSettings, Limits


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """Inputs of the replica rules.

    `needed_up` counts pods that do not report as idle, `needed_down` counts them as full; None: not known.
    `capacity`: sequences that a replica can run within the objectives. `batch_at_limit`: batch limits
    cannot be raised. `demand`: batch limits are at their floor and batch time is still too long.
    `raise_first`: batch limits were just raised, which may be enough. `floor`: the number below which the
    control breaker allows no scale-down. `hung`: hung pods that the supply counts.
    """

    inputs: ControlInputs
    signals: Signals
    supply: Supply
    needed_up: int | None = None
    needed_down: int | None = None
    capacity: float = 0.0
    model_trusted: bool = False
    wait_broken: bool = False
    batch_at_limit: bool = False
    demand: bool = False
    raise_first: bool = False
    breakers_closed: bool = True
    floor: int = 0
    hung: int = 0

    @property
    def settings(self) -> ControlSettings:
        """The settings of the service."""
        return self.inputs.settings

    @property
    def replicas(self) -> int:
        """The live Deployment's number of replicas."""
        return self.inputs.replicas


def replica_view(
    state: TickState, memory: BatchMemory, in_force: Limits, now: float
) -> ReplicaView:
    """Return the inputs of the replica rules. The capacity comes from the model if limits follow it."""
    inputs, settings = state.inputs, state.settings
    signals, estimate = state.signals, state.estimate
    needed_up, needed_down = _needed(state, in_force)
    follows_model = memory.followed is not None or not settings.tunes_limits
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
        capacity=min(estimate.capacity, float(in_force.sequences)),
        model_trusted=estimate.targets is not None and follows_model,
        wait_broken=signals.known and wait_is_broken(signals, settings),
        batch_at_limit=not step_up_possible(batch_view(state, now), memory),
        demand=_at_floor_and_slow(state, memory),
        raise_first=memory.replicas_wait_ticks > 0,
        breakers_closed=state.breakers_closed,
        floor=_fallback_floor(state),
        hung=hung,
    )


def _at_floor_and_slow(state: TickState, memory: BatchMemory) -> bool:
    """Return whether limits are at their floor and batch time attainment is still low."""
    limits, settings, signals = memory.limits, state.settings, state.signals
    if limits is None or not signals.known:
        return False
    at_floor = limits.sequences <= settings.min_sequences and limits.tokens <= settings.min_tokens
    return at_floor and is_slow(judged_since(signals.windows, memory.changed), settings)


def _fallback_floor(state: TickState) -> int:
    """Return the floor of replicas: while the control breaker is open max(current, fallback), else 0."""
    is_open = state.breakers.control.state is BreakerState.OPEN
    if not (is_open and state.settings.breakers_act):
        return 0
    return max(state.inputs.replicas, state.settings.fallback_replicas or 0)


def _load(state: TickState, in_force: Limits, arrivals_per_s: float, silent: float) -> Load | None:
    """Return the load to plan for; `silent` pods do not report and count as full. None if unknown."""
    signals, settings = state.signals, state.settings
    targets = state.estimate.targets
    capacity = min(state.estimate.capacity, float(in_force.sequences))
    if targets is not None:
        service_s = targets.service_s
    elif signals.served_per_s > 0:
        service_s = signals.gauges.running / signals.served_per_s
    else:
        service_s = 0.0
    if capacity <= 0:
        return None
    completions = capacity / service_s if service_s > 0 else 0.0
    rho, beta = headroom(signals.rates)
    counts = backlog_counts(signals.queue_wait_s, settings.queue_wait_objective_s)
    return Load(
        arrivals_per_s=arrivals_per_s + silent * completions,
        service_s=service_s,
        capacity=capacity,
        rho=rho,
        beta=beta,
        burstiness=signals.burstiness,
        backlog=signals.waiting if counts else 0.0,
        completions_per_s=completions,
    )


def _needed(state: TickState, in_force: Limits) -> tuple[int | None, int | None]:
    """Return the replicas needed, counting pods that do not report as idle (up) and as full (down)."""
    signals = state.signals
    if not signals.known:
        return None, None
    expected = expected_per_s(
        state.estimate.forecast, signals.arrivals_per_s, state.estimate.cold_start.seconds
    )
    silent = float(max(0, signals.ready_pods - signals.reporting_pods))
    up = _load(state, in_force, expected, 0.0)
    down = _load(state, in_force, expected, silent) if silent else up
    if up is None or down is None:
        return None, None
    by_running = max(1, -int(-signals.gauges.running // max(down.capacity, 1.0)))
    if state.estimate.targets is None and not signals.idle:
        return needed_replicas(up), max(needed_replicas(down), by_running)
    return needed_replicas(up), needed_replicas(down)

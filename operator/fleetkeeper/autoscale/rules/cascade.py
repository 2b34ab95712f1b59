"""The cascade of the two loops: when each may act, and what the replica rules see of the batch limits.

The inner loop (batch limits) acts faster than the outer loop (replicas). While replicas are starting,
the inner loop does not go below the running sequences. At its floor with a missed objective it sets
`demand`, which scales up. While the control breaker is not closed, safe limits are in force; half-open,
one pod gets one notch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fleetkeeper.api.types import BatchingMode
from fleetkeeper.autoscale.capacity.forecast import Forecast, expected_per_s
from fleetkeeper.autoscale.capacity.staffing import Load, backlog_counts, headroom, needed_replicas
from fleetkeeper.autoscale.capacity.step_time_model import StepModel
from fleetkeeper.autoscale.capacity.supply import Supply, hung_in_supply
from fleetkeeper.autoscale.capacity.targets import Targets, moved_notch
from fleetkeeper.autoscale.constants import DOWN_FACTOR, UP_FACTOR
from fleetkeeper.autoscale.rules.batch import (
    BatchMemory,
    BatchView,
    clamped,
    decide_limits,
    start_up,
    step_up_possible,
)
from fleetkeeper.autoscale.rules.canary import Canary, concluded, judge_canary, needs_canary
from fleetkeeper.autoscale.rules.control_breaker import ControlBreaker
from fleetkeeper.autoscale.rules.load_breaker import LoadBreaker, admission_of
from fleetkeeper.autoscale.rules.objectives import is_slow, judged_since, wait_is_broken
from fleetkeeper.autoscale.rules.replicas import ReplicaView
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import (
    Admission,
    BreakerState,
    ControlInputs,
    ControlSettings,
    Decision,
    Limits,
    PodView,
    decide,
)


def ready_names(pods: Sequence[PodView]) -> tuple[str, ...]:
    """Return the names of pods that are ready and not being deleted."""
    return tuple(pod.name for pod in pods if pod.ready and not pod.deleting)


@dataclass(frozen=True, slots=True)
class TickState:
    """The state of one tick before limits and replicas are decided."""

    inputs: ControlInputs
    signals: Signals
    supply: Supply
    model: StepModel
    targets: Targets | None
    capacity: float
    load: LoadBreaker
    control: ControlBreaker
    forecast: Forecast
    cold_start_s: float

    @property
    def settings(self) -> ControlSettings:
        """The settings of the service."""
        return self.inputs.settings

    @property
    def breakers_closed(self) -> bool:
        """Return whether both breakers are closed; breakers that only report count as closed."""
        return not self.settings.breakers_act or (self.load.is_closed and self.control.is_closed)

    @property
    def control_acts(self) -> bool:
        """Return whether the control breaker keeps safe values in force."""
        return self.settings.breakers_act and not self.control.is_closed


def batch_view(state: TickState, now: float) -> BatchView:
    """Return the inputs of the batch rules. Overdue pods do not count as pending here."""
    return BatchView(
        signals=state.signals,
        settings=state.settings,
        targets=state.targets,
        pending=state.supply.pending,
        may_raise=not state.control_acts,
        gated=state.settings.breakers_act and not state.load.is_closed,
        model_frozen=not state.model.may_be_followed(now),
    )


def safe_limits(control: ControlBreaker, settings: ControlSettings) -> Limits:
    """Return the limits while the control breaker is open: the last known good, else start-up values."""
    return clamped(control.last_good, settings) if control.last_good else start_up(settings)


def notch_towards(held: Limits, wanted: Limits, settings: ControlSettings) -> Limits:
    """Return the limits one notch from `held` toward `wanted`: tokens first, else sequences by a tenth."""
    if wanted.tokens != held.tokens:
        by = 1 if wanted.tokens > held.tokens else -1
        return replace(held, tokens=moved_notch(held.tokens, by, settings))
    if wanted.sequences > held.sequences:
        return clamped(
            replace(held, sequences=min(wanted.sequences, round(held.sequences * UP_FACTOR) + 1)),
            settings,
        )
    if wanted.sequences < held.sequences:
        return clamped(
            replace(held, sequences=max(wanted.sequences, int(held.sequences * DOWN_FACTOR))),
            settings,
        )
    return held


def _under_control_breaker(
    state: TickState, memory: BatchMemory, now: float
) -> tuple[Decision[Limits], BatchMemory, Canary | None]:
    """Return safe limits for all pods and, after the ticks that only compute, one notch for one pod."""
    settings = state.settings
    safe = safe_limits(state.control, settings)
    changed = now if memory.limits != safe else memory.changed
    held = BatchMemory(limits=safe, changed=changed, turns=memory.turns)
    why = f"{state.control.detail}: {'last known good' if state.control.last_good else 'start-up'} limits"
    decision = decide(safe, "ControlBreakerOpen", why)
    if not state.control.probes:
        return decision, held, None
    aim = state.targets
    wanted = clamped(Limits(aim.sequences, aim.tokens or safe.tokens), settings) if aim else safe
    pod = min(ready_names(state.inputs.pods), default="")
    probe = Canary(pod, notch_towards(safe, wanted, settings), now) if pod else None
    return decision, held, probe


def decide_fleet_limits(
    state: TickState, memory: BatchMemory, canary: Canary | None, now: float
) -> tuple[Decision[Limits], BatchMemory, Canary | None]:
    """Return the limits for all pods, the new memory, and the canary that tries a raise first."""
    if state.control_acts:
        return _under_control_breaker(state, memory, now)
    view = batch_view(state, now)
    if canary is not None:
        if canary.pod not in ready_names(state.inputs.pods):
            canary = None
        elif state.signals.known:
            verdict = judge_canary(canary, state.signals.windows, now)
            memory = concluded(memory, canary, verdict, now)
            canary = None if verdict.valid else canary
    before = memory.limits
    if canary is not None:
        view = replace(view, may_raise=False)
    decision, after = decide_limits(view, memory, now)
    if before is None or after.limits is None or not decision.valid:
        return decision, after, canary
    if after.limits != before and canary is not None:
        return decision, after, None
    if needs_canary(before, after.limits, state.supply.ready) and _may_try(state):
        pod = min(ready_names(state.inputs.pods))
        tried = Canary(pod, after.limits, now, decision.reason)
        held = replace(after, limits=before, before_raise=None)
        first = decide(
            before,
            "CanaryRunning",
            f"pod {pod} tries {after.limits.sequences} sequences and {after.limits.tokens} tokens before the other pods",
        )
        return first, held, tried
    return decision, after, canary


def _may_try(state: TickState) -> bool:
    return state.settings.batching_mode is not BatchingMode.FIXED and state.settings.tunes_limits


def decide_admission(state: TickState) -> Admission:
    """Return what the pods admit; everything if the load breaker only reports."""
    if not state.settings.gates:
        return Admission(batch_share=state.settings.batch_share_ratio)
    return admission_of(state.load, state.settings)


def limits_by_pod(
    state: TickState, limits: Limits, canary: Canary | None, admission: Admission
) -> Mapping[str, Limits]:
    """Return the limits of each ready pod; empty if no limits are sent.

    If batching is Fixed, start-up values are sent, so that earlier limits end now and not with their
    lease. Engines without live limits get a request only while admission is reduced. Advisory or paused
    services get none.
    """
    settings = state.settings
    pods = [pod.name for pod in state.inputs.pods if pod.ready and not pod.deleting and pod.ip]
    if settings.paused or settings.batching_mode is BatchingMode.ADVISORY or not pods:
        return {}
    if settings.batching_mode is BatchingMode.FIXED and state.signals.live_limits:
        return dict.fromkeys(pods, start_up(settings))
    if not settings.tunes_limits or not state.signals.live_limits:
        open_admission = Admission(batch_share=settings.batch_share_ratio)
        return {} if admission == open_admission else dict.fromkeys(pods, start_up(settings))
    wanted = dict.fromkeys(pods, limits)
    if canary is not None and canary.pod in wanted:
        wanted[canary.pod] = canary.limits
    return wanted


def at_floor_and_slow(view: BatchView, memory: BatchMemory) -> bool:
    """Return the demand flag: limits are at their floor and batch time attainment is still low."""
    held = memory.limits
    if held is None or not view.signals.known:
        return False
    at_floor = (
        held.sequences <= view.settings.min_sequences and held.tokens <= view.settings.min_tokens
    )
    return at_floor and is_slow(judged_since(view.signals.windows, memory.changed), view.settings)


def _load(state: TickState, in_force: Limits, arrivals_per_s: float, silent: float) -> Load | None:
    """Return the load to plan for; `silent` pods do not report and count as full. None if unknown."""
    signals, settings = state.signals, state.settings
    targets = state.targets
    capacity = min(state.capacity, float(in_force.sequences))
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
    expected = expected_per_s(state.forecast, signals.arrivals_per_s, state.cold_start_s)
    silent = float(max(0, signals.ready_pods - signals.reporting_pods))
    up = _load(state, in_force, expected, 0.0)
    down = _load(state, in_force, expected, silent) if silent else up
    if up is None or down is None:
        return None, None
    by_running = max(1, -int(-signals.gauges.running // max(down.capacity, 1.0)))
    if state.targets is None and not signals.idle:
        return needed_replicas(up), max(needed_replicas(down), by_running)
    return needed_replicas(up), needed_replicas(down)


def fallback_floor(state: TickState) -> int:
    """Return the floor of replicas: while the control breaker is open max(current, fallback), else 0."""
    if not state.control_acts or state.control.state is not BreakerState.OPEN:
        return 0
    return max(state.inputs.replicas, state.settings.fallback_replicas or 0)


def _steers_by_model(state: TickState, memory: BatchMemory) -> bool:
    """Return whether capacity comes from the model: it is known, and limits that are set follow it."""
    if state.targets is None:
        return False
    return memory.followed is not None or not state.settings.tunes_limits


def replica_view(
    state: TickState, memory: BatchMemory, in_force: Limits, now: float
) -> ReplicaView:
    """Return the inputs of the replica rules: signals, model and batch limits."""
    signals, settings = state.signals, state.settings
    view = batch_view(state, now)
    needed_up, needed_down = _needed(state, in_force)
    broken = signals.known and wait_is_broken(signals, settings)
    return ReplicaView(
        signals=signals,
        settings=settings,
        replicas=state.inputs.replicas,
        ready=state.supply.ready,
        pending=state.supply.pending,
        overdue=state.supply.overdue,
        needed_up=needed_up,
        needed_down=needed_down,
        capacity=min(state.capacity, float(in_force.sequences)),
        model_trusted=_steers_by_model(state, memory),
        wait_broken=broken,
        batch_at_limit=not step_up_possible(view, memory),
        demand=at_floor_and_slow(view, memory),
        raise_first=memory.replicas_wait_ticks > 0,
        breakers_closed=state.breakers_closed,
        floor=fallback_floor(state),
        up_blocked=state.inputs.scale_up_blocked,
        hung=hung_in_supply(state.inputs.pods, signals.hung_pods, state.cold_start_s, now)
        if signals.hung_pods
        else 0,
        prometheus_lost=state.inputs.prometheus_lost,
        checks_directly=state.inputs.checks_directly,
    )

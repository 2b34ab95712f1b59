"""One tick of one service: signals, step-time model, breakers, limits, replicas, in that order.

decide_service(inputs, memory, now) -> (ControlDecision, ControlMemory)
arbitrate(recommendations of all services, budget) -> allocations
build_report(decision, allocation, memory, now) -> (ControlReport, ControlMemory)      (report.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fleetkeeper.autoscale.arbitrate import Want
from fleetkeeper.autoscale.capacity.forecast import Forecast, smoothed
from fleetkeeper.autoscale.capacity.step_time_model import StepModel, learned
from fleetkeeper.autoscale.capacity.supply import measured_cold_start, supply_of
from fleetkeeper.autoscale.capacity.targets import Targets, decide_targets
from fleetkeeper.autoscale.constants import ASKED_KEPT_S
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.events import (
    control_breaker_event,
    load_breaker_events,
    restart_events,
    source_breaker_event,
)
from fleetkeeper.autoscale.limits_requests import after_outcomes, due_requests
from fleetkeeper.autoscale.memory import ControlMemory
from fleetkeeper.autoscale.rules.cascade import (
    TickState,
    decide_admission,
    decide_fleet_limits,
    limits_by_pod,
    replica_view,
)
from fleetkeeper.autoscale.rules.control_breaker import ControlBreaker, decide_control_breaker
from fleetkeeper.autoscale.rules.evidence import Acts, evidence_of, judged_once
from fleetkeeper.autoscale.rules.fragmentation import (
    decide_fragmentation_restart,
    fragmentation_readings,
    is_settled,
    with_readings,
)
from fleetkeeper.autoscale.rules.load_breaker import (
    LoadBreaker,
    asks_pods,
    decide_load_breaker,
    pressure,
)
from fleetkeeper.autoscale.rules.remedies import decide_memory_remedy, decide_replacements
from fleetkeeper.autoscale.rules.replicas import (
    ReplicasMemory,
    decide_replicas,
    scale_down_blocker,
    would_lower,
)
from fleetkeeper.autoscale.rules.source_breaker import SourceBreaker, decide_source_breaker
from fleetkeeper.autoscale.signals.samples import Tier
from fleetkeeper.autoscale.signals.service_signals import Signals, observe_service
from fleetkeeper.autoscale.types import ControlInputs, ControlSettings, Decision, Grade
from fleetkeeper.common.values import Event, Remedy


def decide_service(
    inputs: ControlInputs, memory: ControlMemory, now: float
) -> tuple[ControlDecision, ControlMemory]:
    """Decide one tick of one service. Pure: the same inputs, memory and time give the same result."""
    settings = inputs.settings
    signals, signals_memory = observe_service(inputs.samples, inputs.pods, memory.signals, now)
    if signals.rejudged:
        # Attainment before and after the raise refers to different objectives and cannot be compared.
        memory = replace(memory, batch=replace(memory.batch, before_raise=None))
    model, targets = _model_and_targets(signals, settings, memory, now)
    cold_start = measured_cold_start(memory.cold_start, inputs.pods)
    supply = supply_of(inputs.pods, cold_start.seconds, now)
    limits_requests, failed = after_outcomes(memory.limits_requests, inputs.put_outcomes)
    capacity = _capacity(targets, memory)
    late_since = _late_since(inputs, memory, now)
    control = decide_control_breaker(
        memory.control,
        evidence_of(
            Acts(limits_requests, failed + inputs.failed_writes, late_since),
            inputs,
            signals,
            memory,
            model,
            now=now,
        ),
        now,
    )
    load = decide_load_breaker(
        signals, settings, capacity, memory.load, now, checks_directly=inputs.checks_directly
    )
    source = decide_source_breaker(memory.source, lost=inputs.prometheus_lost, now=now)
    state = TickState(
        inputs,
        signals,
        supply,
        model,
        targets,
        capacity,
        load,
        control,
        _forecast(memory.forecast, signals),
        cold_start.seconds,
    )
    limits, batch, canary = decide_fleet_limits(state, memory.batch, memory.canary, now)
    in_force = batch.limits or limits.value
    admission = decide_admission(state)
    wanted = limits_by_pod(state, in_force, canary, admission)
    puts, limits_requests = due_requests(limits_requests, inputs.pods, wanted, admission, now)
    view = replica_view(state, batch, in_force, now)
    replicas, replicas_memory = decide_replicas(view, _seen(memory, inputs), now)
    want = _want(inputs, state, replicas)
    remedy = decide_memory_remedy(
        memory.remedy, settings, inputs.pods, inputs.out_of_memory_pods, now
    )
    replacement = decide_replacements(
        signals.long_hung_pods,
        memory.replaced_at,
        now,
        last=memory.replaced_pod,
        paused=settings.paused,
    )
    readings = fragmentation_readings(signals_memory.tracks, inputs, now)
    all_closed = load.is_closed and control.is_closed and not source.is_open
    remedied = replacement.valid or remedy.valid
    fragmentation = with_readings(memory.fragmentation, readings)
    restart, fragmentation = decide_fragmentation_restart(
        fragmentation,
        now,
        replicas=inputs.replicas,
        settled=late_since is None and not remedied and is_settled(inputs, want.replicas),
        # Unlike for a scale-down, a breaker that only reports counts too.
        blocker=scale_down_blocker(replace(view, breakers_closed=all_closed))
        if fragmentation.runs
        else "",
    )
    asked_at = _asked_at(inputs, memory, replicas, load, now)
    decision = ControlDecision(
        namespace=inputs.namespace,
        name=inputs.name,
        settings=settings,
        signals=signals,
        supply=supply,
        targets=targets,
        replicas=replicas,
        limits=limits,
        in_force=in_force,
        admission=admission,
        want=want,
        puts=puts,
        load=load,
        control=control,
        remedy=remedy,
        replacement=replacement,
        restart=restart,
        events=(
            *_events(memory, state, source, remedy),
            *(() if settings.restarts else restart_events(restart, acts=False)),
        ),
        capacity=capacity,
        pressure=pressure(signals, settings, capacity) if signals.known else 0.0,
        cold_start_s=cold_start.seconds,
        fragmentation_ratio=max((reading.ratio for reading in readings.values()), default=0.0),
        source=source,
        live_replicas=inputs.replicas,
        pod_load=_pod_load(signals),
        checks_directly=inputs.checks_directly,
        prometheus_disputed=inputs.prometheus_disputed,
        asks_pods=asked_at is not None,
    )
    memory = replace(
        memory,
        signals=signals_memory,
        model=model,
        targets=targets,
        forecast=state.forecast,
        cold_start=cold_start,
        batch=judged_once(batch, memory.batch, signals),
        canary=canary,
        replicas=replicas_memory,
        load=load,
        control=control,
        limits_requests=limits_requests,
        remedy=remedy.value,
        replaced_at=now if replacement.valid else memory.replaced_at,
        replaced_pod=replacement.value[0] if replacement.valid else memory.replaced_pod,
        fragmentation=fragmentation,
        allocation_late_since=late_since,
        asked_at=asked_at,
        source=source,
    )
    return decision, memory


def _model_and_targets(
    signals: Signals, settings: ControlSettings, memory: ControlMemory, now: float
) -> tuple[StepModel, Targets | None]:
    """Return model and targets, updated once per window."""
    if signals.window is None:
        return memory.model, memory.targets
    model = learned(memory.model, signals.window, now)
    targets = decide_targets(model, signals, settings)
    if targets is None and memory.targets is not None and signals.served_per_s == 0:
        return model, memory.targets
    return model, targets


def _capacity(targets: Targets | None, memory: ControlMemory) -> float:
    """Return the capacity of a replica in sequences: C* if the model knows it, else the limit in force."""
    if targets is not None:
        return targets.capacity
    limits = memory.batch.limits
    return float(limits.sequences) if limits is not None else 0.0


def _forecast(forecast: Forecast, signals: Signals) -> Forecast:
    if signals.grade is not Grade.FRESH or signals.coverage < 1.0:
        return forecast
    return smoothed(forecast, signals.arrivals_per_s)


def _late_since(inputs: ControlInputs, memory: ControlMemory, now: float) -> float | None:
    """Return since when the Deployment does not have the last allocation; None: it has."""
    allocated = inputs.allocated_replicas
    if allocated is None or allocated == inputs.replicas or not inputs.settings.tunes_replicas:
        return None
    return now if memory.allocation_late_since is None else memory.allocation_late_since


def _asked_at(
    inputs: ControlInputs,
    memory: ControlMemory,
    replicas: Decision[int],
    load: LoadBreaker,
    now: float,
) -> float | None:
    """Return when pods last had to be read directly before a reduction; None: not recently."""
    if not inputs.checks_directly:
        return None
    if would_lower(replicas, inputs.replicas) or asks_pods(load):
        return now
    held = memory.asked_at
    return held if held is not None and now - held < ASKED_KEPT_S else None


def _seen(memory: ControlMemory, inputs: ControlInputs) -> ReplicasMemory:
    """Return the memory of the replica rules; a new leader restarts its observation."""
    held = memory.replicas
    if held.since is not None and held.since < inputs.started:
        return replace(held, since=None, recommendations=(), direct_since=None)
    return held


def _want(inputs: ControlInputs, state: TickState, replicas: Decision[int]) -> Want:
    settings, signals = inputs.settings, state.signals
    is_pin_due = (
        settings.pinned_replicas is not None and not settings.paused and not inputs.scale_up_blocked
    )
    # Replicas that the planner would not create must not take accelerators from other services.
    asked = replicas.value if settings.tunes_replicas or is_pin_due else inputs.replicas
    return Want(
        namespace=inputs.namespace,
        name=inputs.name,
        replicas=asked,
        supplied=inputs.replicas,
        min_replicas=settings.min_replicas,
        gpus_per_replica=inputs.gpus_per_replica,
        tier=_urgent_tier(signals),
        breach=_breach(signals, settings),
        reason=replicas.reason,
    )


def _urgent_tier(signals: Signals) -> Tier:
    rates, gauges = signals.rates, signals.gauges
    if rates.arrivals_realtime + gauges.waiting_realtime > 0:
        return Tier.REALTIME
    only_batch = rates.arrivals_batch > 0 and rates.arrivals_standard + gauges.waiting_standard == 0
    return Tier.BATCH if only_batch else Tier.STANDARD


def _breach(signals: Signals, settings: ControlSettings) -> float:
    return max(
        signals.queue_wait_s / settings.queue_wait_objective_s,
        signals.batch_time_s / settings.batch_time_objective_s,
    )


def _pod_load(signals: Signals) -> Mapping[str, float]:
    return dict(signals.running_by_pod)


def _events(
    memory: ControlMemory,
    state: TickState,
    source: SourceBreaker,
    remedy: Decision[Remedy | None],
) -> tuple[Event, ...]:
    before: ControlBreaker = memory.control
    reported = [
        control_breaker_event(before, state.control, acts=state.settings.breakers_act),
        *load_breaker_events(memory.load, state.load, acts=state.settings.gates),
        source_breaker_event(memory.source, source, known=state.signals.known),
        Event("Warning", remedy.reason, remedy.detail[:1].upper() + remedy.detail[1:])
        if remedy.valid
        else None,
    ]
    return tuple(event for event in reported if event is not None)

"""One tick of one service: signals, estimate, breakers, limits, replicas, remedies, in that order.

decide_service(inputs, memory, now) -> (ControlDecision, ControlMemory)
arbitrate(recommendations of all services, budget) -> allocations
build_report(decision, allocation, memory, now) -> (TickResult, ControlMemory)      (report.py)
"""

from __future__ import annotations

from dataclasses import replace

from fleetkeeper.autoscale.arbitrate import Allocation, lacking_since, want_of
from fleetkeeper.autoscale.capacity.estimate import Estimate, updated_estimate
from fleetkeeper.autoscale.constants import RATE_S
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.events import tick_events
from fleetkeeper.autoscale.limits_requests import after_outcomes, due_requests
from fleetkeeper.autoscale.memory import ControlMemory
from fleetkeeper.autoscale.rules.control_breaker import decide_control_breaker
from fleetkeeper.autoscale.rules.evidence import evidence_of
from fleetkeeper.autoscale.rules.fleet_limits import (
    decide_admission,
    decide_fleet_limits,
    limits_by_pod,
)
from fleetkeeper.autoscale.rules.fragmentation import (
    decide_fragmentation_restart,
    fragmentation_readings,
    is_settled,
    with_readings,
)
from fleetkeeper.autoscale.rules.idle import (
    are_read_directly,
    decide_early_sleep,
    decide_idle,
    is_sleep_near,
)
from fleetkeeper.autoscale.rules.load_breaker import decide_load_breaker
from fleetkeeper.autoscale.rules.need import need_of
from fleetkeeper.autoscale.rules.objectives import judged_since
from fleetkeeper.autoscale.rules.remedies import decide_memory_remedy, pod_to_replace
from fleetkeeper.autoscale.rules.replicas import decide_replicas
from fleetkeeper.autoscale.rules.scale_down import gates_of, kept_for_surge, reads_asked_at
from fleetkeeper.autoscale.rules.source_breaker import decide_source_breaker
from fleetkeeper.autoscale.signals.backlog import known_backlog
from fleetkeeper.autoscale.signals.observe import observe_service
from fleetkeeper.autoscale.signals.reported_runs import open_runs
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.state import Breakers, TickState
from fleetkeeper.autoscale.types import ControlInputs


def decide_service(
    inputs: ControlInputs, memory: ControlMemory, now: float
) -> tuple[ControlDecision, ControlMemory]:
    """Decide one tick of one service. Pure: the same inputs, memory and time give the same result."""
    settings, pods = inputs.settings, inputs.pods
    signals, signals_memory = observe_service(inputs.samples, pods, memory.signals, now)
    memory = _after_last_tick(inputs, signals, memory, now)
    backlog = known_backlog(inputs.backlog, memory.backlog, now)
    planned = signals if backlog is None else signals.without_batch()

    estimate = updated_estimate(
        memory.estimate,
        inputs,
        signals,
        memory.batch.limits,
        now,
        planned_per_s=planned.arrivals_per_s,
    )
    breakers = _decide_breakers(inputs, signals, estimate, memory, now)
    state = TickState(inputs, signals, planned, estimate, breakers, backlog)

    limits, batch, canary = decide_fleet_limits(state, memory.batch, memory.canary, now)
    in_force = batch.limits or limits.value
    admission = decide_admission(state)
    by_pod = limits_by_pod(state, in_force, canary, admission)
    puts, requested = due_requests(memory.limits_requests, pods, by_pod, admission, now)

    allocation = memory.allocation or Allocation(inputs.replicas)
    need, supply = need_of(state, batch, now), estimate.supply
    gates = gates_of(state, need, releases=allocation.releases)
    replicas, observed = decide_replicas(inputs, need, supply, gates, memory.replicas, now=now)
    tracks = signals_memory.tracks
    confirms = allocation.confirms or is_sleep_near(state, tracks.values())
    asked_at = reads_asked_at(
        memory.asked_at, inputs, replicas, breakers.load, now, confirms=confirms
    )
    lacks_since = lacking_since(
        memory.lacks_since,
        inputs,
        allocation,
        now,
        recommended=replicas.value,
        needed=need.needed or 0,
    )
    is_direct = are_read_directly(inputs, tracks.values(), now)
    early_sleep = decide_early_sleep(
        state,
        tracks.values(),
        now,
        is_direct=is_direct,
        is_asked=bool(allocation.sleeps_for),
    )
    want = want_of(
        inputs,
        signals,
        replicas,
        observed,
        now,
        lacks_since=lacks_since,
        kept=kept_for_surge(inputs, gates, observed, now),
        cold_start_s=estimate.cold_start.seconds,
        early_sleep=early_sleep,
    )

    remedy = decide_memory_remedy(memory.remedy, settings, pods, inputs.out_of_memory_pods, now)
    replacement = pod_to_replace(
        signals.long_hung_pods,
        memory.replaced_at,
        now,
        last=memory.replaced_pod,
        paused=settings.paused,
    )
    fragmented = fragmentation_readings(tracks, inputs, now)
    is_changing = remedy.valid or bool(replacement) or memory.allocation_late_since is not None
    restart, fragmentation = decide_fragmentation_restart(
        with_readings(memory.fragmentation, fragmented),
        now,
        replicas=inputs.replicas,
        settled=not is_changing and is_settled(inputs, want.replicas),
        # Unlike for a scale-down, a breaker that only reports counts too.
        blocked=bool(gates.removal) or not breakers.are_closed,
    )

    decision = ControlDecision(
        state=state,
        limits=limits,
        in_force=in_force,
        admission=admission,
        puts=puts,
        replicas=replicas,
        want=want,
        remedy=remedy,
        replacement=replacement,
        restart=restart,
        fragmentation_ratio=max((row.ratio for row in fragmented.values()), default=0.0),
        events=tick_events(memory.breakers, state, remedy, restart),
        asks_pods=asked_at is not None,
        deadline=need.deadline,
        idle=decide_idle(
            state, tracks.values(), is_direct=is_direct, sleeps_for=allocation.sleeps_for
        ),
    )
    return decision, replace(
        memory,
        signals=signals_memory,
        estimate=estimate,
        breakers=breakers,
        batch=batch,
        canary=canary,
        limits_requests=requested,
        replicas=observed,
        remedy=remedy.value,
        replaced_at=now if replacement else memory.replaced_at,
        replaced_pod=replacement or memory.replaced_pod,
        fragmentation=fragmentation,
        open_engines=open_runs(inputs, memory.open_engines, now, were_open=memory.were_open),
        # One tick with samples replaces what the status said.
        were_open=memory.were_open and settings.demands_grants and not inputs.samples,
        asked_at=asked_at,
        lacks_since=lacks_since,
        backlog=backlog,
    )


def _after_last_tick(
    inputs: ControlInputs, signals: Signals, memory: ControlMemory, now: float
) -> ControlMemory:
    """Return the memory with the results of the last tick's actions."""
    batch, late_since = memory.batch, memory.allocation_late_since
    if batch.before_raise is not None:
        # A raise is judged once, over two windows, and not across a change of the objectives.
        is_judged = len(judged_since(memory.signals.windows, batch.raised)) >= 2
        if is_judged or signals.rejudged:
            batch = replace(batch, before_raise=None)
    allocated = inputs.allocated_replicas
    if allocated is None or allocated == inputs.replicas or not inputs.settings.tunes_replicas:
        late_since = None
    elif late_since is None:
        late_since = now
    return replace(
        memory,
        batch=batch,
        limits_requests=after_outcomes(memory.limits_requests, inputs.put_outcomes),
        allocation_late_since=late_since,
    )


def _decide_breakers(
    inputs: ControlInputs, signals: Signals, estimate: Estimate, memory: ControlMemory, now: float
) -> Breakers:
    before = memory.breakers
    load = before.load
    # A new leader needs two samples for its first rates. Until then tiers stay as the status says.
    if signals.known or now - inputs.started >= RATE_S:
        load = decide_load_breaker(
            signals,
            inputs.settings,
            estimate.capacity,
            before.load,
            now,
            checks_directly=inputs.checks_directly,
        )
    return Breakers(
        load=load,
        control=decide_control_breaker(
            before.control, evidence_of(inputs, signals, estimate.model, memory, now), now
        ),
        source=decide_source_breaker(before.source, lost=inputs.prometheus_lost, now=now),
    )

"""Report of one service after arbitration: allocation, facts for the status, events and gauges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fleetkeeper.api.status_enums import Subject
from fleetkeeper.api.types import ScalingMode
from fleetkeeper.autoscale.arbitrate import Allocation
from fleetkeeper.autoscale.conditions import metrics_conditions
from fleetkeeper.autoscale.constants import DECISIONS_KEPT, OPEN_ENGINE_S
from fleetkeeper.autoscale.decided import listed_message
from fleetkeeper.autoscale.decision import ControlDecision, TickResult
from fleetkeeper.autoscale.gauges import gauges_of
from fleetkeeper.autoscale.memory import (
    OVERLOAD,
    PROMETHEUS_LOST,
    ControlMemory,
    Shown,
)
from fleetkeeper.autoscale.types import Decision
from fleetkeeper.common.values import (
    BatchingReport,
    BreakerReport,
    Change,
    ControlReport,
    MemoryReport,
    ReplicaAllocation,
    ScalingReport,
)

STANDING = frozenset(
    {
        "SignalsStale",
        "ReplicasPinned",
        "Suspended",
        "Asleep",
        "ScaleUpBlocked",
        "Fixed",
        "ControlBreakerOpen",
        "CanaryRunning",
    }
)
"""Reasons that are reported although no value changed; all others only explain the last change."""


def _shown(before: Shown, value: str, decision: Decision[Any], now: float) -> Shown:
    """Return the shown value: renewed when the value changes or a standing reason starts or ends."""
    if value != before.value or not before.reason:
        return Shown(value, decision.reason, _capital(decision.detail), now)
    stands, stood_before = decision.reason in STANDING, before.reason in STANDING
    if (stands and decision.reason != before.reason) or (stood_before and not stands):
        return Shown(value, decision.reason, _capital(decision.detail), before.since)
    return before


def _why(decision: ControlDecision, before: Shown, desired: int) -> Decision[int]:
    """Return the decision that explains `desired`, or `ExternallyChanged` if this process did not change it.

    The live number can change without a decision of this process: the service woke, the previous leader ended
    before it reported its allocation, or another client changed the Deployment.
    """
    made = desired != decision.live_replicas or not decision.settings.activation.is_scaled
    if made or before.value in {"", str(desired)}:
        return decision.replicas
    if before.reason == "Asleep":
        return replace(decision.replicas, reason="Awake", detail="the service woke from its sleep")
    found = f"the engine Deployment already had {desired} replicas"
    return replace(decision.replicas, reason="ExternallyChanged", detail=found)


def build_report(
    decision: ControlDecision, allocation: Allocation, memory: ControlMemory, now: float
) -> tuple[TickResult, ControlMemory]:
    """Return the result for the planner and the runtime, and the memory with what was reported.

    The allocation is None if the loop must not set replicas: an unchanged decision keeps the live
    number, the planner applies a pinned one, and Advisory and External are only reported.
    """
    replica_allocation = _replica_allocation(decision, allocation)
    desired = decision.live_replicas if replica_allocation is None else replica_allocation.replicas
    memory = _shown_memory(decision, allocation, memory, desired, now)
    report = ControlReport(
        scaling=_scaling(decision, allocation, memory.shown_scaling, desired),
        batching=_batching(decision, memory),
        breaker=memory.shown_breaker,
        memory=MemoryReport(
            decision.settings.cap_percent,
            memory.peak_percent,
            memory.over_cap_pod,
            memory.memory_own,
        ),
        remedy=decision.remedy.value,
        decisions=memory.changes,
        safe_limits_cause=_safe_limits_cause(decision),
        shed_tiers=_shed_tiers(decision),
        hung_pods=decision.signals.hung_pods,
        open_pods=tuple(
            sorted(name for name, run in memory.open_engines.items() if run.lasted(OPEN_ENGINE_S))
        ),
        conditions=metrics_conditions(decision),
    )
    result = TickResult(replica_allocation, report, decision.events, gauges_of(decision, desired))
    return result, memory


def _shown_memory(
    decision: ControlDecision,
    allocation: Allocation,
    memory: ControlMemory,
    desired: int,
    now: float,
) -> ControlMemory:
    """Return the memory with the allocation and what the status shows after this tick; the same object if unchanged."""
    limits = f"{decision.in_force.sequences}/{decision.in_force.tokens}"
    why = _why(decision, memory.shown_scaling, desired)
    signals = decision.signals
    scaling = _shown(memory.shown_scaling, str(desired), why, now)
    batching = _shown(memory.shown_batching, limits, decision.limits, now)
    after = replace(
        memory,
        allocation=allocation,
        shown_scaling=scaling,
        shown_batching=batching,
        changes=_changes(decision, memory, scaling, batching, now),
        peak_percent=max(memory.peak_percent, round(100 * signals.memory_peak_ratio)),
        over_cap_pod=_over_cap_pod(decision, memory),
        memory_own=signals.memory_own if signals.reporting_pods else memory.memory_own,
        shown_breaker=_shown_breaker(memory.shown_breaker, _breaker(decision)),
    )
    return memory if after == memory else after


def _replica_allocation(
    decision: ControlDecision, allocation: Allocation
) -> ReplicaAllocation | None:
    if not decision.settings.tunes_replicas:
        return None
    changed = allocation.replicas != decision.live_replicas
    if not changed and not decision.replicas.valid:
        return None
    return ReplicaAllocation(
        allocation.replicas, decision.replicas.reason, _capital(decision.replicas.detail)
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _over_cap_pod(decision: ControlDecision, memory: ControlMemory) -> str | None:
    signals = decision.signals
    if not signals.reporting_pods:
        return memory.over_cap_pod
    over = signals.memory_peak_ratio > decision.settings.cap_percent / 100
    return signals.memory_peak_pod if over else ""


def _changes(
    decision: ControlDecision, memory: ControlMemory, scaling: Shown, batching: Shown, now: float
) -> tuple[Change, ...]:
    """Return the last decisions, including those of this tick, oldest first."""
    changes = [
        Change(now, what, before.value, after.value, after.reason)
        for what, before, after in (
            (Subject.REPLICAS, memory.shown_scaling, scaling),
            (Subject.LIMITS, memory.shown_batching, batching),
        )
        if before.value and before.value != after.value
    ]
    restart = decision.restart
    if restart.valid and decision.settings.restarts:
        changes += [Change(now, Subject.RESTART, "", pod, restart.reason) for pod in restart.value]
    changes += [
        Change(now, Subject.BREAKER, "", listed_message(event.message), event.reason)
        for event in decision.events
        if "Breaker" in event.reason
    ]
    return (*memory.changes, *changes)[-DECISIONS_KEPT:]


def _scaling(
    decision: ControlDecision, allocation: Allocation, shown: Shown, desired: int
) -> ScalingReport:
    settings, replicas = decision.settings, decision.replicas
    report = ScalingReport(desired, shown.reason, shown.message, shown.since)
    if settings.scaling_mode is ScalingMode.ADVISORY:
        return replace(report, wanted=replicas.value)
    if settings.scaling_mode is not ScalingMode.AUTO or not settings.activation.is_scaled:
        return report
    if allocation.limited_by:
        return replace(report, budget=allocation.limited_by, recommended=replicas.value)
    if replicas.reason == "ScaleUpBlocked":
        return replace(report, blocked=replicas.detail)
    overloaded = decision.signals.known and decision.pressure > 1.0
    late = decision.deadline is not None and decision.deadline.misses(settings.max_replicas)
    if (overloaded or late) and replicas.value >= settings.max_replicas:
        return replace(report, exceeded_max=settings.max_replicas)
    return report


def _batching(decision: ControlDecision, memory: ControlMemory) -> BatchingReport:
    limits, shown = decision.in_force, memory.shown_batching
    puts = memory.limits_requests.puts.values()
    applied = sum(1 for put in puts if put.confirmed and put.limits == limits)
    return BatchingReport(
        limits.sequences, limits.tokens, applied, shown.reason, shown.message, shown.since
    )


def _safe_limits_cause(decision: ControlDecision) -> str:
    return decision.breakers.control.detail if decision.state.keeps_safe_limits else ""


def _shed_tiers(decision: ControlDecision) -> tuple[str, ...]:
    tiers = decision.breakers.load.by_tier() if decision.settings.gates else {}
    return tuple(tier for tier, breaker in tiers.items() if not breaker.is_closed)


def _breaker(decision: ControlDecision) -> BreakerReport:
    tiers = decision.breakers.load.by_tier()
    source = decision.breakers.source
    silent = "Prometheus returns no fresh samples" if source.is_open else ""
    since, reason, message = max(
        (
            decision.breakers.control.since,
            decision.breakers.control.reason,
            decision.breakers.control.detail,
        ),
        (source.since, PROMETHEUS_LOST if silent else "", silent),
        *((t.since, OVERLOAD if t.reason else "", t.reason) for t in tiers.values()),
    )
    return BreakerReport(
        str(decision.breakers.control.state),
        str(source.state),
        {tier: str(breaker.state) for tier, breaker in tiers.items()},
        reason,
        _capital(message) if reason else "",
        since,
    )


def _shown_breaker(before: BreakerReport | None, found: BreakerReport) -> BreakerReport:
    """Return the breakers' report, renewed only when one of them changes its state.

    So a restart of the operator, which resets every waiting time, does not change reason and time.
    """
    return before if before is not None and before.states == found.states else found

"""Report of one service after arbitration: allocation, status fields, conditions, events and gauges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fleetkeeper.api.conditions import MESSAGE_MAX_LENGTH, ConditionType, Reason, Status
from fleetkeeper.api.types import BatchingMode, ScalingMode
from fleetkeeper.autoscale.arbitrate import Allocation
from fleetkeeper.autoscale.decision import ControlDecision, TickResult
from fleetkeeper.autoscale.memory import (
    ControlMemory,
    Shown,
    with_change,
)
from fleetkeeper.autoscale.signals.samples import Source
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import BreakerState, Decision, Grade
from fleetkeeper.common.values import (
    BatchingReport,
    BreakerReport,
    Change,
    ControlReport,
    Event,
    MemoryReport,
    ReplicaAllocation,
    ReportedCondition,
    ScalingReport,
)

STANDING = frozenset(
    {
        "SignalsStale",
        "ReplicasPinned",
        "ScaleUpBlocked",
        "Fixed",
        "ControlBreakerOpen",
        "CanaryRunning",
    }
)
"""Reasons that are reported although no value changed; all others only explain the last change."""

Value = tuple[Status, Reason, str]


@dataclass(frozen=True, slots=True)
class _ConditionInputs:
    """Inputs from which a condition is decided."""

    decision: ControlDecision
    allocation: Allocation
    memory: ControlMemory


def _shown(held: Shown, value: str, decision: Decision[Any], now: float) -> Shown:
    """Return the shown value: renewed when the value changes or a standing reason starts or ends."""
    if value != held.value or not held.reason:
        return Shown(value, decision.reason, _capital(decision.detail), now)
    stands, stood = decision.reason in STANDING, held.reason in STANDING
    if (stands and decision.reason != held.reason) or (stood and not stands):
        return Shown(value, decision.reason, _capital(decision.detail), held.since)
    return held


def _why(decision: ControlDecision, held: Shown, desired: int) -> Decision[int]:
    """Return the decision that explains `desired`, or `ExternallyChanged` if this process did not change it.

    The live number can change without a decision of this process: the previous leader ended before it
    reported its allocation, or another client changed the Deployment.
    """
    made = desired != decision.live_replicas or decision.settings.pinned_replicas is not None
    if made or held.value in {"", str(desired)}:
        return decision.replicas
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
    why = _why(decision, memory.shown_scaling, desired)
    scaling = _shown(memory.shown_scaling, str(desired), why, now)
    limits = decision.in_force
    batching = _shown(
        memory.shown_batching, f"{limits.sequences}/{limits.tokens}", decision.limits, now
    )
    changes = _changes(decision, memory, scaling, batching, now)
    peak = max(memory.peak_percent, round(100 * decision.signals.memory_peak_ratio))
    over = _over_cap_pod(decision, memory)
    breaker = _shown_breaker(memory.shown_breaker, _breaker(decision))
    shown = (scaling, batching, changes, peak, over, breaker)
    if shown != _shown_before(memory):
        memory = replace(
            memory,
            shown_scaling=scaling,
            shown_batching=batching,
            changes=changes,
            peak_percent=peak,
            over_cap_pod=over,
            shown_breaker=breaker,
        )
    report = ControlReport(
        scaling=_scaling(decision, scaling, desired),
        batching=_batching(decision, memory, batching),
        breaker=breaker,
        memory=MemoryReport(decision.settings.cap_percent, peak),
        remedy=decision.remedy.value,
        decisions=changes,
        conditions=_conditions(decision, allocation, memory),
    )
    metrics = _metrics(decision, desired)
    return TickResult(replica_allocation, report, decision.events, metrics), memory


def _shown_before(memory: ControlMemory) -> tuple[Any, ...]:
    return (
        memory.shown_scaling,
        memory.shown_batching,
        memory.changes,
        memory.peak_percent,
        memory.over_cap_pod,
        memory.shown_breaker,
    )


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


def _over_cap_pod(decision: ControlDecision, memory: ControlMemory) -> str:
    signals = decision.signals
    if not signals.reporting_pods:
        return memory.over_cap_pod
    over = signals.memory_peak_ratio > decision.settings.cap_percent / 100
    return signals.memory_peak_pod if over else ""


def _changes(
    decision: ControlDecision, memory: ControlMemory, scaling: Shown, batching: Shown, now: float
) -> tuple[Change, ...]:
    """Return the last decisions, including those of this tick."""
    changes = memory.changes
    for what, before, after in (
        ("replicas", memory.shown_scaling, scaling),
        ("limits", memory.shown_batching, batching),
    ):
        if before.value == after.value or not before.value:
            continue
        change = Change(now, what, before.value, after.value, after.reason)
        changes = with_change(changes, change)
    if decision.settings.restarts and decision.restart.valid:
        for pod in decision.restart.value:
            changes = with_change(changes, Change(now, "restart", "", pod, decision.restart.reason))
    for event in decision.events:
        if "Breaker" in event.reason:
            changes = with_change(changes, _breaker_change(event, now))
    return changes


def _breaker_change(event: Event, now: float) -> Change:
    return Change(now, "breaker", "", event.message[:120], event.reason)


def _scaling(decision: ControlDecision, shown: Shown, desired: int) -> ScalingReport:
    is_advisory = decision.settings.scaling_mode is ScalingMode.ADVISORY
    wanted = decision.replicas.value if is_advisory else None
    return ScalingReport(desired, shown.reason, shown.message, shown.since, wanted)


def _batching(decision: ControlDecision, memory: ControlMemory, shown: Shown) -> BatchingReport:
    limits = decision.in_force
    applied = sum(
        1 for put in memory.limits_requests.puts.values() if put.confirmed and put.limits == limits
    )
    return BatchingReport(
        limits.sequences, limits.tokens, applied, shown.reason, shown.message, shown.since
    )


def _breaker(decision: ControlDecision) -> BreakerReport:
    tiers = decision.load.by_tier()
    source = decision.source
    silent = "Prometheus returns no fresh samples" if source.is_open else ""
    since, reason, message = max(
        (decision.control.since, decision.control.reason, decision.control.detail),
        (source.since, "PrometheusLost" if silent else "", silent),
        *((t.since, "Overload" if t.reason else "", t.reason) for t in tiers.values()),
    )
    return BreakerReport(
        str(decision.control.state),
        str(source.state),
        {str(tier): str(breaker.state) for tier, breaker in tiers.items()},
        reason,
        _capital(message) if reason else "",
        since,
    )


def _shown_breaker(held: BreakerReport | None, found: BreakerReport) -> BreakerReport:
    """Return the breakers' report, renewed only when one of them changes its state.

    So a restart of the operator, which resets every waiting time, does not change reason and time.
    """
    return held if held is not None and held.states == found.states else found


def _metrics_available(inputs: _ConditionInputs) -> Value:
    signals = inputs.decision.signals
    if signals.grade is Grade.FRESH:
        return Status.TRUE, Reason.FRESH_METRICS, _origin(inputs.decision)
    if signals.grade is Grade.AGEING:
        return (
            Status.TRUE,
            Reason.FRESH_METRICS,
            "Samples are older than 15 s. No replica is removed until newer samples arrive.",
        )
    return Status.FALSE, *_why_unknown(signals)


def _origin(decision: ControlDecision) -> str:
    """Return a sentence that names the source of the fresh samples."""
    if decision.signals.source is Source.PROMETHEUS or decision.checks_directly:
        return "Samples are fresh and come from Prometheus."
    if decision.prometheus_disputed:
        return (
            "Prometheus has several series where a replica exports one, so replicas are read "
            "directly. Select the scrape job with the operator setting prometheus.selector."
        )
    if decision.source.is_silent:
        return (
            "Prometheus returns no fresh samples. Replicas are read directly, and none is removed."
        )
    return "Samples are fresh and read directly from the replicas."


def _why_unknown(signals: Signals) -> tuple[Reason, str]:
    """Return why signals are unknown; if several reasons apply, the one to check first."""
    if not signals.ready_pods:
        return Reason.NO_METRICS, "No replica is ready."
    if not signals.warmed_up_pods:
        return (
            Reason.NO_METRICS,
            "No replica has been ready for a minute. Samples of the first minute are not used.",
        )
    if signals.reporting_pods:
        text = "Fewer than half of the ready replicas report, so the replica count is unchanged."
        return Reason.TOO_FEW_REPORT, text
    if signals.old_pods:
        return (
            Reason.STALE_METRICS,
            "The newest samples are older than a minute, so the replica count is unchanged.",
        )
    return (
        Reason.NO_METRICS,
        "The replicas report no usable samples, so the replica count is unchanged.",
    )


def _metrics_compatible(inputs: _ConditionInputs) -> Value:
    missing = inputs.decision.signals.missing
    if missing:
        text = f"The engine does not export: {', '.join(missing)}."
        return Status.FALSE, Reason.METRICS_MISSING, text
    if not inputs.decision.signals.reporting_pods:
        return Status.UNKNOWN, Reason.NO_METRICS, "No replica has reported yet."
    return Status.TRUE, Reason.ALL_METRICS_PRESENT, ""


def _memory_within_cap(inputs: _ConditionInputs) -> Value:
    cap = inputs.decision.settings.cap_percent
    if inputs.memory.over_cap_pod:
        text = f"Replica {inputs.memory.over_cap_pod} had a memory peak of {inputs.memory.peak_percent}%, above the cap of {cap}%."
        return Status.FALSE, Reason.ABOVE_CAP, text
    if not inputs.memory.peak_percent:
        return Status.UNKNOWN, Reason.NOT_MEASURED, "No replica has reported its memory use yet."
    return Status.TRUE, Reason.WITHIN_CAP, ""


def _scaling_limited(inputs: _ConditionInputs) -> Value:
    settings, replicas = inputs.decision.settings, inputs.decision.replicas
    if settings.pinned_replicas is not None:
        return (
            Status.TRUE,
            Reason.REPLICAS_PINNED,
            "Autoscaling is off because spec.replicas is set.",
        )
    if settings.scaling_mode is ScalingMode.ADVISORY:
        text = f"{replicas.value} replicas are recommended but not applied: spec.scaling.mode is Advisory."
        return Status.TRUE, Reason.ADVISORY, text
    if inputs.allocation.limited_by:
        return (
            Status.TRUE,
            Reason.GPU_BUDGET,
            f"{_capital(inputs.allocation.limited_by)} allows {inputs.allocation.replicas} of {replicas.value} recommended replicas.",
        )
    if replicas.reason == "ScaleUpBlocked":
        return Status.TRUE, Reason.SCALE_UP_BLOCKED, replicas.detail
    broken = inputs.decision.signals.known and inputs.decision.pressure > 1.0
    if broken and replicas.value >= settings.max_replicas:
        text = f"The load is too high for spec.scaling.maxReplicas ({settings.max_replicas}). Raise it to allow more replicas."
        return Status.TRUE, Reason.AT_MAXIMUM, text
    return Status.FALSE, Reason.WITHIN_BOUNDS, ""


def _degraded(inputs: _ConditionInputs) -> Value:
    settings = inputs.decision.settings
    if settings.breakers_act and inputs.decision.control.state is not BreakerState.CLOSED:
        return (
            Status.TRUE,
            Reason.CONTROL_BREAKER_OPEN,
            f"{_capital(inputs.decision.control.detail)}; safe limits are in force, and no replica is removed.",
        )
    if settings.gates and not inputs.decision.load.is_closed:
        tiers = [
            str(t)
            for t, b in inputs.decision.load.by_tier().items()
            if b.state is not BreakerState.CLOSED
        ]
        text = f"Overload: requests of these tiers are shed: {', '.join(tiers)}."
        return Status.TRUE, Reason.LOAD_BREAKER_OPEN, text
    remedy = inputs.decision.remedy.value
    if remedy is not None:
        text = f"{_capital(remedy.reason)}: engines start with at most {remedy.max_sequences} sequences and a memory cap of {remedy.cap_percent}%."
        return Status.TRUE, Reason.REMEDY_IN_FORCE, text
    if inputs.decision.signals.hung_pods:
        text = (
            f"Engines with work make no progress: {', '.join(inputs.decision.signals.hung_pods)}."
        )
        return Status.TRUE, Reason.ENGINE_HUNG, text
    return Status.FALSE, Reason.AS_EXPECTED, ""


_CONDITIONS: tuple[tuple[ConditionType, Callable[[_ConditionInputs], Value]], ...] = (
    (ConditionType.METRICS_AVAILABLE, _metrics_available),
    (ConditionType.METRICS_COMPATIBLE, _metrics_compatible),
    (ConditionType.MEMORY_WITHIN_CAP, _memory_within_cap),
    (ConditionType.SCALING_LIMITED, _scaling_limited),
    (ConditionType.DEGRADED, _degraded),
)


def _conditions(
    decision: ControlDecision, allocation: Allocation, memory: ControlMemory
) -> tuple[ReportedCondition, ...]:
    rows = []
    for kind, judge in _CONDITIONS:
        status, reason, message = judge(_ConditionInputs(decision, allocation, memory))
        text = (message or reason.text)[:MESSAGE_MAX_LENGTH]
        rows.append(ReportedCondition(kind, status, reason, text))
    return tuple(rows)


_STATES = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 0.5, BreakerState.OPEN: 1.0}

Gauge = tuple[str, tuple[tuple[str, str], ...], float]


def _metrics(decision: ControlDecision, desired: int) -> tuple[Gauge, ...]:
    """Return the gauges of one service; the runtime adds the labels namespace and inference_service."""
    signals, settings = decision.signals, decision.settings
    gauges: list[Gauge] = [
        ("decision_replicas", (("kind", "wanted"),), float(decision.replicas.value)),
        ("decision_replicas", (("kind", "ordered"),), float(desired)),
        ("decision_replicas", (("kind", "live"),), float(decision.live_replicas)),
        ("decision_limit_sequences", (), float(decision.in_force.sequences)),
        ("decision_limit_tokens", (), float(decision.in_force.tokens)),
        ("decision_advisory", (), float(settings.batching_mode is BatchingMode.ADVISORY)),
        ("breaker_state", (("breaker", "control"),), _STATES[decision.control.state]),
        ("breaker_state", (("breaker", "source"),), _STATES[decision.source.state]),
        ("signal_coverage_ratio", (), signals.coverage),
        ("signal_queue_wait_seconds", (), signals.queue_wait_s),
        ("signal_batch_time_seconds", (), signals.batch_time_s),
        ("signal_arrivals_per_second", (), signals.arrivals_per_s),
        ("signal_waiting", (), signals.waiting),
        ("signal_running", (), signals.gauges.running),
        ("signal_kv_ratio", (), signals.kv_ratio),
        ("objective_queue_wait_seconds", (), settings.queue_wait_objective_s),
        ("objective_batch_time_seconds", (), settings.batch_time_objective_s),
        ("pressure_ratio", (), decision.pressure),
        ("model_capacity_sequences", (), decision.capacity),
        ("cold_start_seconds", (), decision.cold_start_s),
    ]
    if settings.restart_fragmented:
        gauges.append(("signal_fragmentation_ratio", (), decision.fragmentation_ratio))
        why = (("reason", str(decision.restart.reason)),)
        gauges.append(("decision_restart", why, float(decision.restart.valid)))
    tiers = decision.load.by_tier()
    for tier, admit in zip(tiers, decision.admission.admit, strict=True):
        gauges.append(("breaker_state", (("breaker", str(tier)),), _STATES[tiers[tier].state]))
        gauges.append(("admit_ratio", (("tier", str(tier)),), admit))
    return tuple(gauges)

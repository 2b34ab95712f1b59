"""The conditions that follow from measurements alone: MetricsAvailable and MetricsCompatible."""

from __future__ import annotations

from fleetkeeper.api.conditions import ConditionType, Reason, Status, fit_message
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.signals.samples import Source
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import Grade
from fleetkeeper.common.values import ReportedCondition


def metrics_conditions(decision: ControlDecision) -> tuple[ReportedCondition, ...]:
    """Return MetricsAvailable and MetricsCompatible."""
    return (
        _condition(ConditionType.METRICS_AVAILABLE, *_metrics_available(decision)),
        _condition(ConditionType.METRICS_COMPATIBLE, *_metrics_compatible(decision.signals)),
    )


def _condition(
    kind: ConditionType, status: Status, reason: Reason, message: str
) -> ReportedCondition:
    return ReportedCondition(kind, status, reason, fit_message(message or reason.text))


def _metrics_available(decision: ControlDecision) -> tuple[Status, Reason, str]:
    signals = decision.signals
    if signals.grade is Grade.FRESH:
        return Status.TRUE, Reason.FRESH_METRICS, _origin(decision)
    if signals.grade is Grade.AGEING:
        text = "Samples are older than 15 s. No replica is removed until newer samples arrive."
        return Status.TRUE, Reason.FRESH_METRICS, text
    return Status.FALSE, *_why_unknown(signals)


def _origin(decision: ControlDecision) -> str:
    """Return a sentence that names the source of the fresh samples."""
    if decision.signals.source is Source.PROMETHEUS or decision.state.inputs.checks_directly:
        return "Samples are fresh and come from Prometheus."
    if decision.state.inputs.prometheus_disputed:
        return (
            "Prometheus has several series where a replica exports one, so replicas are read "
            "directly. Select the scrape job with the operator setting prometheus.selector."
        )
    if decision.breakers.source.is_silent:
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


def _metrics_compatible(signals: Signals) -> tuple[Status, Reason, str]:
    if signals.missing:
        text = f"The engine does not export: {', '.join(signals.missing)}."
        return Status.FALSE, Reason.METRICS_MISSING, text
    if not signals.reporting_pods:
        return Status.UNKNOWN, Reason.NO_METRICS, "No replica has reported yet."
    return Status.TRUE, Reason.ALL_METRICS_PRESENT, ""

"""The control loop's report in the form of the status."""

from __future__ import annotations

from typing import Any

from fleetkeeper.common.values import (
    BatchingReport,
    BreakerReport,
    Change,
    ControlReport,
    MemoryReport,
    Remedy,
    ScalingReport,
)
from fleetkeeper_contract import rfc3339

Status = dict[str, Any]


def report_to_status(report: ControlReport) -> Status:
    """Return the parts of the status that the report has, without the conditions."""
    status: Status = {"decisions": [_change(change) for change in report.decisions]}
    if report.scaling is not None:
        status["scaling"] = _scaling(report.scaling)
    if report.batching is not None:
        status["batching"] = _batching(report.batching)
    if report.breaker is not None:
        status["breaker"] = _breaker(report.breaker)
    if report.memory is not None:
        status["memory"] = _memory(report.memory)
    if report.remedy is not None:
        status["remedy"] = _remedy(report.remedy)
    return status


def _scaling(scaling: ScalingReport) -> Status:
    status: Status = {
        "desired": scaling.desired,
        "reason": scaling.reason,
        "message": scaling.message,
        "since": rfc3339.format(scaling.since),
    }
    return status if scaling.wanted is None else {**status, "wanted": scaling.wanted}


def _batching(batching: BatchingReport) -> Status:
    return {
        "sequences": batching.sequences,
        "tokens": batching.tokens,
        "appliedReplicas": batching.applied_replicas,
        "reason": batching.reason,
        "message": batching.message,
        "since": rfc3339.format(batching.since),
    }


def _breaker(breaker: BreakerReport) -> Status:
    status: Status = {
        "control": breaker.control,
        "source": breaker.source,
        "load": dict(breaker.load),
    }
    if breaker.reason:
        status |= {"reason": breaker.reason, "message": breaker.message}
    if breaker.since:
        status["since"] = rfc3339.format(breaker.since)
    return status


def _memory(memory: MemoryReport) -> Status:
    status: Status = {"capPercent": memory.cap_percent}
    return {**status, "peakPercent": memory.peak_percent} if memory.peak_percent else status


def _remedy(remedy: Remedy) -> Status:
    return {
        "reason": remedy.reason,
        "maxSequences": remedy.max_sequences,
        "capPercent": remedy.cap_percent,
        "attempts": remedy.attempts,
        "generation": remedy.generation,
        "since": rfc3339.format(remedy.since),
    }


def _change(change: Change) -> Status:
    return {
        "time": rfc3339.format(change.time),
        "what": str(change.what),
        "from": change.before,
        "to": change.after,
        "reason": change.reason,
    }

"""Reports of one service for the tests of the control loop."""

from __future__ import annotations

from fleetkeeper.api.conditions import ConditionType
from fleetkeeper.autoscale.arbitrate import Allocation
from fleetkeeper.autoscale.decision import ControlDecision, TickResult
from fleetkeeper.autoscale.report import build_report
from tests.support.control_cases import Loop, reported_status


def reported(
    loop: Loop, decision: ControlDecision, allocation: Allocation | None = None
) -> TickResult:
    """The report with the want granted, memory carried on."""
    given = allocation or Allocation(decision.want.replicas)
    report, loop.memory = build_report(decision, given, loop.memory, loop.now)
    return report


def condition(report: TickResult, kind: ConditionType) -> tuple[str, str, str]:
    """Status, reason, message."""
    row = next(row for row in reported_status(report.report)["conditions"] if row["type"] == kind)
    return row["status"], row["reason"], row["message"]

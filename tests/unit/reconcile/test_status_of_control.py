"""The report of the control loop in the status, and the conditions on its facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.api.conditions import (
    ConditionType,
    Reason,
    Status,
)
from fleetkeeper.common.values import (
    CAUSE_UNKNOWN,
    BatchingReport,
    BreakerReport,
    ControlReport,
    MemoryReport,
    Remedy,
    ReportedCondition,
    ScalingReport,
)
from fleetkeeper.reconcile.planner import decide_plan
from fleetkeeper.reconcile.status.degradation import REPORTED_BY_CONTROL_LOOP
from fleetkeeper.reconcile.types import (
    Container,
    Termination,
)
from tests.support.reconcile.plan_cluster import settle
from tests.support.reconcile.plan_world import (
    START,
    plan_of,
    with_spec,
)
from tests.support.reconcile.status_cases import (
    RESTING,
    condition_of,
)


def test_the_summary_has_ready_and_breaker_for_the_columns() -> None:
    """READY and BREAKER of `kubectl get fis`."""
    assert RESTING.status["summary"] == {"ready": "1/1", "breaker": "closed"}
    breaker = BreakerReport("Closed", "Closed", {"realtime": "Closed", "batch": "Open"})
    world = replace(RESTING, control_report=ControlReport(breaker=breaker))
    status = plan_of(world).status
    assert status is not None
    assert status["summary"]["breaker"] == "batch open"
    breaker = BreakerReport("Closed", "Open", {"batch": "Closed"})
    report = ControlReport(breaker=breaker)
    status = plan_of(replace(RESTING, control_report=report)).status
    assert status is not None
    assert status["summary"]["breaker"] == "prometheus lost"


def test_the_report_of_the_control_loop_is_in_the_status() -> None:
    """Its parts complete, its conditions with times; without a report they stay as they were."""
    report = ControlReport(
        batching=BatchingReport(96, 4096, 1, "BatchTimeHeadroom", "m", RESTING.now),
        memory=MemoryReport(80, 74),
        conditions=(
            ReportedCondition(
                ConditionType.METRICS_AVAILABLE, Status.TRUE, Reason.FRESH_METRICS, "m"
            ),
        ),
        safe_limits_cause="d",
    )
    world = settle(replace(RESTING, control_report=report))
    batching = world.status["batching"]
    assert (batching["sequences"], batching["tokens"]) == (96, 4096)
    assert world.status["memory"] == {"capPercent": 80, "peakPercent": 74}
    assert world.condition("MetricsAvailable") == ("True", "FreshMetrics")
    assert world.condition("Degraded") == ("True", "ControlBreakerOpen")
    restarted = replace(world, control_report=None, status_written=None)
    assert plan_of(restarted).status is None or (
        plan_of(restarted).status["batching"] == batching  # type: ignore[index]
    )
    assert settle(restarted).condition("MetricsAvailable") == ("True", "FreshMetrics")


def test_a_remedy_lowers_the_start_up_values_and_outlives_a_restart() -> None:
    """The engines roll once; a restarted operator, which knows no remedy yet, rolls nothing back."""
    remedy = Remedy("CUDAOutOfMemory", 64, 80, 1, 1, RESTING.now)
    world = settle(replace(RESTING, control_report=ControlReport(remedy=remedy)))
    assert world.engine.template_hash != RESTING.engine.template_hash
    restarted = replace(world, control_report=None, status_written=None)
    assert not plan_of(restarted).actions


BY_CONTROL: dict[Reason, ControlReport] = {
    Reason.CONTROL_BREAKER_OPEN: ControlReport(safe_limits_cause="why"),
    Reason.LOAD_BREAKER_OPEN: ControlReport(shed_tiers=("batch",)),
    Reason.REMEDY_IN_FORCE: ControlReport(remedy=Remedy("CUDAOutOfMemory", 256, 80, 1, 1, START)),
    Reason.ENGINE_HUNG: ControlReport(hung_pods=("chat-1",)),
}
"""A report of the control loop with the facts that each of its reasons for Degraded rests on."""


@pytest.mark.parametrize(
    ("by_control", "reported_first"),
    [
        (Reason.LOAD_BREAKER_OPEN, Reason.SOME_REPLICAS_FAILING),
        (Reason.CONTROL_BREAKER_OPEN, Reason.CONTROL_BREAKER_OPEN),
    ],
)
def test_a_failing_replica_is_reported_before_the_overload_that_it_causes(
    by_control: Reason, reported_first: Reason
) -> None:
    """With an event, at once: not only when the breaker has closed again."""
    end = Termination(75, "Error", "", RESTING.now - 5)
    container = Container("engine", ready=False, restarts=1, last_terminated=end)
    world = settle(with_spec(RESTING, replicas=2))
    broken = replace(world.pods[0], ready=False, ready_since=None, containers=(container,))
    world = replace(
        world,
        pods=(broken, *world.pods[1:]),
        control_report=BY_CONTROL[by_control],
        status_written=None,
    )
    assert condition_of(world, "Degraded")["reason"] == reported_first
    events = [event.reason for event in plan_of(world).events]
    assert (Reason.SOME_REPLICAS_FAILING in events) is (
        reported_first is Reason.SOME_REPLICAS_FAILING
    )


@pytest.mark.parametrize("reason", BY_CONTROL)
def test_problems_with_events_of_the_control_loop_get_no_second_event(reason: Reason) -> None:
    """Its breakers, remedies and replacements have events of its own: the condition follows without one."""
    world = replace(RESTING, control_report=BY_CONTROL[reason], status_written=None)
    plan = plan_of(world)
    assert plan.status is not None
    assert condition_of(world, "Degraded")["reason"] == reason
    assert plan.events == ()
    assert set(BY_CONTROL) == REPORTED_BY_CONTROL_LOOP


def test_a_new_process_keeps_the_conditions_whose_facts_it_does_not_know_yet() -> None:
    """The cause of an open breaker, and the replica above the cap, until they are measured again."""
    memory = MemoryReport(80, 91, "chat-1")
    report = ControlReport(memory=memory, safe_limits_cause="no signals for 3 ticks")
    before = settle(replace(RESTING, control_report=report))
    unknown = ControlReport(memory=MemoryReport(80, 91), safe_limits_cause=CAUSE_UNKNOWN)
    assert settle(replace(before, control_report=unknown)).status == before.status
    assert "chat-1" in condition_of(before, "MemoryWithinCap")["message"]
    assert "No signals" in condition_of(before, "Degraded")["message"]
    known = ControlReport(memory=MemoryReport(80, 91, ""))
    after = settle(replace(before, control_report=known))
    assert after.condition("MemoryWithinCap") == ("True", "WithinCap")
    assert after.condition("Degraded") == ("False", "AsExpected")


@pytest.mark.parametrize(
    ("limit", "reason", "figure"),
    [
        ({"wanted": 5}, Reason.ADVISORY, "5 replicas"),
        ({"budget": "the fleet's budget of 4 GPUs", "recommended": 5}, Reason.GPU_BUDGET, "1 of 5"),
        ({"blocked": "revision 2 fails"}, Reason.SCALE_UP_BLOCKED, "revision 2"),
        ({"exceeded_max": 4}, Reason.AT_MAXIMUM, "(4)"),
    ],
)
def test_scaling_limited_follows_from_the_facts_of_the_control_loop(
    limit: dict[str, Any], reason: Reason, figure: str
) -> None:
    """For a pinned service the pin decides, whatever the control loop reports."""
    report = ControlReport(scaling=ScalingReport(1, "Steady", "m", START, **limit))
    world = replace(RESTING, control_report=report)
    assert condition_of(world, "ScalingLimited")["reason"] == reason
    assert figure in condition_of(world, "ScalingLimited")["message"]
    pinned = settle(replace(with_spec(RESTING, replicas=1), control_report=report))
    assert pinned.condition("ScalingLimited") == ("True", "ReplicasPinned")


def test_engines_that_demand_no_grant_are_named_with_an_event() -> None:
    """The control loop measures it, and records no event of its own."""
    report = ControlReport(open_pods=("chat-1", "chat-2"))
    world = replace(RESTING, control_report=report, status_written=None)
    found = condition_of(world, "Degraded")
    assert found["reason"] == Reason.GRANTS_NOT_DEMANDED
    assert "chat-1, chat-2" in found["message"]
    assert [event.reason for event in plan_of(world).events] == [Reason.GRANTS_NOT_DEMANDED]
    settled = settle(world)
    # A new process does not know yet, so it keeps the condition.
    pending = replace(settled.snapshot(), control_report=None, control_pending=True)
    assert decide_plan(pending, settled.context, settled.now).status is None
    known = replace(settled, control_report=ControlReport())
    assert condition_of(known, "Degraded")["reason"] == Reason.AS_EXPECTED


def test_a_demand_without_keys_is_the_first_problem_of_an_available_service() -> None:
    """Every request is refused, whatever else is wrong."""
    world = with_spec(RESTING, access="Gateway")
    found = condition_of(replace(world, status_written=None), "Degraded")
    assert found["reason"] == Reason.NO_GRANT_KEYS
    assert "grantJwksFile" in found["message"]

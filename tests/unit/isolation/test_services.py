"""An error at one service stays that service's: the others are reconciled, controlled and told.

Every step that is done for one service is made to fail in turn, with errors that no list of types
foresees. A new step belongs into `STEPS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, MutableMapping
from decimal import InvalidOperation
from pkgutil import resolve_name
from typing import Any

import pytest
from structlog.testing import capture_logs

from fleetkeeper.adapters.kubernetes.lease import LeaseLost
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.planner import decide_plan
from fleetkeeper.reconcile.status.defect import plan_of_defect
from fleetkeeper.reconcile.types import Defect, Snapshot
from fleetkeeper.runtime.defects import KEPT_S
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from tests.support.operators.contained import counted, new_defects
from tests.support.operators.isolation_world import NAMESPACE, Fault, Operator

STEPS = {
    "state.cache.Cache.put_service": {"service_event", "resync"},
    "autoscaler.service_state.parsed_service": {"observe"},
    "autoscaler.service_state.observe_fleet": {"observe"},
    "autoscaler.service_state.read_settings": {"observe"},
    "autoscaler.loop.decide_service": {"decide"},
    "autoscaler.arbiter.arbitrate": {"arbitrate"},
    "autoscaler.loop.build_report": {"report"},
    "autoscaler.metrics.ControlMetrics.show": {"report"},
    "event_recorder.event_manifest": {"event"},
    "reconciler.controller.decide_plan": {"reconcile"},
    "reconciler.controller.Controller._snapshot": {"reconcile"},
    "reconciler.controller.Controller._show": {"reconcile", "status"},
    "reconciler.executor.Executor.carry_out": {"reconcile"},
}
"""By the function below fleetkeeper.runtime: the steps in which its failure is counted."""
ERRORS = (
    RuntimeError("no list foresees it"),
    RecursionError("maximum recursion depth exceeded"),
    InvalidOperation(),
    ExceptionGroup("several", [OSError("a file")]),
)


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    """What is logged. Rendering the tracebacks of deep objects would take minutes."""
    with capture_logs() as lines:
        yield lines


def degraded(operator: Operator, name: str) -> tuple[str, str]:
    return operator.condition(name, "Degraded")


async def serve_others(operator: Operator, rounds: int = 3) -> None:
    """Rounds in which the other services get a new spec each, and follow it."""
    for number in range(rounds):
        for name in ("good", "well"):
            operator.change(name, scaling={"minReplicas": 1, "maxReplicas": 4 + number})
        await operator.round()
        for name in ("good", "well"):
            assert operator.is_served(name), name
            assert degraded(operator, name)[1] != "InternalError"


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("step", STEPS)
async def test_a_step_that_fails_for_one_service_fails_for_no_other(
    step: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = await Operator("good", "bad", "well").started()
    assert operator.is_served("bad")
    assert counted(operator.metrics) == {}
    fault = Fault("bad", error)
    module, _, name = step.rpartition(".")
    real = _found(step)
    monkeypatch.setattr(f"fleetkeeper.runtime.{module}.{name}", fault.wrap(real))
    await serve_others(operator)
    assert fault.hits
    assert counted(operator.metrics).keys() >= STEPS[step]
    if step != "reconciler.executor.Executor.carry_out":  # nothing can be written then
        assert degraded(operator, "bad") == ("True", "InternalError")
    monkeypatch.undo()
    operator.clock += KEPT_S
    await operator.round()
    await operator.round()
    assert operator.is_served("bad")
    assert degraded(operator, "bad")[1] != "InternalError"


@pytest.mark.parametrize("ends", [LeaseLost("another leads"), asyncio.CancelledError()], ids=type)
@pytest.mark.parametrize("step", STEPS)
async def test_a_lost_lease_and_cancellation_pass_every_step(
    step: str, ends: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = await Operator("good", "bad").started()
    module, _, name = step.rpartition(".")
    fault = Fault("bad", ends)
    monkeypatch.setattr(f"fleetkeeper.runtime.{module}.{name}", fault.wrap(_found(step)))
    with pytest.raises(type(ends)):
        await operator.round()
    assert counted(operator.metrics) == {}


@pytest.mark.parametrize(
    ("edge", "where"), [("put_limits", "send_limits"), ("server.post_event", "event")]
)
async def test_an_order_or_an_event_that_breaks_its_round_leaves_the_others_to_be_sent(
    edge: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = await Operator("bad", "good").started()
    owner, _, name = edge.rpartition(".")
    target = getattr(operator, owner) if owner else operator
    fault = Fault("bad", RuntimeError("no list foresees it"))
    monkeypatch.setattr(target, name, fault.wrap(getattr(target, name)))
    if where == "send_limits":
        operator.loop.dispatcher._engines = operator
    operator.sent.clear()
    operator.server.events.clear()
    for _ in range(40):  # until leases are renewed
        await operator.round()
    assert fault.hits
    assert counted(operator.metrics)[where] >= 1
    assert degraded(operator, "bad") == ("True", "InternalError")
    assert operator.is_served("good")
    if where == "send_limits":
        assert {request.pod for request in operator.sent} == {"good-0"}
    else:
        assert {name for name, _ in operator.server.events} == {"good"}


async def test_a_failing_source_leaves_every_service_to_decide_on_what_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No service can be named for it: it is counted, and silence is decided on."""
    operator = await Operator("good").started()

    async def fail(*_: object) -> None:
        raise RuntimeError("no list foresees it")

    monkeypatch.setattr(operator.loop._source, "observe", fail)
    for _ in range(20):
        await operator.round()
    assert counted(operator.metrics) == {"measure": 20.0}
    assert operator.condition("good", "MetricsAvailable")[0] == "False"


async def test_a_defect_that_stays_is_written_and_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator = await Operator("bad").started()
    fault = Fault("bad", RuntimeError("no list foresees it"))
    monkeypatch.setattr(
        "fleetkeeper.runtime.reconciler.controller.decide_plan",
        fault.wrap(_found("reconciler.controller.decide_plan")),
    )
    await operator.round()
    operator.server.status_writes.clear()
    for _ in range(5):
        await operator.round()
    assert fault.hits >= 6
    assert operator.server.status_writes == []
    told = [event for event in operator.server.events if event[1] == "InternalError"]
    assert told == [("bad", "InternalError")]


def test_the_message_says_what_happened_what_holds_and_what_to_do() -> None:
    resource = {"metadata": {"generation": 3}, "status": {"url": "http://chat", "conditions": [
        {"type": "Ready", "status": "True"}]}}  # fmt: skip
    plan = plan_of_defect(resource, Defect("decide", "InvalidOperation"), 1_000_000.0)
    assert plan.status is not None
    ready, shown = plan.status["conditions"]
    assert (plan.status["url"], ready["type"]) == ("http://chat", "Ready")
    assert "observedGeneration" not in plan.status
    for word in ("'decide'", "InvalidOperation", "'defect'"):
        assert word in shown["message"]
    assert len(shown["message"]) <= 256


def test_a_defect_is_logged_when_it_is_new_and_not_at_every_tick(
    logged: list[MutableMapping[str, Any]],
) -> None:
    clock = [100.0]
    defects = new_defects(OperatorMetrics(), monotonic=lambda: clock[0])
    key = Key(NAMESPACE, "chat")
    for _ in range(200):
        with defects.contained("decide", key):
            raise RuntimeError("no list foresees it")
        clock[0] += 5.0
    assert [(line["where"], line["service"]) for line in logged] == [("decide", str(key))] * 2
    assert defects.of(key) == Defect("decide", "RuntimeError")


def test_a_defect_that_an_upgrade_mended_is_not_shown_for_ever() -> None:
    """The control loop never judges a service with an invalid spec, so nobody waits for it."""
    shown = {"type": "Degraded", "status": "True", "reason": "InternalError", "message": "text"}
    resource = {
        "apiVersion": "fleetkeeper.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"namespace": NAMESPACE, "name": "chat", "uid": "u", "generation": 1},
        "spec": {"model": {"source": "pvc://models/llama"}, "resources": {"memory": "1e999"}},
        "status": {"observedGeneration": 1, "conditions": [shown]},
    }
    snapshot = Snapshot(resource=resource, control_pending=True)
    plan = decide_plan(snapshot, default_context(), 1_000_000.0)
    assert plan.status is not None
    rows = {item["type"]: item["reason"] for item in plan.status["conditions"]}
    assert rows["Stalled"] == "InvalidSpec"
    assert rows["Degraded"] != "InternalError"


def test_a_second_error_of_a_service_does_not_change_what_its_status_shows() -> None:
    """Errors that take turns would else be a write a tick."""
    asked: list[Key] = []
    defects = new_defects(OperatorMetrics(), changed=asked.append)
    key = Key(NAMESPACE, "chat")
    for number in range(20):
        with defects.contained(("observe", "decide", "arbitrate")[number % 3], key):
            raise (RuntimeError, KeyError)[number % 2]("any")
    assert defects.of(key) == Defect("observe", "RuntimeError")
    assert asked == [key]


def _found(step: str) -> Any:
    found: Any = resolve_name(f"fleetkeeper.runtime.{step}")
    return found

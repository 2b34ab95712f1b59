"""The status tells each cause once, in closed words, and is written only when it says something new."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.api.conditions import (
    MESSAGE_MAX_LENGTH,
    NOT_READY_REASONS,
    ONLY_WHEN_TRUE,
    ConditionType,
    Reason,
    Status,
)
from fleetkeeper.api.profile import ProfileCatalog
from fleetkeeper.api.status import InferenceServiceStatus
from fleetkeeper.common.values import (
    BatchingReport,
    BreakerReport,
    ControlReport,
    Manifest,
    MemoryReport,
    Remedy,
    ReplicaAllocation,
    ReportedCondition,
)
from fleetkeeper.reconcile.planner import decide_plan
from fleetkeeper.reconcile.status.build import decide_status_write
from fleetkeeper.reconcile.types import (
    Child,
    Container,
    Kind,
    ObjectCondition,
    ObjectEvent,
    Pod,
    Snapshot,
    Termination,
    UnreadableObject,
    WriteFailure,
    WriteProblem,
)
from tests.support.plan_cluster import live, settle, step
from tests.support.plan_world import (
    START,
    Behaviour,
    World,
    act,
    edited,
    new_world,
    plan_of,
    service,
    with_spec,
)

ENGINE = (Kind.DEPLOYMENT, "chat")
RESTING = settle(new_world(routing={"policy": "None"}))
ROUTED = settle(new_world())
CONTROL = (
    ConditionType.METRICS_AVAILABLE,
    ConditionType.METRICS_COMPATIBLE,
    ConditionType.MEMORY_WITHIN_CAP,
)


def told(world: World, kind: str) -> dict[str, Any]:
    """A condition of the status as it would stand after the next plan."""
    world = replace(world, status_written=None, children_written=None)
    plan = plan_of(world)
    status = plan.status or plan_of(act(world, replace(plan, status=None))).status or world.status
    (found,) = [item for item in status["conditions"] if item["type"] == kind]
    return dict(found)


def with_pod(state: dict[str, Any], **pod: Any) -> World:
    """A new service whose one engine pod is in this state."""
    world = step(
        act(new_world(routing={"policy": "None"}), plan_of(new_world(routing={"policy": "None"}))),
        1,
    )
    broken = [
        replace(
            item,
            ready=False,
            **{"scheduled": True, **pod},
            containers=(Container("engine", **state),),
        )
        for item in world.pods
    ]
    return replace(world, pods=tuple(broken))


def ended(code: int, death: str, reason: str = "Error") -> World:
    """A new service whose engine ended so."""
    line = json.dumps(
        {"class": death, "code": code, "phase": "start", "message": "m", "detail": ""}
    )
    end = Termination(code, reason, line, START)
    return with_pod({"waiting_reason": "CrashLoopBackOff", "last_terminated": end, "restarts": 3})


def refused(problem: WriteProblem, message: str) -> World:
    """A new service of which a child was refused a moment ago."""
    world = new_world()
    failure = WriteFailure("Deployment", "chat", problem, message, START, START)
    return replace(world, failures=(failure,))


def forbidden_pods(message: str) -> World:
    """A new service whose pods the API server refuses."""
    world = step(act(new_world(), plan_of(new_world())), 1)
    condition = ObjectCondition("ReplicaFailure", "True", "FailedCreate", message)
    deployment = replace(world.engine, conditions=(condition,))
    return replace(world, pods=(), children={**world.children, ENGINE: deployment})


def foreign_deployment() -> World:
    """A new service under whose name somebody else's Deployment stands."""
    return replace(new_world(), children={ENGINE: Child(Kind.DEPLOYMENT, "chat", "u", "1", "d")})


REACHED: dict[Reason, World] = {
    Reason.IMAGE_PULL: with_pod({"waiting_reason": "ErrImagePull", "waiting_message": "no"}),
    Reason.UNSCHEDULABLE: with_pod(
        {}, scheduled=False, unschedulable="0/1 nodes are available: 1 Insufficient cpu."
    ),
    Reason.INSUFFICIENT_GPU: with_pod(
        {}, scheduled=False, unschedulable="0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    ),
    Reason.MISSING_VOLUME: with_pod(
        {}, scheduled=False, unschedulable='persistentvolumeclaim "models" not found'
    ),
    Reason.MISSING_SECRET: with_pod(
        {"waiting_reason": "CreateContainerConfigError", "waiting_message": 'secret "hf" not found'}
    ),
    Reason.MODEL_NOT_FOUND: ended(66, "ModelNotFound"),
    Reason.MODEL_NOT_READABLE: ended(77, "ModelNotReadable"),
    Reason.BAD_ENGINE_OPTION: ended(64, "BadEngineOption"),
    Reason.UNSUPPORTED_ARCHITECTURE: ended(69, "UnsupportedArchitecture"),
    Reason.CUDA_OUT_OF_MEMORY: ended(72, "CUDAOutOfMemory"),
    Reason.HOST_OUT_OF_MEMORY: ended(137, "Unknown", "OOMKilled"),
    Reason.ENGINE_HUNG: ended(75, "Hung"),
    Reason.CRASH_LOOP: ended(70, "Unknown"),
    Reason.QUOTA_EXCEEDED: forbidden_pods('pods "x" is forbidden: exceeded quota: gpus'),
    Reason.ADMISSION_DENIED: refused(WriteProblem.ADMISSION, "denied the request: no"),
    Reason.NAME_CONFLICT: foreign_deployment(),
    Reason.UNKNOWN_PROFILE: new_world(engine={"profile": "tpu"}),
    Reason.CRD_TOO_OLD: replace(new_world(), crd_missing=("spec.breaker",)),
    Reason.UNREADABLE_OBJECT: replace(
        new_world(), unreadable=(UnreadableObject("Deployment", "chat", "spec.replicas"),)
    ),
    Reason.INVALID_SPEC: new_world(model={"source": "s3://bucket/model"}),
    Reason.STOPPED: new_world(replicas=0),
    Reason.PAUSED: new_world(paused=True),
    Reason.NAMESPACE_TERMINATING: refused(WriteProblem.NAMESPACE_TERMINATING, "being deleted"),
}


def test_every_reason_for_not_ready_is_reached() -> None:
    """The table holds all that the API promises."""
    assert set(REACHED) >= NOT_READY_REASONS | {Reason.INVALID_SPEC}


@pytest.mark.parametrize("reason", REACHED)
def test_each_reason_is_told_in_available_and_ready(reason: Reason) -> None:
    """One cause, one reason, at the first look after it shows, with what to do."""
    for kind in ("Available", "Ready"):
        condition = told(REACHED[reason], kind)
        assert (condition["status"], condition["reason"]) == ("False", reason)
        assert len(condition["message"]) <= MESSAGE_MAX_LENGTH


STALLS = (
    Reason.NAME_CONFLICT,
    Reason.UNKNOWN_PROFILE,
    Reason.CRD_TOO_OLD,
    Reason.INVALID_SPEC,
    Reason.QUOTA_EXCEEDED,
    Reason.ADMISSION_DENIED,
    Reason.BAD_ENGINE_OPTION,
    Reason.CUDA_OUT_OF_MEMORY,
    Reason.CRASH_LOOP,
)


@pytest.mark.parametrize("reason", STALLS)
def test_what_time_does_not_heal_is_stalled_and_not_reconciling(reason: Reason) -> None:
    """GitOps tools read Stalled as failed; both at once would contradict one another."""
    assert told(REACHED[reason], "Stalled")["reason"] == reason
    kinds = {item["type"] for item in (plan_of(REACHED[reason]).status or {})["conditions"]}
    assert "Reconciling" not in kinds


def test_an_event_tells_of_a_secret_that_a_pod_waits_for() -> None:
    """The plan asks for the pod's events, and the next one knows."""
    world = with_pod({"waiting_reason": "ContainerCreating"})
    world = replace(world, now=world.now + 30)
    (uid,) = plan_of(world).wants_events
    event = ObjectEvent(uid, "FailedMount", 'secret "hf" not found', world.now)
    plan = decide_plan(replace(world.snapshot(), events=(event,)), world.context, world.now)
    assert not plan.wants_events
    assert plan.status is not None
    (ready,) = [item for item in plan.status["conditions"] if item["type"] == "Ready"]
    assert ready["reason"] == Reason.MISSING_SECRET


BLOCKS: dict[str, Callable[[World], World]] = {
    "unreadable spec": lambda world: with_spec(world, model={"source": "nowhere"}),
    "older CRD": lambda world: replace(world, crd_missing=("spec.breaker",)),
    "profile gone": lambda world: replace(
        world, context=replace(world.context, catalog=ProfileCatalog())
    ),
    "unknown profile": lambda world: with_spec(world, engine={"profile": "tpu"}),
    "refused option": lambda world: with_spec(world, engine={"options": {"host": "0.0.0.0"}}),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_what_keeps_us_from_knowing_never_touches_what_runs(block: str) -> None:
    """No write to any child, not even a repair; the old replicas serve and the status remembers."""
    world = BLOCKS[block](RESTING)
    world = edited(world, ENGINE, digest="edited", desired_replicas=1)
    plan = plan_of(world)
    assert not plan.actions
    assert plan.status is not None
    assert plan.status["engine"] == RESTING.status["engine"]
    assert plan.status["lastGood"]["templateHash"] == RESTING.engine.template_hash
    assert told(world, "Available")["status"] == "True"
    assert told(world, "Stalled")["status"] == "True"
    assert plan_of(act(world, plan)).is_empty


def test_an_unreadable_spec_tells_its_first_mistake_and_how_many_more() -> None:
    """All mistakes are found at once; a message holds one and the count."""
    world = new_world(model={"source": "nowhere"}, replicas=-1, scaling={"minReplicas": 0})
    message = told(world, "Stalled")["message"]
    assert message.startswith("spec.")
    assert "2 more" in message


def test_ready_before_stays_ready_when_the_crd_is_too_old() -> None:
    """An operator upgraded before its CRDs does not turn a whole fleet red in Ready."""
    world = settle(replace(RESTING, crd_missing=("spec.breaker",)))
    assert world.condition("Ready") == ("True", "EnoughReplicasReady")
    assert world.condition("Stalled") == ("True", "CRDTooOld")
    assert settle(replace(world, crd_missing=())).condition("Stalled") is None


def test_all_conditions_stand_from_the_first_look() -> None:
    """Each type once, in a fixed order; those of the control loop Unknown; the special ones only when True."""
    status = plan_of(replace(RESTING, resource=service(routing={"policy": "None"}))).status
    assert status is not None
    kinds = [item["type"] for item in status["conditions"]]
    assert [kind for kind in ConditionType if kind not in ONLY_WHEN_TRUE] == [
        kind for kind in kinds if kind not in ONLY_WHEN_TRUE
    ]
    unknown = {item["type"] for item in status["conditions"] if item["status"] == "Unknown"}
    assert unknown == set(CONTROL)
    assert all(item["observedGeneration"] == 1 for item in status["conditions"])


def test_a_time_moves_only_when_a_status_flips() -> None:
    """Another reason is not another time."""
    world = live(replace(new_world(routing={"policy": "None"}), gpus=0), 20)
    assert world.condition("Ready") == ("False", "InsufficientGPU")
    since = told(world, "Ready")["lastTransitionTime"]
    pulling = (Container("engine", waiting_reason="ErrImagePull"),)
    pods = tuple(replace(pod, scheduled=True, containers=pulling) for pod in world.pods)
    failing = replace(world, pods=pods, now=world.now + 100)
    assert told(failing, "Ready")["reason"] == Reason.IMAGE_PULL
    assert told(failing, "Ready")["lastTransitionTime"] == since
    ready = settle(replace(world, gpus=1))
    assert told(ready, "Ready")["lastTransitionTime"] > since


@pytest.mark.parametrize("seconds", [1, 59, 3_600, 86_400 * 30])
def test_no_clock_enters_the_status(seconds: int) -> None:
    """However much later the same world is looked at: nothing to write."""
    assert plan_of(replace(RESTING, now=RESTING.now + seconds)).is_empty
    assert plan_of(replace(ROUTED, now=ROUTED.now + seconds)).is_empty


@pytest.mark.parametrize("world", [*REACHED.values(), RESTING, ROUTED], ids=lambda _: "")
def test_every_status_fits_the_schema_of_the_crd(world: World) -> None:
    """What the API server would prune would be written for ever."""
    status = plan_of(world).status or world.status
    read = InferenceServiceStatus.model_validate_json(json.dumps(status))
    assert read.to_manifest() == status


def test_numbers_are_written_at_most_once_in_ten_seconds() -> None:
    """A ready replica more is a number; it can wait, and the plan says how long."""
    numbers = {**RESTING.status, "readyReplicas": 2}
    assert write_of(numbers, written=-4) == (None, 6.0)
    assert write_of(numbers, written=-10) == (numbers, None)
    assert write_of(numbers, written=None) == (numbers, None)


def write_of(
    desired: Manifest, *, written: float | None, children_written: float | None = None
) -> tuple[Manifest | None, float | None]:
    """What is decided at time 0 over the resting service's status."""
    return decide_status_write(
        desired, RESTING.status, written=written, children_written=children_written, now=0.0
    )


def moving(**parts: Any) -> Manifest:
    """The resting service's status, with Progressing=True."""
    conditions = [
        {**item, "status": "True", "reason": "ScalingUp"} if item["type"] == "Progressing" else item
        for item in RESTING.status["conditions"]
    ]
    return {**RESTING.status, "conditions": conditions, **parts}


def test_a_movement_that_we_began_is_told_after_three_seconds_or_when_it_is_over() -> None:
    """One status tells a short movement; a long one is told while it lasts."""
    assert write_of(moving(), written=None, children_written=-1) == (None, 2.0)
    assert write_of(moving(), written=None, children_written=-3) == (moving(), None)
    over = {**RESTING.status, "replicas": 2}
    assert write_of(over, written=None, children_written=-1) == (over, None)


def test_a_first_router_that_comes_after_the_engines_is_part_of_the_start() -> None:
    """The engines are complete, so nothing progresses; the router follows, and one status tells it."""
    waits = [
        {**item, "status": "False", "reason": "NoReadyRouter"}
        if item["type"] in {"Available", "Ready"}
        else item
        for item in RESTING.status["conditions"]
    ]
    status = {**RESTING.status, "conditions": waits}
    assert write_of(status, written=None, children_written=-1) == (None, 2.0)
    assert write_of(status, written=None, children_written=None) == (status, None)


def test_what_later_looks_rest_on_never_waits_for_a_movement() -> None:
    """A crash in these three seconds would restart the engines on the profile before."""
    changed = moving(engine={**RESTING.status["engine"], "profile": "cuda-0.33.0-1"})
    assert write_of(changed, written=None, children_written=-1) == (changed, None)


def test_trouble_never_waits_for_a_movement() -> None:
    """Stalled and Degraded are told in the look that finds them."""
    world = REACHED[Reason.ADMISSION_DENIED]
    assert plan_of(replace(world, children_written=world.now)).status is not None


def test_a_condition_that_changes_is_written_at_once() -> None:
    """What people and tools wait for does not wait."""
    world = replace(RESTING, status_written=RESTING.now, pods=())
    status = plan_of(world).status
    assert status is not None
    assert told(world, "Ready")["status"] == "False"


def test_content_that_is_equal_is_not_written() -> None:
    """The status in place is the status wanted."""
    assert write_of(RESTING.status, written=None) == (None, None)


def test_summary_tells_ready_and_breaker_for_the_columns() -> None:
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


def test_the_control_loops_word_stands_in_the_status() -> None:
    """Its pieces whole, its conditions with our times; without a word they stay as they were."""
    report = ControlReport(
        batching=BatchingReport(96, 4096, 1, "BatchTimeHeadroom", "m", RESTING.now),
        memory=MemoryReport(80, 74),
        conditions=(
            ReportedCondition(
                ConditionType.METRICS_AVAILABLE, Status.TRUE, Reason.FRESH_METRICS, "m"
            ),
            ReportedCondition(
                ConditionType.DEGRADED, Status.TRUE, Reason.CONTROL_BREAKER_OPEN, "d"
            ),
        ),
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


def test_a_service_without_its_router_does_not_answer() -> None:
    """Engines ready, no router: Available is False and says which."""
    alone = tuple(pod for pod in ROUTED.pods if pod.component == "engine")
    assert told(replace(ROUTED, pods=alone), "Available")["reason"] == Reason.NO_READY_ROUTER
    broken = Pod(
        "chat-fk-router-1",
        "r",
        "chat",
        "router",
        None,
        "",
        ROUTED.now,
        scheduled=True,
        containers=(Container("router", waiting_reason="ErrImagePull"),),
    )
    assert told(replace(ROUTED, pods=(*alone, broken)), "Available")["reason"] == Reason.IMAGE_PULL


def test_a_ready_replica_that_keeps_ending_degrades_the_service() -> None:
    """Ready=True while it crashes over and over is not "as asked"."""
    end = Termination(72, "Error", "", RESTING.now - 60)
    container = Container("engine", ready=True, restarts=5, last_terminated=end)
    pods = tuple(replace(pod, containers=(container,)) for pod in RESTING.pods)
    assert told(replace(RESTING, pods=pods), "Degraded")["reason"] == Reason.SOME_REPLICAS_FAILING


def test_replicas_out_of_service_by_their_own_readiness_degrade_the_service() -> None:
    """They run and were ready: the others serve, and a person hears which do not."""
    world = settle(with_spec(RESTING, replicas=2))
    out = replace(world.pods[0], ready=False, ready_since=None, ejected_since=world.now - 30)
    found = told(replace(world, pods=(out, *world.pods[1:])), "Degraded")
    assert (found["status"], found["reason"]) == ("True", Reason.PODS_EJECTED)
    assert out.name in found["message"]
    assert told(world, "Degraded")["status"] == "False"


@pytest.mark.parametrize(
    ("by_control", "told_first"),
    [
        (Reason.LOAD_BREAKER_OPEN, Reason.SOME_REPLICAS_FAILING),
        (Reason.CONTROL_BREAKER_OPEN, Reason.CONTROL_BREAKER_OPEN),
    ],
)
def test_a_failing_replica_is_told_before_the_overload_that_it_causes(
    by_control: Reason, told_first: Reason
) -> None:
    """With an event, at once: not only when the breaker has closed again."""
    end = Termination(75, "Error", "", RESTING.now - 5)
    container = Container("engine", ready=False, restarts=1, last_terminated=end)
    world = settle(with_spec(RESTING, replicas=2))
    broken = replace(world.pods[0], ready=False, ready_since=None, containers=(container,))
    row = ReportedCondition(ConditionType.DEGRADED, Status.TRUE, by_control, "why")
    world = replace(
        world,
        pods=(broken, *world.pods[1:]),
        control_report=ControlReport(conditions=(row,)),
        status_written=None,
    )
    assert told(world, "Degraded")["reason"] == told_first
    events = [notice.reason for notice in plan_of(world).events]
    assert (Reason.SOME_REPLICAS_FAILING in events) is (told_first is Reason.SOME_REPLICAS_FAILING)


def test_scaling_never_reconciles() -> None:
    """Replicas that come by an order are no generation to roll out."""
    world = replace(RESTING, allocation=ReplicaAllocation(3, "QueueWaitAboveTarget", "more"))
    for _ in range(4):
        world = live(world, 3)
        assert world.condition("Reconciling") is None
        assert world.condition("Ready") is not None
        assert world.condition("Ready")[0] == "True"  # type: ignore[index]


def test_an_evicted_pod_is_no_replica() -> None:
    """Its object stays for hours in phase Failed."""
    evicted = replace(RESTING.pods[0], name="old", uid="old", ready=False, phase="Failed")
    assert plan_of(replace(RESTING, pods=(*RESTING.pods, evicted))).is_empty


def test_warnings_are_told_once_and_calm_reasons_never() -> None:
    """An event for a change, none while it lasts; being stopped or starting is no warning."""
    world = replace(new_world(), next_behaviour=Behaviour.BAD_IMAGE)
    seen: list[str] = []
    for _ in range(60):
        plan = plan_of(world)
        seen += [f"{notice.type} {notice.reason}" for notice in plan.events]
        world = step(act(world, plan), 5)
    assert seen.count("Warning ImagePull") == 2, "once when it shows, once when it is final"
    stopped = plan_of(with_spec(RESTING, replicas=0)).events
    assert all(notice.type == "Normal" for notice in stopped)


def test_events_speak_plainly() -> None:
    """What was made, what was brought back, what went, what turned ready."""
    plan = plan_of(new_world(routing={"policy": "None"}))
    assert [notice.reason for notice in plan.events] == ["Created"]
    assert plan.events[0].message.endswith("and 2 more")
    (repaired,) = plan_of(edited(RESTING, ENGINE, digest="edited")).events
    assert repaired.reason == "Repaired"
    assert "Deployment chat" in repaired.message
    removed = plan_of(with_spec(ROUTED, routing={"policy": "None"})).events
    assert "Removed" in {notice.reason for notice in removed}


def test_a_resource_without_metadata_or_status_is_told_and_never_breaks() -> None:
    """Whatever a store returns: a plan, no exception."""
    resources: tuple[Manifest, ...] = (
        {},
        {"metadata": {"name": "chat"}},
        {"metadata": {}, "spec": None, "status": None},
    )
    for resource in resources:
        plan = decide_plan(Snapshot(resource=resource), RESTING.context, START)
        assert plan.status is not None
        assert not plan.actions


@pytest.mark.parametrize(
    "reason",
    [
        Reason.CONTROL_BREAKER_OPEN,
        Reason.LOAD_BREAKER_OPEN,
        Reason.REMEDY_IN_FORCE,
        Reason.ENGINE_HUNG,
    ],
)
def test_what_the_control_loop_tells_as_it_happens_is_not_told_again(reason: Reason) -> None:
    """Its breakers, remedies and replacements have events of its own: the condition follows without one."""
    row = ReportedCondition(ConditionType.DEGRADED, Status.TRUE, reason, "why")
    world = replace(RESTING, control_report=ControlReport(conditions=(row,)), status_written=None)
    plan = plan_of(world)
    assert plan.status is not None
    assert told(world, "Degraded")["reason"] == reason
    assert plan.events == ()


def notices_of_ready(world: World, look_every_s: float = 1.0) -> list[str]:
    """What the look that turns the service ready tells."""
    while world.condition("Ready") != ("True", "AllReplicasReady"):
        plan = plan_of(world)
        told = [notice.reason for notice in plan.events if plan.status is not None]
        world = step(act(world, plan), look_every_s)
    return told


def test_a_service_that_is_up_in_seconds_posts_one_event() -> None:
    """Its creation; that it turned ready is news only where it was told not to be."""
    quick = new_world(routing={"policy": "None"})
    assert notices_of_ready(quick, look_every_s=10.0) == []
    assert notices_of_ready(quick) == ["Ready"], "its start was told first"
    slow = live(replace(quick, gpus=0), 30)
    assert slow.condition("Ready") == ("False", "InsufficientGPU")
    assert notices_of_ready(replace(slow, gpus=8)) == ["Ready"]

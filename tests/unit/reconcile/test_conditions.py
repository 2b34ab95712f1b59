"""Conditions: each cause has one reason in Available, Ready, Stalled and Degraded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fleetkeeper.api.conditions import (
    MESSAGE_MAX_LENGTH,
    NOT_READY_REASONS,
    ONLY_WHEN_TRUE,
    ConditionType,
    Reason,
    fit_message,
)
from fleetkeeper.api.profiles.profile import ProfileCatalog
from fleetkeeper.common.values import (
    ReplicaAllocation,
)
from fleetkeeper.reconcile.observe.pod_problems import SET_UP_S
from fleetkeeper.reconcile.planner import decide_plan
from fleetkeeper.reconcile.types import (
    Container,
    ObjectEvent,
    Pod,
    Termination,
)
from tests.support.reconcile.plan_cluster import live, settle
from tests.support.reconcile.plan_world import (
    World,
    act,
    edited,
    new_world,
    plan_of,
    service,
    with_spec,
)
from tests.support.reconcile.status_cases import (
    ENGINE,
    REACHED,
    RESTING,
    ROUTED,
    condition_of,
    with_pod,
)

CONTROL = (
    ConditionType.METRICS_AVAILABLE,
    ConditionType.METRICS_COMPATIBLE,
    ConditionType.MEMORY_WITHIN_CAP,
)


def test_every_reason_for_not_ready_is_reached() -> None:
    """The table has every reason that the API documents."""
    assert set(REACHED) >= NOT_READY_REASONS | {Reason.INVALID_SPEC}


@pytest.mark.parametrize("reason", REACHED)
def test_each_reason_is_reported_in_available_and_ready(reason: Reason) -> None:
    """One cause, one reason, in the first reconcile, with what to do."""
    for kind in ("Available", "Ready"):
        condition = condition_of(REACHED[reason], kind)
        assert (condition["status"], condition["reason"]) == ("False", reason)
        assert len(condition["message"]) <= MESSAGE_MAX_LENGTH


def test_a_message_that_is_too_long_keeps_its_end() -> None:
    """Its end says what to do."""
    short = f"The last start failed: {'x' * 213} Check the image."
    assert fit_message(short) == short
    fitted = fit_message(short.replace("xx", "xyx"))
    assert len(fitted) <= MESSAGE_MAX_LENGTH
    assert fitted.startswith("The last start failed: xyx")
    assert "..." in fitted
    assert fitted.endswith("Check the image.")


STALLS = (
    Reason.NAME_CONFLICT,
    Reason.UNKNOWN_PROFILE,
    Reason.CRD_TOO_OLD,
    Reason.INVALID_SPEC,
    Reason.QUOTA_EXCEEDED,
    Reason.ADMISSION_DENIED,
    Reason.MISSING_SERVICE_ACCOUNT,
    Reason.IMAGE_VOLUMES_UNSUPPORTED,
    Reason.BAD_ENGINE_OPTION,
    Reason.CUDA_OUT_OF_MEMORY,
    Reason.CRASH_LOOP,
)


@pytest.mark.parametrize("reason", STALLS)
def test_permanent_problems_are_stalled_and_not_reconciling(reason: Reason) -> None:
    """GitOps tools read Stalled as failed; both at once would contradict one another."""
    assert condition_of(REACHED[reason], "Stalled")["reason"] == reason
    kinds = {item["type"] for item in (plan_of(REACHED[reason]).status or {})["conditions"]}
    assert "Reconciling" not in kinds


def test_an_event_names_the_secret_that_a_pod_waits_for() -> None:
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


def test_a_pod_whose_claim_is_missing_is_reported_after_its_time() -> None:
    """The scheduler writes no verdict; for the first seconds every pod with claims looks so."""
    world = with_pod({}, scheduled=False, has_claims=True)
    assert condition_of(world, "Ready")["reason"] != Reason.UNSCHEDULABLE
    (pod,) = world.pods
    wait = plan_of(world).requeue_after_s
    assert wait is not None
    assert pod.created < world.now + wait <= pod.created + SET_UP_S
    later = replace(world, now=pod.created + SET_UP_S)
    ready = condition_of(later, "Ready")
    assert ready["reason"] == Reason.UNSCHEDULABLE
    assert "spec.resources.claims" in ready["message"]
    plain = replace(later, pods=(replace(pod, has_claims=False),))
    assert condition_of(plain, "Ready")["reason"] != Reason.UNSCHEDULABLE


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
def test_a_spec_that_cannot_be_used_never_changes_running_children(block: str) -> None:
    """No write to any child, not even a repair; the old replicas serve and the status remembers."""
    world = BLOCKS[block](RESTING)
    world = edited(world, ENGINE, digest="edited", desired_replicas=1)
    plan = plan_of(world)
    assert not plan.actions
    assert plan.status is not None
    assert plan.status["engine"] == RESTING.status["engine"]
    assert plan.status["lastGood"]["templateHash"] == RESTING.engine.template_hash
    assert condition_of(world, "Available")["status"] == "True"
    assert condition_of(world, "Stalled")["status"] == "True"
    assert plan_of(act(world, plan)).is_empty


def test_an_unreadable_spec_reports_its_first_mistake_and_the_number_of_others() -> None:
    """All mistakes are found at once; a message has one and the count."""
    world = new_world(model={"source": "nowhere"}, replicas=-1, scaling={"minReplicas": 0})
    message = condition_of(world, "Stalled")["message"]
    assert message.startswith("spec.")
    assert "2 more" in message


def test_ready_before_stays_ready_when_the_crd_is_too_old() -> None:
    """An operator upgraded before its CRDs does not set Ready to False in a whole fleet."""
    world = settle(replace(RESTING, crd_missing=("spec.breaker",)))
    assert world.condition("Ready") == ("True", "EnoughReplicasReady")
    assert world.condition("Stalled") == ("True", "CRDTooOld")
    assert settle(replace(world, crd_missing=())).condition("Stalled") is None


def test_all_conditions_are_set_from_the_first_reconcile() -> None:
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


def test_a_service_without_its_router_does_not_answer() -> None:
    """Engines ready, no router: Available is False with that reason."""
    alone = tuple(pod for pod in ROUTED.pods if pod.component == "engine")
    assert (
        condition_of(replace(ROUTED, pods=alone), "Available")["reason"] == Reason.NO_READY_ROUTER
    )
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
    assert (
        condition_of(replace(ROUTED, pods=(*alone, broken)), "Available")["reason"]
        == Reason.IMAGE_PULL
    )


def test_a_ready_replica_that_keeps_ending_degrades_the_service() -> None:
    """Ready=True while it crashes over and over is not "as asked"."""
    end = Termination(72, "Error", "", RESTING.now - 60)
    container = Container("engine", ready=True, restarts=5, last_terminated=end)
    pods = tuple(replace(pod, containers=(container,)) for pod in RESTING.pods)
    assert (
        condition_of(replace(RESTING, pods=pods), "Degraded")["reason"]
        == Reason.SOME_REPLICAS_FAILING
    )


def test_replicas_out_of_service_by_their_own_readiness_degrade_the_service() -> None:
    """They run and were ready: the others serve, and the condition names those that do not."""
    world = settle(with_spec(RESTING, replicas=2))
    out = replace(world.pods[0], ready=False, ready_since=None, ejected_since=world.now - 30)
    found = condition_of(replace(world, pods=(out, *world.pods[1:])), "Degraded")
    assert (found["status"], found["reason"]) == ("True", Reason.PODS_EJECTED)
    assert out.name in found["message"]
    assert condition_of(world, "Degraded")["status"] == "False"


def test_scaling_never_reconciles() -> None:
    """Replicas that the control loop adds are no generation to roll out."""
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

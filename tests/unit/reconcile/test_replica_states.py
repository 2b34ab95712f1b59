"""The states of single replicas in the status: a bounded list, whose times are times of changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.api.status import MAX_REPLICA_STATES
from fleetkeeper.api.status_enums import ReplicaStage
from fleetkeeper.common.values import ControlReport, ReplicaAllocation, StartProgress
from fleetkeeper.reconcile.planner import decide_plan
from fleetkeeper.reconcile.types import Container, Pod, Termination
from fleetkeeper_contract import rfc3339
from tests.support.reconcile import plan_cluster
from tests.support.reconcile.plan_cluster import live, settle
from tests.support.reconcile.plan_world import World, act, new_world, plan_of, with_spec
from tests.support.reconcile.status_cases import RESTING, ended, with_pod

START_S = 120.0
LARGE = 100


def states_of(world: World) -> list[dict[str, Any]]:
    """The states in the status as it would stand after the next plan."""
    world = replace(world, status_written=None, children_written=None)
    status = plan_of(world).status or world.status
    return list(status.get("replicaStates", ()))


def state_of(world: World) -> dict[str, Any]:
    """The state of the only replica."""
    (state,) = states_of(world)
    return state


def changed(world: World, **pod: Any) -> World:
    """The world with all its pods changed."""
    return replace(world, pods=tuple(replace(item, **pod) for item in world.pods))


STARTING = with_pod({}, node="n1", scheduled_since=10.0)
RUNNING = (Container("engine", running_since=20.0),)
BESIDE_A_SIDECAR = (Container("istio-proxy", running_since=15.0), *RUNNING)
END = Termination(72, "Error", '{"class": "CUDAOutOfMemory", "message": "m"}', 30.0)


@pytest.mark.parametrize(
    ("world", "stage", "reason", "since"),
    [
        (with_pod({}, scheduled=False, created=5.0), "Scheduling", None, 5.0),
        (
            with_pod({}, scheduled=False, unschedulable="1 Insufficient nvidia.com/gpu."),
            "Scheduling",
            "InsufficientGPU",
            None,
        ),
        (STARTING, "Image", None, 10.0),
        (with_pod({"waiting_reason": "ErrImagePull"}), "Image", "ImagePull", None),
        (changed(STARTING, containers=RUNNING), "Starting", None, 20.0),
        (changed(STARTING, containers=BESIDE_A_SIDECAR), "Starting", None, 20.0),
        (
            changed(STARTING, containers=(Container("set-up", init=True, terminated=Termination(0)), *RUNNING)),
            "Starting",
            None,
            20.0,
        ),
        (ended(66, "ModelNotFound"), "Failing", "ModelNotFound", None),
        (changed(STARTING, containers=(replace(RUNNING[0], last_terminated=END),)), "Failing", "CUDAOutOfMemory", None),
        (changed(RESTING, ready=False, ejected_since=40.0), "Failing", "PodsEjected", 40.0),
        (changed(RESTING, ready_since=50.0), "Ready", None, 50.0),
        (changed(RESTING, deleting=True, deleting_since=60.0), "Draining", None, 60.0),
    ],
)  # fmt: skip
def test_a_replica_has_a_stage_and_the_reason_of_its_problem(
    world: World, stage: str, reason: str | None, since: float | None
) -> None:
    """The stage says how far it is, the reason what is wrong; times are those of the API."""
    state = state_of(world)
    assert (state["stage"], state.get("reason")) == (stage, reason)
    assert state["since"] == rfc3339.format(world.now if since is None else since)


def test_a_hung_replica_is_failing_although_it_is_ready() -> None:
    """The control loop knows it first."""
    (pod,) = RESTING.pods
    hung = replace(RESTING, control_report=ControlReport(hung_pods=(pod.name,)))
    assert (state_of(hung)["stage"], state_of(hung)["reason"]) == ("Failing", "EngineHung")


def test_an_engine_that_starts_shows_the_stage_that_it_reports() -> None:
    """A reading that fails, and a new operator process, change nothing."""
    running = changed(STARTING, containers=RUNNING)
    (pod,) = running.pods
    progress = StartProgress(ReplicaStage.WEIGHTS, running.now - 7.0)
    loading = replace(running, starts={pod.name: progress})
    state = state_of(loading)
    assert (state["stage"], state["since"]) == ("Weights", rfc3339.format(progress.since))
    written = act(loading, plan_of(replace(loading, children_written=None, status_written=None)))
    jittered = replace(progress, since=progress.since + 1.5)
    assert states_of(replace(written, starts={pod.name: jittered})) == [state]
    assert states_of(replace(written, starts={})) == [state]
    further = replace(written, starts={pod.name: StartProgress(ReplicaStage.LOAD, written.now)})
    assert state_of(further)["stage"] == "Load"


def test_a_hung_replica_stays_failing_while_a_new_operator_measures() -> None:
    """Until its first tick, the control loop knows nothing."""
    (pod,) = RESTING.pods
    hung = replace(RESTING, control_report=ControlReport(hung_pods=(pod.name,)))
    written = act(hung, plan_of(replace(hung, status_written=None)))
    snapshot = replace(written.snapshot(), control_report=None, control_pending=True)
    status = decide_plan(snapshot, written.context, written.now + 60).status or written.status
    assert status["replicaStates"] == written.status["replicaStates"]
    assert status["replicaStates"][0]["reason"] == "EngineHung"


def test_the_time_of_a_reason_stays_while_the_reason_stays() -> None:
    """A container that ends again changes no state."""
    first = ended(72, "CUDAOutOfMemory")
    written = act(first, plan_of(replace(first, status_written=None)))
    since = state_of(written)["since"]
    (pod,) = written.pods
    (engine,) = pod.containers
    assert engine.last_terminated is not None
    later = replace(engine.last_terminated, finished=written.now + 90)
    again = changed(written, containers=(replace(engine, restarts=9, last_terminated=later),))
    again = replace(again, now=again.now + 100)
    assert state_of(again)["since"] == since
    assert plan_of(again).status is None


def a_pod(number: int, **more: Any) -> Pod:
    """A ready engine pod of the resting service."""
    return replace(RESTING.pods[0], name=f"chat-{number:04}", uid=f"u{number}", **more)


def test_problems_come_first_and_the_rest_is_counted() -> None:
    """A thousand replicas do not fill the object."""
    pods = [a_pod(number) for number in range(1000)]
    pods[700] = replace(pods[700], ready=False, ready_since=None, ejected_since=1.0)
    pods[300] = replace(pods[300], ready=False, ready_since=None)
    status = plan_of(replace(RESTING, pods=tuple(pods), status_written=None)).status
    assert status is not None
    names = [state["name"] for state in status["replicaStates"]]
    assert names[:4] == ["chat-0700", "chat-0300", "chat-0000", "chat-0001"]
    assert len(names) == MAX_REPLICA_STATES
    assert status["unlistedReplicas"] == 1000 - MAX_REPLICA_STATES


def test_a_large_settled_service_causes_no_write() -> None:
    """Nothing in the list moves without a change of state."""
    pods = tuple(a_pod(number) for number in range(300))
    world = settle(replace(RESTING, pods=pods, allocation=ReplicaAllocation(300, "R", "m")))
    assert plan_of(replace(world, now=world.now + 86_400)).is_empty


def with_stages(world: World) -> World:
    """Let the engines' containers start 20 s after their pods were created."""
    pods = []
    for pod in world.pods:
        began = pod.created + 20.0
        if pod.component == "engine" and not pod.ready and world.now >= began:
            pods.append(replace(pod, containers=(Container("engine", running_since=began),)))
        else:
            pods.append(replace(pod, scheduled_since=pod.created) if pod.scheduled else pod)
    return replace(world, pods=tuple(pods))


@pytest.mark.exhaustive
def test_a_rollout_of_a_hundred_replicas_writes_the_status_at_most_once_in_two_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One replica after the other, each with a start of two minutes: 101 writes in 3 h 20 min.

    With a write each ten seconds at most, and counts alone, there were 201.
    """
    spec = {"routing": {"policy": "None"}, "replicas": LARGE, "rollout": {"strategy": "Surge"}}
    world = settle(new_world(**spec))
    monkeypatch.setattr(plan_cluster, "READY_AFTER_S", START_S)
    world = with_spec(world, engine={"maxModelLength": 4096})
    before, began = world.status_writes, world.now
    world = live(world, 5.0)
    while any(
        pod.template_hash != world.engine.template_hash or not pod.ready for pod in world.pods
    ):
        world = with_stages(live(world, 5.0))
        assert world.now - began < 2 * LARGE * START_S
    writes = world.status_writes - before
    assert writes <= (world.now - began) / 120 + 10

"""Who decides the number of replicas, and that nobody's number is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.common.values import ReplicaAllocation
from fleetkeeper.reconcile.observe.facts import Facts
from fleetkeeper.reconcile.plan import Apply, MarkPod
from fleetkeeper.reconcile.replicas import decide_marks
from fleetkeeper.reconcile.types import Kind, Pod
from tests.support.reconcile.plan_cluster import live, settle
from tests.support.reconcile.plan_world import World, edited, new_world, plan_of, with_spec

ENGINE = (Kind.DEPLOYMENT, "chat")
BOUNDS = {"minReplicas": 2, "maxReplicas": 5}


def allocation(replicas: int) -> ReplicaAllocation:
    """An arbitrated allocation."""
    return ReplicaAllocation(replicas, "QueueWaitAboveTarget", "queue wait p95 1.9 s against 0.5 s")


def resting(replicas: int | None = None, **spec: object) -> World:
    """A service at rest without a router."""
    pinned = {} if replicas is None else {"replicas": replicas}
    return settle(new_world(routing={"policy": "None"}, scaling=BOUNDS, **pinned, **spec))


AUTO = resting()


def engine_write(world: World) -> Apply | None:
    """The write of the engine Deployment in the plan, if there is one."""
    for item in plan_of(world).actions:
        if isinstance(item, Apply) and (item.kind, item.name) == ENGINE:
            return item
    return None


def written(world: World) -> int | None:
    """The number of replicas that the plan writes, None when it writes none."""
    write = engine_write(world)
    return write.manifest["spec"]["replicas"] if write else None


def test_a_service_starts_with_the_fewest_allowed() -> None:
    """No allocation yet: minReplicas."""
    assert AUTO.engine.desired_replicas == 2


@pytest.mark.parametrize("replicas", [0, 1, 7])
def test_spec_replicas_wins_in_every_mode_and_over_the_bounds(replicas: int) -> None:
    """A person, HPA or KEDA said so; an allocation does not count."""
    for mode in ("Auto", "Advisory", "External"):
        world = with_spec(AUTO, replicas=replicas, scaling={**BOUNDS, "mode": mode})
        assert written(replace(world, allocation=allocation(3))) == replicas


@pytest.mark.parametrize(("allocated", "result"), [(1, None), (3, 3), (5, 5), (9, 5), (0, None)])
def test_an_allocation_is_kept_within_the_bounds(allocated: int, result: int | None) -> None:
    """Whatever was allocated: between minReplicas and maxReplicas."""
    assert written(replace(AUTO, allocation=allocation(allocated))) == result


def test_without_an_allocation_the_live_number_is_kept() -> None:
    """After a restart nothing is known: what runs stays, whoever set it."""
    world = edited(AUTO, ENGINE, desired_replicas=4, replicas_manager="kubectl")
    assert engine_write(world) is None
    repaired = engine_write(edited(world, ENGINE, digest="edited"))
    assert repaired is not None
    assert repaired.manifest["spec"]["replicas"] == 4, "a repair resets the number"
    assert (
        repaired.resource_version == edited(world, ENGINE, digest="edited").engine.resource_version
    )


def test_a_kept_number_follows_changed_bounds() -> None:
    """A person raised the minimum."""
    assert written(with_spec(AUTO, scaling={"minReplicas": 4, "maxReplicas": 6})) == 4
    high = settle(replace(AUTO, allocation=allocation(5)))
    assert (
        written(
            with_spec(replace(high, allocation=None), scaling={"minReplicas": 1, "maxReplicas": 3})
        )
        == 3
    )


def test_advisory_changes_nothing() -> None:
    """It computes and reports; the live number stays, even out of bounds."""
    world = settle(with_spec(AUTO, scaling={**BOUNDS, "mode": "Advisory"}))
    assert engine_write(replace(world, allocation=allocation(5))) is None
    assert engine_write(edited(world, ENGINE, desired_replicas=9)) is None


def test_a_change_of_the_number_is_bound_to_the_live_object() -> None:
    """Stale caches must not scale down: the resourceVersion is a precondition."""
    write = engine_write(replace(AUTO, allocation=allocation(4)))
    assert write is not None
    assert write.resource_version == AUTO.engine.resource_version
    assert write.why == "scale"


def test_a_hand_scaled_deployment_is_brought_back_to_the_allocation() -> None:
    """The allocation applies; a single foreign change is no contest."""
    world = settle(replace(AUTO, allocation=allocation(3)))
    scaled = edited(world, ENGINE, desired_replicas=1, replicas_manager="kubectl")
    assert written(scaled) == 3


def contested(writes: int) -> World:
    """An HPA on the Deployment keeps setting 1 against our 3."""
    world = settle(replace(AUTO, allocation=allocation(3)))
    world = edited(world, ENGINE, desired_replicas=1, replicas_manager="hpa")
    foreign = tuple((world.now - 10 * number, "hpa") for number in range(writes))
    return replace(world, foreign_writes=foreign)


def test_three_foreign_changes_are_brought_back_the_fourth_is_left() -> None:
    """More than 3 in 10 min: no more fight, and the condition names the manager."""
    assert written(contested(3)) == 3
    world = settle(contested(4))
    assert world.engine.desired_replicas == 1
    assert world.condition("Degraded") == ("True", "ReplicasContested")
    (found,) = [item for item in world.status["conditions"] if item["type"] == "Degraded"]
    assert "hpa" in found["message"]


def test_a_contest_does_not_begin_again_by_itself() -> None:
    """Ten quiet minutes later the other manager still owns the number: it is left alone."""
    world = replace(settle(contested(4)), foreign_writes=())
    assert live(world, 1_200).engine.desired_replicas == 1


def test_a_contest_ends_with_a_change_of_the_spec() -> None:
    """A person changed the spec."""
    world = replace(settle(contested(4)), foreign_writes=())
    world = settle(with_spec(world, scaling={"minReplicas": 2, "maxReplicas": 6}))
    assert world.engine.desired_replicas == 3
    assert world.condition("Degraded") == ("False", "AsExpected")


@pytest.mark.promise("stopped-by-hand")
def test_stopped_is_reported_and_undone() -> None:
    """0 stops the engines and nothing else; letting go starts with the fewest."""
    world = settle(with_spec(AUTO, replicas=0))
    assert world.ready == 0
    assert world.condition("Ready") == ("False", "Stopped")
    assert world.condition("Available") == ("False", "Stopped")
    assert world.condition("Progressing") == ("False", "Stopped")
    assert world.condition("Stalled") is None
    assert world.condition("Reconciling") is None
    assert settle(with_spec(world, replicas=None)).ready == 2


def test_a_pin_is_reported_with_the_command_that_removes_it() -> None:
    """ScalingLimited gives the command; External is no pin."""
    world = settle(with_spec(AUTO, replicas=3))
    (found,) = [item for item in world.status["conditions"] if item["type"] == "ScalingLimited"]
    assert (found["status"], found["reason"]) == ("True", "ReplicasPinned")
    assert "kubectl patch fis chat -n team-a --type json" in found["message"]
    world = settle(with_spec(world, scaling={**BOUNDS, "mode": "External"}))
    assert world.condition("ScalingLimited") == ("False", "External")


def test_the_command_against_a_pin_is_complete_with_the_longest_names() -> None:
    """A name of 50 and a namespace of 63 characters: nothing of the command is cut."""
    world = new_world(replicas=3, paused=True)
    names = {"name": "n" * 50, "namespace": "m" * 63}
    metadata = {**world.resource["metadata"], **names}
    status = plan_of(replace(world, resource={**world.resource, "metadata": metadata})).status
    assert status is not None
    (found,) = [item for item in status["conditions"] if item["type"] == "ScalingLimited"]
    assert found["message"].endswith("""'[{"op":"remove","path":"/spec/replicas"}]'""")


def test_scaling_writes_the_deployment_once_and_reports_it_in_plain_words() -> None:
    """One apply; the event names both numbers and the reason."""
    world = replace(AUTO, allocation=allocation(3))
    plan = plan_of(world)
    assert len(plan.actions) == 1
    assert [event.message for event in plan.events] == [
        "Replicas 2 -> 3: queue wait p95 1.9 s against 0.5 s"
    ]
    done = settle(world)
    assert len(done.writes) - len(AUTO.writes) - (done.status_writes - AUTO.status_writes) == 1


def facts_with(*pods: Pod) -> Facts:
    """Facts with these engine pods."""
    return Facts(None, None, (), None, pods, ())


def pod(name: str, cost: int = 0, *, ready: bool = True) -> Pod:
    """An engine pod."""
    return Pod(name, name, "chat", "engine", "rs", "hash", 0.0, ready=ready, deletion_cost=cost)


@pytest.mark.promise("calm-fewer-replicas")
@pytest.mark.parametrize(
    ("pods", "value", "load", "marks"),
    [
        ([pod("a"), pod("b"), pod("c")], 2, {"a": 3, "b": 0, "c": 7}, {"b": -1}),
        ([pod("a"), pod("b"), pod("c")], 1, {"a": 3, "b": 0, "c": 7}, {"b": -2, "a": -1}),
        ([pod("a"), pod("b", ready=False)], 1, {"a": 3}, {}),
        ([pod("a", -1), pod("b")], 1, {"a": 0, "b": 5}, {}),
        ([pod("a", -1), pod("b")], 1, {"a": 5, "b": 0}, {"b": -2}),
        ([pod("a"), pod("b")], 1, {}, {}),
        ([pod("a"), pod("b")], 0, {"a": 1, "b": 2}, {}),
        ([pod("a"), pod("b")], 3, {"a": 1, "b": 2}, {}),
    ],
)
def test_the_emptiest_pods_are_marked_to_go_first(
    pods: list[Pod], value: int, load: dict[str, float], marks: dict[str, int]
) -> None:
    """Only as many as go, only where it changes who goes, never on a guess."""
    found = decide_marks(facts_with(*pods), value, load)
    assert {mark.name: mark.deletion_cost for mark in found} == marks


def test_a_scale_down_marks_first_and_the_emptiest_pod_goes() -> None:
    """One pod patch, one apply; the busy pods stay."""
    world = settle(replace(AUTO, allocation=allocation(3)))
    names = [item.name for item in world.pods]
    load = dict(zip(names, (4.0, 0.0, 9.0), strict=True))
    world = replace(world, allocation=allocation(2), load=load)
    actions = plan_of(world).actions
    assert isinstance(actions[0], MarkPod)
    assert actions[0].name == names[1]
    assert len(actions) == 2
    done = settle(world)
    assert {item.name for item in done.pods} == {names[0], names[2]}

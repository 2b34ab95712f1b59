"""A bad change comes back by itself, and a good one is never taken back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.api.conditions import Reason
from fleetkeeper.common.values import ReplicaAllocation
from fleetkeeper.reconcile.observe.problem import Problem
from fleetkeeper.reconcile.plan import Apply
from fleetkeeper.reconcile.rollout import PATIENCE, decide_verdict
from fleetkeeper.reconcile.types import Kind
from tests.support.reconcile.plan_cluster import live, settle, step
from tests.support.reconcile.plan_world import Behaviour, World, act, new_world, plan_of, with_spec

OTHER = {"source": "pvc://models/other"}
BAD = [
    (Behaviour.BAD_OPTION, "BadEngineOption"),
    (Behaviour.OUT_OF_MEMORY, "CUDAOutOfMemory"),
    (Behaviour.BAD_IMAGE, "ImagePull"),
    (Behaviour.SILENT, "RolloutFailed"),
]


def good_world(**spec: object) -> World:
    """A service that runs, proven good."""
    rollout = {"startupSeconds": 600, **spec.pop("rollout", {})}  # type: ignore[dict-item]
    return settle(new_world(routing={"policy": "None"}, rollout=rollout, **spec))


def broken(world: World, behaviour: Behaviour) -> World:
    """The spec changes to a template whose pods behave so."""
    return with_spec(replace(world, next_behaviour=behaviour), model=OTHER)


def template_of(world: World) -> str:
    """The hash of the live template."""
    return world.engine.template_hash


@pytest.mark.parametrize(("behaviour", "reason"), BAD)
def test_a_failed_roll_out_returns_to_the_last_good_template(
    behaviour: Behaviour, reason: str
) -> None:
    """Old pods serve all the time; the end is Stalled/RolledBack, with the reason remembered."""
    world = good_world(replicas=2)
    good, pods = template_of(world), {pod.uid for pod in world.pods}
    world = settle(broken(world, behaviour), 3_000)
    assert template_of(world) == good
    assert {pod.uid for pod in world.pods} == pods, "a ready pod was replaced"
    assert world.condition("Stalled") == ("True", "RolledBack")
    assert world.condition("Ready") == ("False", "RolledBack")
    assert world.condition("Available") == ("True", "Answering")
    assert world.condition("Degraded") == ("True", "RolledBack")
    assert world.status["rollback"]["reason"] == reason
    assert len(world.revisions) == 2, "the old ReplicaSet is used again"


def test_a_roll_back_is_remembered_before_it_is_carried_out() -> None:
    """The reconcile that decides it writes the status alone, so a crash after it loses nothing."""
    world = broken(good_world(), Behaviour.BAD_OPTION)
    while "rollback" not in (plan_of(world).status or {}):
        world = live(world, 5)
    plan = plan_of(world)
    assert plan.actions == ()
    assert plan.wants_templates
    world = live(world, 10)
    assert world.condition("Stalled") == ("True", "RolledBack")


def test_a_rolled_back_service_stays_so_when_only_its_replicas_change() -> None:
    """`kubectl scale` is no reason to try the bad template again."""
    world = settle(broken(good_world(replicas=2), Behaviour.BAD_OPTION))
    good = template_of(world)
    world = settle(with_spec(world, replicas=3))
    assert template_of(world) == good
    assert world.ready == 3
    assert world.condition("Stalled") == ("True", "RolledBack")


def test_a_rolled_back_service_rolls_out_a_corrected_spec() -> None:
    """Another template is tried, and the memory of the bad one goes."""
    world = settle(broken(good_world(), Behaviour.BAD_OPTION))
    world = replace(world, next_behaviour=Behaviour.READY)
    world = settle(with_spec(world, model={"source": "pvc://models/third"}))
    assert world.condition("Ready") == ("True", "AllReplicasReady")
    assert world.condition("Stalled") is None
    assert "rollback" not in world.status
    assert world.status["lastGood"]["templateHash"] == template_of(world)


def test_a_rolled_back_service_is_repaired_like_any_other() -> None:
    """Its children are compared with the last good template, not with the spec's."""
    world = settle(broken(good_world(), Behaviour.BAD_OPTION))
    key = (Kind.DEPLOYMENT, "chat")
    edited = replace(world.engine, digest="edited", resource_version="999")
    world = settle(replace(world, children={**world.children, key: edited}))
    assert world.engine.digest != "edited"
    assert template_of(world) == world.status["lastGood"]["templateHash"]


def test_on_failure_hold_stops_and_reports_it() -> None:
    """Nothing is rolled back; the bad pods stay within what the roll-out allows."""
    world = good_world(replicas=2, rollout={"onFailure": "Hold"})
    good = template_of(world)
    world = settle(broken(world, Behaviour.BAD_OPTION), 3_000)
    assert template_of(world) != good
    assert world.ready == 2
    assert world.condition("Stalled") == ("True", "RolloutHeld")
    assert world.condition("Ready") == ("False", "BadEngineOption")
    assert world.condition("Available") == ("True", "Answering")


@pytest.mark.parametrize(("behaviour", "reason"), BAD)
def test_a_service_that_never_was_good_shows_its_reason(behaviour: Behaviour, reason: str) -> None:
    """There is nothing to go back to: it stays, stalled with the cause."""
    world = replace(new_world(rollout={"startupSeconds": 600}), next_behaviour=behaviour)
    world = settle(world, 3_000)
    assert world.condition("Available") == ("False", reason)
    assert world.condition("Ready") == ("False", reason)
    assert world.condition("Stalled") == ("True", reason)
    assert "rollback" not in world.status


def test_a_service_that_never_was_good_recovers_when_its_cluster_is_fixed() -> None:
    """The same pods become ready without a change of the spec."""
    world = replace(new_world(routing={"policy": "None"}), next_behaviour=Behaviour.BAD_IMAGE)
    world = settle(world)
    fixed = dict.fromkeys(world.behaviours, Behaviour.READY)
    world = settle(replace(world, behaviours=fixed))
    assert world.condition("Ready") == ("True", "AllReplicasReady")
    assert world.condition("Stalled") is None


def test_no_scale_up_feeds_a_revision_that_cannot_start() -> None:
    """While its newest revision has no ready pod and a reason, a larger allocation is not applied."""
    world = replace(new_world(routing={"policy": "None"}), next_behaviour=Behaviour.BAD_IMAGE)
    world = live(world, 60)
    world = settle(replace(world, allocation=ReplicaAllocation(4, "QueueWaitAboveTarget", "more")))
    assert world.engine.desired_replicas == 1
    assert world.condition("ScalingLimited") == ("True", "ScaleUpBlocked")


def test_a_pod_that_fails_later_does_not_roll_back_what_was_good() -> None:
    """The template is proven; its trouble has another cause."""
    world = good_world()
    good = template_of(world)
    failing = {**world.behaviours, good: Behaviour.OUT_OF_MEMORY}
    world = settle(replace(world, behaviours=failing), 3_000)
    assert template_of(world) == good
    assert "rollback" not in world.status
    assert world.condition("Ready") == ("False", "CUDAOutOfMemory")


def test_ready_stays_true_while_a_roll_out_runs() -> None:
    """It answers all the time; Reconciling reports the rollout."""
    world = good_world(replicas=2)
    world = with_spec(world, model=OTHER)
    seen = set()
    for _ in range(8):
        world = live(world, 5)
        seen.add((world.condition("Ready"), world.condition("Reconciling")))
    assert {ready for ready, _ in seen} <= {
        ("True", "RollingOut"),
        ("True", "AllReplicasReady"),
    }
    assert (("True", "RollingOut"), ("True", "RollingOut")) in seen
    assert settle(world).condition("Reconciling") is None


def test_auto_replaces_when_the_extra_pod_finds_no_accelerator() -> None:
    """120 s of waiting, two ready: one old pod goes first, until the roll-out is over."""
    world = replace(good_world(replicas=2), gpus=2)
    world = with_spec(world, model=OTHER)
    surging = live(world, 100)
    assert surging.ready == 2
    assert surging.engine.max_surge == 1
    replacing = live(surging, 25)
    assert replacing.engine.max_surge == 0
    done = settle(replacing)
    assert done.condition("Ready") == ("True", "AllReplicasReady")
    assert done.engine.max_surge == 1, "the next roll-out surges again"
    assert "rollback" not in done.status


def test_replace_asked_for_during_a_failing_surge_gives_up_no_ready_pod() -> None:
    """The only pod that serves stays until the new revision can start; then it is replaced as asked."""
    world = live(new_world(routing={"policy": "None"}, rollout={"startupSeconds": 600}), 15)
    world = live(broken(world, Behaviour.BAD_OPTION), 60)
    assert world.ready == 1
    world = settle(with_spec(world, rollout={"startupSeconds": 600, "strategy": "Replace"}))
    assert world.ready == 1
    assert world.condition("Stalled") == ("True", "BadEngineOption")
    fixed = replace(world, next_behaviour=Behaviour.READY)
    fixed = settle(with_spec(fixed, model={"source": "pvc://models/third"}))
    assert fixed.condition("Ready") == ("True", "AllReplicasReady")
    assert fixed.engine.max_surge == 0


def test_replace_makes_room_for_a_pod_that_found_no_accelerator() -> None:
    """That is what it is asked for."""
    world = replace(good_world(), gpus=1)
    world = live(with_spec(world, model=OTHER), 60)
    assert world.condition("Degraded") == ("True", "SomeReplicasFailing")
    rules = {"startupSeconds": 600, "strategy": "Replace"}
    world = settle(with_spec(world, rollout=rules))
    assert world.condition("Ready") == ("True", "AllReplicasReady")
    assert "rollback" not in world.status


def test_auto_never_replaces_the_only_ready_pod() -> None:
    """One replica and no free accelerator: it keeps serving, and rolls back after startupSeconds."""
    world = replace(good_world(), gpus=1)
    world = with_spec(world, model=OTHER)
    waiting = live(world, 300)
    assert waiting.engine.max_surge == 1
    assert waiting.ready == 1
    assert waiting.condition("Degraded") == ("True", "SomeReplicasFailing")
    done = settle(waiting, 3_000)
    assert done.status["rollback"]["reason"] == "InsufficientGPU"
    assert done.ready == 1


def test_a_second_good_template_waits_for_a_minute_of_readiness() -> None:
    """Fifty seconds are not enough; the plan requeues in time."""
    world = good_world()
    world = with_spec(world, model=OTHER)
    for _ in range(4):
        world = live(world, 5)
    assert world.status["lastGood"]["templateHash"] != template_of(world)
    again = plan_of(world).requeue_after_s
    assert again is not None
    assert again <= 60
    world = live(step(world, again), 5)
    assert world.status["lastGood"]["templateHash"] == template_of(world)


def test_the_first_good_template_is_written_with_the_next_status() -> None:
    """It is no news of its own a minute after the start; a change of replicas takes it along."""
    world = good_world()
    assert "lastGood" not in world.status
    assert plan_of(world).is_empty
    generation = world.resource["metadata"]["generation"]
    before = world.status_writes
    world = settle(with_spec(world, replicas=2))
    assert world.status["lastGood"]["templateHash"] == template_of(world)
    assert world.status["lastGood"]["generation"] == generation + 1, "the spec still asks for it"
    assert world.status_writes == before + 1


def test_the_first_good_template_is_remembered_before_it_is_replaced() -> None:
    """The reconcile that wants another template only adds the last good one to the present status."""
    world = good_world()
    good, generation = template_of(world), world.resource["metadata"]["generation"]
    changed = with_spec(world, model=OTHER)
    plan = plan_of(changed)
    assert plan.actions == ()
    assert plan.events == ()
    assert plan.status == {
        **world.status,
        "lastGood": {"generation": generation, "templateHash": good},
    }
    assert plan.requeue_after_s == 0
    then = plan_of(act(changed, plan))
    assert [item.name for item in then.actions if isinstance(item, Apply)] == ["chat"]


def test_a_first_template_that_fails_after_a_minute_was_good() -> None:
    """Its pods are not ready any more, but the status has said Ready for long enough."""
    world = good_world()
    failing = {**world.behaviours, template_of(world): Behaviour.OUT_OF_MEMORY}
    world = settle(replace(world, behaviours=failing), 3_000)
    assert world.status["lastGood"]["templateHash"] == template_of(world)
    assert world.condition("Stalled") is None, "a proven template did not fail to roll out"


def test_a_first_template_that_fails_within_a_minute_was_not_good() -> None:
    """Ready for ten seconds proves nothing: the roll-out failed, with the reason."""
    world = live(new_world(routing={"policy": "None"}), 15)
    assert world.condition("Ready") == ("True", "AllReplicasReady")
    failing = {**world.behaviours, template_of(world): Behaviour.OUT_OF_MEMORY}
    world = settle(replace(world, behaviours=failing), 3_000)
    assert "lastGood" not in world.status
    assert world.condition("Stalled") == ("True", "CUDAOutOfMemory")


@pytest.mark.parametrize("reason", [reason for reason in PATIENCE if PATIENCE[reason].seconds])
def test_a_problem_that_may_pass_is_a_failure_only_after_its_patience(reason: Reason) -> None:
    """One second before the limit: requeue in a second. At the limit: failed."""
    seconds = PATIENCE[reason].seconds
    assert seconds is not None
    problem = Problem(reason, "", since=100.0)
    early = decide_verdict(problem, 100.0 + seconds - 1)
    assert (early.failed, early.again_after_s) == (False, 1.0)
    assert decide_verdict(problem, 100.0 + seconds).failed


@pytest.mark.parametrize("reason", [r for r in PATIENCE if PATIENCE[r].terminations])
def test_an_engine_that_ends_fails_after_as_many_ends_as_its_reason_deserves(
    reason: Reason,
) -> None:
    """A bad option ends the same way again; an out-of-memory may be a neighbour's fault."""
    ends = PATIENCE[reason].terminations
    assert ends is not None
    assert not decide_verdict(Problem(reason, "", 0.0, ends - 1), 1e9).failed
    assert decide_verdict(Problem(reason, "", 0.0, ends), 0.0).failed


def test_the_engine_deployment_is_written_once_for_a_change() -> None:
    """A roll-out is one write of the Deployment; the rest is Kubernetes' work."""
    world = good_world(replicas=3)
    before = len(world.writes)
    world = settle(with_spec(world, model=OTHER))
    written = [write for write in world.writes[before:] if write != "status"]
    assert written == ["repair Deployment chat"]


def test_a_rolled_back_deployment_waits_for_its_template() -> None:
    """Without the old template nothing is guessed: the plan asks for it and leaves the rest alone."""
    world = settle(broken(good_world(), Behaviour.BAD_OPTION))
    forgotten = replace(world, wanted_templates=())
    plan = plan_of(forgotten)
    assert plan.wants_templates
    assert not [item for item in plan.actions if isinstance(item, Apply)]

"""An only replica is replaced while gateways hold its requests: no request meets a service without a pod."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from fleetkeeper.common.sleep import Idle, Sleep, Wake, parse_sleep
from fleetkeeper.common.values import ReplicaAllocation
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.plan import Apply, Plan
from fleetkeeper.reconcile.rollout import PLACEMENT_S
from fleetkeeper.reconcile.sleep import SETTLED_S
from fleetkeeper.reconcile.strategy import REPLACE_AFTER_S
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_contract.sleep import SleepState, WakeMark
from fleetkeeper_contract.tiers import Tier
from tests.support.lanes import examples
from tests.support.reconcile.plan_cluster import live, settle, step
from tests.support.reconcile.plan_world import (
    Behaviour,
    World,
    act,
    new_world,
    plan_of,
    with_spec,
)

KEYS = '{"keys":[{"kty":"OKP"}]}'
OTHER = {"source": "pvc://models/other"}
THIRD = {"source": "pvc://models/third"}
STARTUP_S = 900
SWAPPING = SleepState.SWAPPING


def serving(strategy: str = "Swap", **spec: Any) -> World:
    """Return a settled service with one replica on the only accelerator, behind a gateway that holds."""
    rollout = {"startupSeconds": STARTUP_S, "strategy": strategy, **spec.pop("rollout", {})}
    spec = {"routing": {"policy": "None"}, "access": "Gateway", "rollout": rollout, **spec}
    context = replace(default_context(), grant_keys=KEYS, hold_s=55.0)
    world = replace(new_world(**spec), context=context, wake=Wake(can_wake=True), gpus=1)
    return settle(world)


def changed(world: World, behaviour: Behaviour = Behaviour.READY, **changes: Any) -> World:
    """Change the template of a service; the pods of the new one behave so."""
    return with_spec(replace(world, next_behaviour=behaviour), **(changes or {"model": OTHER}))


def swapping(world: World, at_most_s: float = 400.0) -> World:
    """Let time pass until the status says Swapping. Nothing was written for it yet."""
    end = world.now + at_most_s
    while sleep_of(world).state is not SWAPPING:
        assert world.now < end, world.writes
        plan = plan_of(world)
        world = act(world, plan)
        world = world if plan.status is not None else step(world, 1.0)
    return world


def replacing(world: World) -> World:
    """Let time pass until the Deployment is written, and the old pod is gone."""
    world, before = swapping(world), world.engine.template_hash
    while world.engine.template_hash == before and world.engine.max_surge:
        world = step(act(world, plan_of(world)), 1.0)
    while world.engine.template_hash == before:
        world = step(act(world, plan_of(world)), 1.0)
    assert world.ready == 0
    return world


def sleep_of(world: World) -> Sleep:
    return parse_sleep(world.status)


def write_of(plan: Plan) -> Apply | None:
    """Return the write of the engine Deployment in a plan."""
    found = [item for item in plan.actions if isinstance(item, Apply) and item.name == "chat"]
    return next((item for item in found if item.kind is Kind.DEPLOYMENT), None)


def failing(world: World, *templates: str) -> World:
    """Let the pods of these templates end at their start, from now on."""
    return replace(
        world, behaviours={**world.behaviours, **dict.fromkeys(templates, Behaviour.BAD_OPTION)}
    )


def message(world: World, kind: str) -> str:
    (found,) = [item for item in world.status["conditions"] if item["type"] == kind]
    return str(found["message"])


def events(world: World, seconds: float) -> list[str]:
    """Return the reasons of the events of this time."""
    found: list[str] = []
    end = world.now + seconds
    while world.now < end:
        plan = plan_of(world)
        found += [item.reason for item in plan.events]
        world = step(act(world, plan), 1.0)
    return found


# -- a swap from its begin to its end --------------------------------------------------------------


def test_the_status_says_swapping_six_seconds_before_the_only_pod_goes() -> None:
    """Gateways read it: a request that comes after that is held, not refused."""
    world = changed(serving())
    world = act(world, plan_of(world))  # the last good template is written to the status first
    plan = plan_of(world)
    assert plan.actions == ()
    assert plan.status is not None
    sleep = parse_sleep(plan.status)
    assert sleep == Sleep(1, SWAPPING, since=world.now)
    world = act(world, plan)
    for waited_s in (0.0, 3.0, SETTLED_S - 0.5):
        plan = plan_of(replace(world, now=sleep.since + waited_s))
        assert write_of(plan) is None
        assert plan.requeue_after_s == pytest.approx(SETTLED_S - waited_s)
    write = write_of(plan_of(replace(world, now=sleep.since + SETTLED_S)))
    assert write is not None
    assert write.manifest["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": 0,
        "maxUnavailable": 1,
    }


def test_it_ends_with_the_new_replica_and_keeps_how_long_its_start_took() -> None:
    """From the write of the Deployment: gateways hold nothing before."""
    world = replacing(changed(serving()))
    wanted = world.engine.template_hash
    world = settle(live(world, 15.0, 1.0))
    assert {pod.template_hash for pod in world.pods} == {wanted}
    sleep = sleep_of(world)
    assert (sleep.number, sleep.state, len(sleep.start_seconds)) == (1, None, 1)
    assert 5 <= sleep.start_seconds[0] <= 10
    assert world.condition("Ready") == ("True", "AllReplicasReady")
    assert world.status["sleep"].keys() == {"number", "since", "startSeconds"}
    assert plan_of(world).is_empty
    assert plan_of(world).requeue_after_s is None


def test_the_next_swap_has_the_next_number() -> None:
    world = settle(changed(serving()))
    world = settle(changed(world, model=THIRD))
    assert sleep_of(world).number == 2
    assert len(sleep_of(world).start_seconds) == 2


def test_a_service_that_swaps_is_as_specified_and_unavailable() -> None:
    """GitOps tools and alerts see a rollout, not a failure."""
    world = changed(serving())
    seen: dict[str, set[tuple[str, str] | None]] = {"Ready": set(), "Stalled": set()}
    kinds = ("Available", "Degraded", "Progressing", "Reconciling")
    seen |= {kind: set() for kind in kinds}
    for _ in range(60):
        world = live(world, 1.0, 1.0)
        for kind, values in seen.items():
            values.add(world.condition(kind))
    assert {status for status, _ in filter(None, seen["Ready"])} == {"True"}
    assert ("True", "Swapping") in seen["Ready"]
    assert seen["Available"] == {("True", "Answering"), ("False", "Swapping")}
    assert {status for status, _ in filter(None, seen["Degraded"])} == {"False"}
    assert seen["Stalled"] == {None}
    assert ("True", "RollingOut") in seen["Reconciling"]
    assert world.condition("Reconciling") is None


def test_a_successor_without_accelerator_while_the_old_pod_drains_is_no_problem() -> None:
    world = replacing(changed(serving()))
    pod = replace(
        world.pods[0],
        scheduled=False,
        unschedulable="0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
    )
    plan = plan_of(replace(world, pods=(pod,), status_written=None, children_written=None))
    assert plan.status is not None
    world = act(world, plan)
    assert world.condition("Ready") == ("True", "Swapping")
    assert world.condition("Available") == ("False", "InsufficientGPU")


def test_events_record_begin_and_end() -> None:
    found = events(changed(serving()), 60.0)
    assert [item for item in found if item in {"Swapping", "SwapEnded"}] == [
        "Swapping",
        "SwapEnded",
    ]
    assert not {"Ready", "Repaired"} & set(found), "the Deployment is written as the spec says"


def test_it_ends_only_with_a_ready_router() -> None:
    world = replacing(changed(serving(routing={"policy": "LeastLoaded"})))
    for _ in range(20):
        world = step(act(world, plan_of(world)), 1.0)
        unready = [
            replace(pod, ready=pod.component == "engine" and pod.ready) for pod in world.pods
        ]
        world = replace(world, pods=tuple(unready))
    assert world.ready == 1
    assert sleep_of(act(world, plan_of(world))).state is SWAPPING
    assert sleep_of(settle(world)).state is None


# -- when there is nothing to hold, or nothing that holds -------------------------------------------


def test_without_a_ready_pod_the_template_is_written_at_once() -> None:
    world = serving()
    world = failing(world, world.engine.template_hash)
    world = changed(live(world, 60.0))
    world = live(world, 2.0, 1.0)
    assert sleep_of(world).number == 0
    assert world.engine.max_surge == 0
    assert settle(world).ready == 1


@pytest.mark.parametrize("why", ["no mark of a gateway", "no keys"])
def test_without_a_gateway_that_holds_the_old_replica_stays(why: str) -> None:
    world = serving()
    lost = replace(world, wake=Wake())
    if why == "no keys":
        lost = replace(world, context=replace(world.context, grant_keys=""))
    pods = world.pods
    waiting = live(changed(lost), 2_000.0)
    assert waiting.pods == pods
    assert waiting.condition("Progressing") == ("True", "SwapWaits")
    assert waiting.condition("Reconciling") == ("True", "SwapWaits")
    assert waiting.condition("Ready") == ("True", "RollingOut")
    assert waiting.condition("Stalled") is None
    assert "rollout.strategy" in message(waiting, "Progressing")
    again_s = plan_of(waiting).requeue_after_s
    assert again_s is not None
    assert again_s <= 15
    world = settle(replace(waiting, context=world.context, wake=world.wake))
    assert world.condition("Ready") == ("True", "AllReplicasReady")
    assert sleep_of(world).number == 1


def test_a_gateway_lost_before_the_write_keeps_the_replica() -> None:
    world = swapping(changed(serving()))
    world = live(replace(world, wake=Wake()), 60.0)
    assert world.ready == 1
    assert world.condition("Progressing") == ("True", "SwapWaits")
    world = settle(replace(world, wake=Wake(can_wake=True)))
    assert sleep_of(world).state is None


def test_with_several_replicas_the_others_serve() -> None:
    world = replace(serving(replicas=2), gpus=2)
    world = changed(settle(world))
    fewest = 2
    for _ in range(60):
        world = live(world, 1.0, 1.0)
        fewest = min(fewest, world.ready)
        assert sleep_of(world).number == 0
    assert fewest == 1
    assert world.condition("Ready") == ("True", "AllReplicasReady")


def test_a_change_that_replaces_no_pod_is_no_swap() -> None:
    world = settle(with_spec(serving(), objectives={"queueWaitMilliseconds": 700}))
    assert "sleep" not in world.status
    rollout = {"strategy": "Swap", "startupSeconds": STARTUP_S}
    world = settle(with_spec(serving("Surge"), rollout=rollout))
    assert world.engine.max_surge == 0
    assert "sleep" not in world.status


# -- a revision that fails ---------------------------------------------------------------------------


def test_a_failed_revision_returns_to_the_last_good_one_and_requests_wait_for_that_too() -> None:
    world = serving()
    good = world.engine.template_hash
    world = replacing(changed(world, Behaviour.BAD_OPTION))
    while sleep_of(world).state is SWAPPING:
        assert world.engine.max_surge == 0
        world = live(world, 1.0, 1.0)
    assert world.ready == 1
    world = settle(world)
    assert world.engine.template_hash == good
    assert world.condition("Stalled") == ("True", "RolledBack")
    assert world.condition("Available") == ("True", "Answering")
    assert sleep_of(world).number == 1
    assert plan_of(world).is_empty


@pytest.mark.parametrize("why", ["Hold", "never good", "the last good one fails too"])
def test_without_a_way_back_nothing_is_held(why: str) -> None:
    """Clients get the error of an unavailable service at once."""
    if why == "never good":
        context = replace(default_context(), grant_keys=KEYS, hold_s=55.0)
        rollout = {"strategy": "Swap", "startupSeconds": STARTUP_S}
        new = new_world(access="Gateway", routing={"policy": "None"}, rollout=rollout)
        world = live(replace(new, context=context, wake=Wake(can_wake=True), gpus=1), 15.0)
    else:
        on_failure = "Hold" if why == "Hold" else "Rollback"
        world = serving(rollout={"onFailure": on_failure})
    good = world.engine.template_hash
    world = replacing(changed(world, Behaviour.BAD_OPTION))
    if why == "the last good one fails too":
        world = failing(world, good)
    world = settle(world, 4_000.0)
    assert sleep_of(world).state is None
    assert sleep_of(world).number == 1
    assert world.condition("Ready") == ("False", "BadEngineOption")
    assert world.condition("Available") == ("False", "BadEngineOption")


def test_a_revision_that_was_good_and_fails_now_ends_the_swap() -> None:
    """`decide_rollout` has no verdict on it: nothing would end the swap."""
    world = serving()
    first = world.engine.template_hash
    world = replacing(changed(world, Behaviour.SILENT))
    world = failing(with_spec(world, model={"source": "pvc://models/llama"}), first)
    world = settle(world, 4_000.0)
    assert world.engine.template_hash == first
    assert sleep_of(world).state is None
    assert world.condition("Ready") == ("False", "BadEngineOption")


def test_a_problem_of_the_new_revision_shows_before_it_is_a_failure() -> None:
    world = replacing(changed(serving(), Behaviour.BAD_IMAGE))
    world = live(world, 30.0)
    assert sleep_of(world).state is SWAPPING
    assert world.condition("Ready") == ("False", "ImagePull")
    assert world.condition("Stalled") is None


# -- changes on the way ------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [{"suspend": True}, {"replicas": 0}], ids=str)
@pytest.mark.parametrize("is_written", [False, True], ids=["before", "after the write"])
def test_who_stops_the_service_ends_the_swap(spec: dict[str, Any], is_written: bool) -> None:
    world = (replacing if is_written else swapping)(changed(serving()))
    world = settle(with_spec(world, **spec))
    assert sleep_of(world).state is None
    assert sleep_of(world).start_seconds == ()
    assert (world.pods, world.engine.desired_replicas) == ((), 0)
    world = settle(with_spec(world, **dict.fromkeys(spec)))
    assert world.condition("Ready") == ("True", "AllReplicasReady")


@pytest.mark.parametrize("is_written", [False, True], ids=["before", "after the write"])
def test_paused_keeps_it(is_written: bool) -> None:
    world = (replacing if is_written else swapping)(changed(serving()))
    paused = live(with_spec(world, paused=True), 60.0)
    assert sleep_of(paused) == sleep_of(world)
    assert paused.engine.template_hash == world.engine.template_hash
    world = settle(with_spec(paused, paused=None))
    assert sleep_of(world).state is None
    assert world.condition("Ready") == ("True", "AllReplicasReady")


def test_a_spec_changed_back_before_the_write_replaces_nothing() -> None:
    world = swapping(changed(serving()))
    pods = world.pods
    world = settle(with_spec(world, model={"source": "pvc://models/llama"}))
    assert world.pods == pods
    assert sleep_of(world) == Sleep(1, since=sleep_of(world).since)


def test_another_change_during_a_swap_is_written_at_once() -> None:
    """Gateways hold already."""
    world = replacing(changed(serving()))
    before = world.engine.template_hash
    world = act(with_spec(world, model=THIRD), plan_of(with_spec(world, model=THIRD)))
    assert world.engine.template_hash != before
    assert sleep_of(world).state is SWAPPING
    world = settle(world)
    assert (sleep_of(world).state, sleep_of(world).number) == (None, 1)


@pytest.mark.parametrize("strategy", ["Surge", "Replace"])
def test_another_strategy_before_the_write_ends_it(strategy: str) -> None:
    world = replace(swapping(changed(serving())), gpus=2)
    rollout = {"strategy": strategy, "startupSeconds": STARTUP_S}
    world = with_spec(world, rollout=rollout)
    plan = plan_of(world)
    assert plan.actions == ()
    world = act(world, plan)
    assert sleep_of(world).state is None
    assert settle(world).condition("Ready") == ("True", "AllReplicasReady")


def test_another_strategy_after_the_write_waits_for_the_replica() -> None:
    world = replacing(changed(serving()))
    world = with_spec(world, rollout={"strategy": "Surge", "startupSeconds": STARTUP_S})
    for _ in range(30):
        world = live(world, 1.0, 1.0)
        assert world.ready or sleep_of(world).state is SWAPPING
    assert sleep_of(world).state is None


@pytest.mark.parametrize("is_written", [False, True], ids=["before", "after the write"])
def test_more_replicas_end_it_as_soon_as_one_is_ready(is_written: bool) -> None:
    world = (replacing if is_written else swapping)(changed(serving()))
    more = ReplicaAllocation(2, "QueueWaitAboveTarget", "more")
    world = replace(world, allocation=more, gpus=2)
    had_pod = world.ready > 0
    while sleep_of(world).state is SWAPPING:
        world = live(world, 1.0, 1.0)
        assert (world.ready > 0) >= had_pod
    assert world.ready >= 1
    assert settle(world).ready == 2


def test_a_service_that_swaps_does_not_go_to_sleep_and_no_mark_changes_it() -> None:
    world = serving(scaling={"sleep": {"minAwakeSeconds": 0}})
    world = swapping(changed(world))
    world = replace(
        world,
        idle=Idle(is_idle=True, read_at=world.now),
        wake=Wake(True, WakeMark(1, Tier.REALTIME)),
    )
    while sleep_of(world).state is SWAPPING:
        world = live(world, 1.0, 1.0)
        assert sleep_of(world).state in {SWAPPING, None}
    assert {pod.template_hash for pod in world.pods} == {world.engine.template_hash}


def test_a_replica_that_woke_a_moment_ago_is_swapped_too() -> None:
    """Its router is not ready, so the service still wakes: gateways hold on."""
    world = changed(serving(scaling={"sleep": {}}))
    status = {
        **world.status,
        "sleep": {"number": 4, "state": "Waking", "since": "2027-01-15T08:00:00Z"},
    }
    world = replace(world, resource={**world.resource, "status": status})
    world = replace(world, wake=Wake(can_wake=True))
    routed = {"policy": "LeastLoaded"}
    world = swapping(with_spec(world, routing=routed))
    assert sleep_of(world).number == 5
    assert world.ready == 1
    assert sleep_of(settle(world)).state is None


# -- crashes and stale caches ------------------------------------------------------------------------


@pytest.mark.parametrize("cut", range(12))
def test_a_crash_after_any_plan_ends_the_same(cut: int) -> None:
    """The k-th plan is lost, or its children are written and its status is not."""
    for lost in (Plan(), None):
        world = changed(serving())
        for number in range(30):
            plan = plan_of(world)
            if number == cut:
                plan = Plan() if lost is not None else replace(plan, status=None, events=())
            world = step(act(world, plan), 1.0)
            assert world.ready or sleep_of(world).state is SWAPPING
        world = settle(replace(world, status_written=None, children_written=None))
        assert (sleep_of(world).number, sleep_of(world).state) == (1, None)
        assert world.condition("Ready") == ("True", "AllReplicasReady")


def test_it_does_not_end_before_kubernetes_has_seen_the_write() -> None:
    """The Deployment is new; its ReplicaSet and the pods in the caches are still the old ones."""
    world = swapping(changed(serving()))
    world = replace(world, now=world.now + SETTLED_S)
    world = act(world, plan_of(world))
    assert world.engine.max_surge == 0
    assert world.ready == 1
    for _ in range(3):
        world = act(replace(world, now=world.now + 5), plan_of(replace(world, now=world.now + 5)))
        assert sleep_of(world).state is SWAPPING
        assert write_of(plan_of(world)) is None


def test_it_does_not_end_while_the_old_pod_is_still_listed() -> None:
    world = swapping(changed(serving()))
    old = world.pods
    world = replacing(world)
    world = replace(step(world, 10.0), pods=(*old, *step(world, 10.0).pods))
    assert world.ready == 2
    assert sleep_of(act(world, plan_of(world))).state is SWAPPING


@pytest.mark.parametrize("change", [{"replicas": 2}, {"rollout": {"strategy": "Surge"}}], ids=str)
def test_an_old_pod_that_is_still_listed_ends_nothing(change: dict[str, Any]) -> None:
    """It is being removed: what the spec wants now does not keep it."""
    world = swapping(changed(serving()))
    old = world.pods
    world = replacing(world)
    rollout = {"startupSeconds": STARTUP_S, **change.get("rollout", {"strategy": "Swap"})}
    world = with_spec(world, **{**change, "rollout": rollout})
    world = replace(world, pods=(*old, *world.pods))
    assert [pod.ready for pod in world.pods] == [True, False]
    assert sleep_of(act(world, plan_of(world))).state is SWAPPING


def test_a_status_that_was_lost_says_swapping_again() -> None:
    """A person removed it, or a restore brought an old one: requests are held as soon as possible."""
    world = swapping(changed(serving()))
    world = replace(world, now=world.now + SETTLED_S)
    world = act(world, plan_of(world))
    status = {key: value for key, value in world.status.items() if key != "sleep"}
    world = replace(world, resource={**world.resource, "status": status})
    world = act(world, plan_of(world))
    assert sleep_of(world).state is SWAPPING


# -- Auto --------------------------------------------------------------------------------------------


def test_auto_swaps_an_only_replica_whose_start_fits_twice_into_the_hold() -> None:
    world = changed(serving("Auto"))
    began = world.now
    world = swapping(world)
    assert REPLACE_AFTER_S <= world.now - began <= REPLACE_AFTER_S + 10
    assert world.engine.max_surge == 1
    assert world.ready == 1
    world = settle(world)
    assert world.condition("Ready") == ("True", "AllReplicasReady")
    assert world.engine.max_surge == 1, "the next rollout surges again"
    (took_s,) = sleep_of(world).start_seconds
    assert took_s <= 20, "the time without room before the swap is no start"


def test_auto_swaps_again_the_next_time() -> None:
    """The time that a pod waited for the room of its predecessor is no part of its start."""
    world = settle(changed(serving("Auto")))
    world = settle(changed(world, model=THIRD))
    assert sleep_of(world).number == 2
    assert "rollback" not in world.status


def test_auto_says_nothing_of_other_strategies_before_it_swaps() -> None:
    world = live(changed(serving("Auto")), 60.0)
    assert world.condition("Degraded") == ("True", "SomeReplicasFailing")
    assert "rollout.strategy" not in message(world, "Degraded")


def test_auto_keeps_to_its_swap_until_the_last_good_one_is_back() -> None:
    world = serving("Auto")
    good = world.engine.template_hash
    world = swapping(changed(world, Behaviour.BAD_OPTION))
    while world.engine.max_surge:
        world = live(world, 1.0, 1.0)
    while sleep_of(world).state is SWAPPING:
        assert world.engine.max_surge == 0
        world = live(world, 1.0, 1.0)
    world = settle(world)
    assert world.engine.template_hash == good
    assert world.ready == 1
    assert world.condition("Stalled") == ("True", "RolledBack")


def slow(world: World) -> World:
    """Return the world after a start that took 28 s: twice that is more than 55 s."""
    sleep = {"number": 1, "since": "2027-01-15T08:00:00Z", "startSeconds": [28]}
    status = {**world.status, "sleep": sleep}
    return settle(replace(world, resource={**world.resource, "status": status}))


@pytest.mark.parametrize("why", ["open", "slow", "pod", "no gateway", "no hold", "Surge"])
def test_an_only_replica_that_must_not_go_stays_and_the_condition_names_the_ways(why: str) -> None:
    """It does not wait for startupSeconds, and the rollout fails after ten minutes."""
    world = serving("Surge") if why == "Surge" else serving("Auto")
    if why == "open":
        world = settle(with_spec(world, access="Open"))
    elif why == "slow":
        world = slow(world)
    elif why == "pod":
        (pod,) = world.pods
        assert pod.ready_since is not None
        pod = replace(pod, scheduled_since=pod.ready_since - 28)
        world = replace(world, pods=(pod,))
    elif why == "no gateway":
        world = replace(world, wake=Wake())
    elif why != "Surge":
        world = replace(world, context=replace(world.context, hold_s=0.0))
    pods = world.pods
    waiting = live(changed(world), PLACEMENT_S - 20)
    assert waiting.condition("Degraded") == ("True", "SomeReplicasFailing")
    text = message(waiting, "Degraded")
    assert all(word in text for word in ("InsufficientGPU", "rollout.strategy", "Swap", "Replace"))
    assert waiting.condition("Ready") == ("True", "RollingOut")
    assert {pod.uid for pod in pods} < {pod.uid for pod in waiting.pods}
    done = live(waiting, 40)
    assert done.status["rollback"]["reason"] == "InsufficientGPU"
    text = message(done, "Stalled")
    assert all(word in text for word in ("rollout.strategy", "Swap", "Replace"))
    assert done.pods == pods or why == "pod"


def test_a_shorter_startup_time_still_counts() -> None:
    world = changed(serving("Surge", rollout={"startupSeconds": 120}))
    assert live(world, 130.0).status["rollback"]["reason"] == "InsufficientGPU"


def test_hold_stops_it_after_the_same_time() -> None:
    world = changed(serving("Surge", rollout={"onFailure": "Hold"}))
    world = live(world, PLACEMENT_S + 20)
    assert world.condition("Stalled") == ("True", "RolloutHeld")
    assert world.ready == 1


def test_a_first_start_and_one_of_several_replicas_wait_for_startup_seconds() -> None:
    rollout = {"startupSeconds": STARTUP_S, "strategy": "Surge"}
    world = replace(new_world(routing={"policy": "None"}, rollout=rollout), gpus=0)
    world = live(world, PLACEMENT_S + 60)
    assert world.condition("Stalled") is None
    two = replace(serving("Surge", replicas=2), gpus=2)
    two = live(changed(settle(two)), PLACEMENT_S + 60)
    assert "rollback" not in two.status
    assert "rollback" in live(two, STARTUP_S).status


@pytest.mark.parametrize("strategy", ["Swap", "Replace"])
@pytest.mark.parametrize("after_s", [60.0, PLACEMENT_S + 60])
def test_the_strategy_that_the_condition_names_makes_room(strategy: str, after_s: float) -> None:
    """Also after the rollback: the spec need not change otherwise."""
    world = live(changed(serving("Surge")), after_s)
    assert ("rollback" in world.status) == (after_s > PLACEMENT_S)
    world = with_spec(world, rollout={"strategy": strategy, "startupSeconds": STARTUP_S})
    for _ in range(60):
        world = live(world, 1.0, 1.0)
        assert world.ready or strategy == "Replace" or sleep_of(world).state is SWAPPING
    world = settle(world)
    assert world.condition("Ready") == ("True", "AllReplicasReady")
    assert "rollback" not in world.status
    assert sleep_of(world).number == (1 if strategy == "Swap" else 0)


def test_a_swap_that_found_no_accelerator_is_not_tried_again_by_itself() -> None:
    """Another pod took the accelerator of the old one, or the new one needs two."""
    world = serving()
    good = world.engine.template_hash
    world = replace(replacing(changed(world)), gpus=0)
    world = replace(
        world, pods=tuple(replace(pod, scheduled=False, ready=False) for pod in world.pods)
    )
    world = live(world, STARTUP_S + 30)
    world = settle(replace(world, gpus=1))
    assert world.status["rollback"]["reason"] == "InsufficientGPU"
    world = settle(with_spec(world, objectives={"queueWaitMilliseconds": 700}))
    assert world.engine.template_hash == good
    assert "rollback" in world.status


def test_auto_that_replaces_several_keeps_the_last_one_that_serves() -> None:
    """The load falls during the rollout: the last ready pod is an only replica now, and its start is slow."""
    world = serving("Auto", access="Open", scaling={"minReplicas": 1})
    world = replace(world, allocation=ReplicaAllocation(2, "Test", "two"), gpus=2)
    world = changed(settle(world), Behaviour.SILENT)
    while world.engine.max_surge:
        world = live(world, 5.0)
    world = live(world, 5.0)
    assert world.ready == 1
    world = live(replace(world, allocation=ReplicaAllocation(1, "Test", "one")), 300.0, 1.0)
    assert world.ready == 1


# -- any order of events -----------------------------------------------------------------------------


def has_been_swapping(world: World) -> bool:
    """Return True if every gateway has seen that the replica goes."""
    sleep = sleep_of(world)
    return sleep.state is SWAPPING and world.now - sleep.since >= SETTLED_S


def takes_the_only_ready_pod(world: World, write: Apply) -> bool:
    """Return True if Kubernetes may remove the last ready pod because of this write."""
    spec = write.manifest["spec"]
    hash_ = spec["template"]["metadata"]["annotations"]["fleetkeeper.io/template-hash"]
    ready = {pod.template_hash for pod in world.pods if pod.ready and pod.component == "engine"}
    no_surge = spec["strategy"]["rollingUpdate"]["maxSurge"] == 0
    return bool(ready) and hash_ not in ready and spec["replicas"] == 1 and no_surge


class Swaps(RuleBasedStateMachine):
    """A service with Swap or Auto: people, the control loop, gateways and crashes in any order."""

    @initialize(strategy=st.sampled_from(["Swap", "Auto"]), gpus=st.sampled_from([1, 2]))
    def begin(self, strategy: str, gpus: int) -> None:
        self.world = replace(serving(strategy), gpus=gpus)

    def run(self, world: World, seconds: float, *, loses_status: bool = False) -> None:
        """Check each plan before it is carried out, and that a pod is ready or requests are held."""
        end = world.now + seconds
        while world.now < end:
            for _ in range(6):
                plan = plan_of(world)
                write = write_of(plan)
                if write is not None and takes_the_only_ready_pod(world, write):
                    assert has_been_swapping(world), world.writes[-6:]
                if plan.is_empty and not plan.wants_templates:
                    break
                lost = replace(plan, status=None) if loses_status and plan.actions else plan
                world = act(world, lost)
            after = step(world, 2.0)
            if world.ready and not after.ready and world.engine.desired_replicas:
                assert has_been_swapping(world), world.writes[-6:]
            world = after
        self.world = replace(world, status_written=None, children_written=None)

    @rule(
        model=st.sampled_from(["llama", "other", "third"]),
        behaviour=st.sampled_from([Behaviour.READY, Behaviour.BAD_OPTION, Behaviour.SILENT]),
        seconds=st.sampled_from([2.0, 8.0, 40.0]),
    )
    def change_model(self, model: str, behaviour: Behaviour, seconds: float) -> None:
        source = f"pvc://models/{model}"
        self.run(changed(self.world, behaviour, model={"source": source}), seconds)

    @rule(strategy=st.sampled_from(["Swap", "Auto", "Surge"]))
    def change_strategy(self, strategy: str) -> None:
        rollout = {"startupSeconds": STARTUP_S, "strategy": strategy}
        self.run(with_spec(self.world, rollout=rollout), 4.0)

    @rule(replicas=st.sampled_from([None, 0, 1, 2]), seconds=st.sampled_from([2.0, 20.0]))
    def pin(self, replicas: int | None, seconds: float) -> None:
        self.run(with_spec(self.world, replicas=replicas), seconds)

    @rule(replicas=st.sampled_from([None, 1, 2]), seconds=st.sampled_from([2.0, 20.0]))
    def allocate(self, replicas: int | None, seconds: float) -> None:
        allocation = ReplicaAllocation(replicas, "Test", "as the test says") if replicas else None
        self.run(replace(self.world, allocation=allocation), seconds)

    @rule(
        spec=st.sampled_from(
            [{"paused": True}, {"suspend": True}, {"paused": None, "suspend": None}]
        )
    )
    def stop(self, spec: dict[str, Any]) -> None:
        self.run(with_spec(self.world, **spec), 10.0)

    @rule(holds=st.booleans())
    def gateway(self, holds: bool) -> None:
        self.run(replace(self.world, wake=Wake(can_wake=holds)), 4.0)

    @rule(gpus=st.sampled_from([0, 1, 2]))
    def resize_cluster(self, gpus: int) -> None:
        self.run(replace(self.world, gpus=gpus), 10.0)

    @rule(routed=st.booleans())
    def route(self, routed: bool) -> None:
        self.run(
            with_spec(self.world, routing={"policy": "LeastLoaded" if routed else "None"}), 10.0
        )

    @rule()
    def crash(self) -> None:
        """Children are written, the status is not."""
        self.run(self.world, 4.0, loses_status=True)

    @rule(seconds=st.sampled_from([6.0, 130.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.run(self.world, seconds)

    def teardown(self) -> None:
        """In the end nothing is held."""
        world = with_spec(self.world, paused=None, suspend=None, replicas=None)
        world = live(replace(world, wake=Wake(can_wake=True), gpus=2), STARTUP_S, 10.0)
        world = settle(world, 6_000.0)
        assert sleep_of(world).state is None


Swaps.TestCase.settings = settings(
    examples(30),
    stateful_step_count=12,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSwaps = pytest.mark.slow(pytest.mark.timeout(600)(Swaps.TestCase))

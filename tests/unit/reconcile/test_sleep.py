"""A service without requests sleeps: no replica, no router, and back with the next wake mark."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.api.names import ANNOTATION_WAKE
from fleetkeeper.common.budget import Allowance
from fleetkeeper.common.sleep import NOT_IDLE, Idle, Sleep, Wake, parse_sleep
from fleetkeeper.common.values import ReplicaAllocation
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.last_good import GOOD_AFTER_S
from fleetkeeper.reconcile.plan import Apply
from fleetkeeper.reconcile.sleep import BACKOFF_S, NO_AUTO, NO_GATEWAY, OPEN_ACCESS, SETTLED_S
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_contract.sleep import SleepState, WakeMark, format_mark, parse_mark, start_p90_s
from fleetkeeper_contract.tiers import Tier
from tests.support.reconcile.plan_cluster import live, settle, step
from tests.support.reconcile.plan_world import (
    Behaviour,
    World,
    act,
    new_world,
    plan_of,
    with_spec,
)

SLEEPS = {"scaling": {"sleep": {"minAwakeSeconds": 60}}, "access": "Gateway"}
KEYS = '{"keys":[{"kty":"OKP"}]}'
ROUTER = (Kind.DEPLOYMENT, "chat-fk-router")


def awake(**spec: Any) -> World:
    """Return a settled service with requests, whose gateway can hold and wake."""
    return settle(new(**spec))


def new(**spec: Any) -> World:
    """Return a new service, whose gateway can hold and wake."""
    world = new_world(**{**SLEEPS, **spec})
    context = replace(default_context(), grant_keys=KEYS)
    return replace(world, context=context, wake=Wake(can_wake=True))


def idle(world: World) -> World:
    """Return the world with pods that were read just now and had no request for long."""
    return replace(world, idle=Idle(is_idle=True, read_at=world.now))


def going(**spec: Any) -> World:
    """Return a service that goes to sleep."""
    world = step(idle(awake(**spec)), 60.0)
    world = act(idle(world), plan_of(idle(world)))
    assert sleep_of(world).state is SleepState.GOING_TO_SLEEP
    return world


def asleep(**spec: Any) -> World:
    """Return a service that sleeps, with nothing left to do."""
    world = step(going(**spec), SETTLED_S)
    world = settle(replace(idle(world), now=world.now))
    assert sleep_of(world).state is SleepState.ASLEEP
    return replace(world, idle=NOT_IDLE)


def marked(world: World, tier: Tier = Tier.STANDARD, number: int | None = None) -> World:
    """Return the world with a wake mark, by default of the present sleep."""
    mark = WakeMark(sleep_of(world).number if number is None else number, tier)
    return replace(world, wake=Wake(can_wake=True, mark=mark))


def sleep_of(world: World) -> Sleep:
    return parse_sleep(world.status)


def replicas(world: World) -> tuple[int, int]:
    """Return the replicas of engine and router."""
    router: Any = world.children[ROUTER]
    return world.engine.desired_replicas, router.desired_replicas


def test_a_service_without_requests_ends_without_replica_and_router() -> None:
    world = asleep()
    assert replicas(world) == (0, 0)
    assert sleep_of(world) == Sleep(1, SleepState.ASLEEP, since=sleep_of(world).since)
    assert world.pods == ()
    assert plan_of(world).is_empty
    assert plan_of(world).requeue_after_s is None


def test_a_sleeping_service_is_as_specified() -> None:
    """GitOps tools and alerts see a service that is ready, and that answers nothing itself."""
    world = asleep()
    assert world.condition("Ready") == ("True", "Asleep")
    assert world.condition("Available") == ("False", "Asleep")
    assert world.condition("Progressing") == ("False", "Asleep")
    assert world.condition("ScalingLimited") == ("False", "Asleep")
    assert world.condition("Reconciling") is None
    assert world.condition("Stalled") is None
    assert world.condition("Degraded") != ("True", "Asleep")
    assert world.status["scaling"]["desired"] == 0
    assert world.status["scaling"]["reason"] == "Asleep"


def test_gateways_hold_before_the_first_pod_goes() -> None:
    """Two writes of the status come first: going to sleep, then asleep. Each is a reconcile of its own."""
    world = step(idle(awake()), 60.0)
    plan = plan_of(idle(world))
    assert plan.actions == ()
    assert plan.status is not None
    assert plan.status["sleep"]["state"] == "GoingToSleep"
    world = step(act(world, plan), SETTLED_S)
    plan = plan_of(idle(world))
    assert plan.actions == ()
    assert plan.status is not None
    assert plan.status["sleep"]["state"] == "Asleep"
    world = act(world, plan)
    writes = [item for item in plan_of(world).actions if isinstance(item, Apply)]
    numbers = {item.name: item.manifest["spec"]["replicas"] for item in writes}
    assert numbers == {"chat": 0, "chat-fk-router": 0}


def test_only_pods_read_after_the_gateways_knew_prove_that_no_request_came() -> None:
    world = going()
    early = replace(world, idle=Idle(is_idle=True, read_at=world.now))
    later = replace(early, now=world.now + 60)
    assert plan_of(later).status is None
    assert plan_of(later).requeue_after_s == 1.0


@pytest.mark.parametrize("cause", ["mark", "request", "unknown", "unready", "no gateway", "spec"])
def test_a_doubt_on_the_way_keeps_it_awake(cause: str) -> None:
    """It costs nothing: no replica was touched."""
    world = step(going(), SETTLED_S)
    world = idle(world)
    if cause == "mark":
        world = marked(world)
    elif cause in {"request", "unknown"}:
        world = replace(world, idle=NOT_IDLE)
    elif cause == "no gateway":
        world = replace(world, wake=Wake())
    elif cause == "spec":
        world = with_spec(world, model={"source": "pvc://models/other"})
    else:
        world = replace(world, pods=tuple(replace(pod, ready=False) for pod in world.pods))
    plan = plan_of(world)
    assert plan.status is not None
    assert parse_sleep(plan.status).state is None
    assert parse_sleep(plan.status).number == 1
    assert world.engine.desired_replicas == 1


def test_a_mark_on_the_way_lets_its_request_reach_the_pods() -> None:
    """The pods were read before the request: what they said then starts no other step to sleep."""
    world = marked(idle(step(going(), SETTLED_S)))
    world = act(world, plan_of(world))
    assert sleep_of(world).state is None
    early = replace(world, idle=Idle(is_idle=True, read_at=world.now + SETTLED_S - 1))
    for waited_s in (0.0, 1.0, 60.0, 3600.0):
        plan = plan_of(replace(early, now=world.now + waited_s))
        assert plan.status is None
        assert plan.requeue_after_s == max(1.0, SETTLED_S - waited_s)
    world = idle(replace(world, now=world.now + 60.0))
    plan = plan_of(world)
    assert plan.status is not None
    assert plan.status["sleep"]["state"] == "GoingToSleep"
    assert plan.status["sleep"]["number"] == 2


def test_a_late_mark_of_an_earlier_sleep_wakes_nothing() -> None:
    world = asleep()
    world = settle(marked(world))
    assert sleep_of(world).state is None
    world = idle(step(world, 120.0))
    world = act(world, plan_of(world))
    world = settle(idle(step(world, SETTLED_S)))
    assert sleep_of(world) == replace(sleep_of(world), number=2, state=SleepState.ASLEEP)
    world = marked(world, number=1)
    assert plan_of(world).is_empty
    assert sleep_of(settle(marked(world, number=3))).state is SleepState.ASLEEP


@pytest.mark.parametrize("tier", Tier)
def test_a_mark_wakes_it(tier: Tier) -> None:
    """First the status, with the tier that the budget counts; then the engine, and the router."""
    world = marked(asleep(), tier)
    plan = plan_of(world)
    assert plan.actions == ()
    assert plan.status is not None
    assert plan.status["sleep"]["state"] == "Waking"
    assert plan.status["sleep"]["tier"] == tier.label
    world = act(world, plan)
    writes = [item for item in plan_of(world).actions if isinstance(item, Apply)]
    assert {item.name for item in writes} == {"chat"}
    world = live(world, 5.0, 1.0)
    assert replicas(world) == (1, 2)
    assert world.condition("Ready") == ("True", "Waking")
    assert world.condition("Available") == ("False", "Waking")
    world = settle(world)
    assert sleep_of(world).state is None
    assert world.condition("Ready") == ("True", "AllReplicasReady")
    assert world.condition("Available") == ("True", "Answering")


def test_the_status_keeps_how_long_starts_take() -> None:
    world = settle(marked(asleep()))
    (took_s,) = sleep_of(world).start_seconds
    assert 1 <= took_s <= 30
    assert world.status["sleep"].keys() == {"number", "since", "startSeconds"}


def test_a_wake_by_hand_names_the_sleep_that_it_ends() -> None:
    world = asleep()
    metadata = {**world.resource["metadata"], "annotations": {ANNOTATION_WAKE: "2"}}
    other = replace(world, resource={**world.resource, "metadata": metadata})
    assert plan_of(other).is_empty
    metadata = {**metadata, "annotations": {ANNOTATION_WAKE: "1"}}
    world = settle(replace(world, resource={**world.resource, "metadata": metadata}))
    assert sleep_of(world).state is None
    assert world.ready == 1


def test_a_stale_allocation_does_not_decide_how_many_wake() -> None:
    """The control loop counted none while it slept."""
    world = marked(asleep(scaling={"sleep": {"minAwakeSeconds": 60}, "minReplicas": 2}))
    world = replace(world, allocation=ReplicaAllocation(0, "Asleep", "asleep"))
    world = act(world, plan_of(world))
    (engine,) = [
        item for item in plan_of(world).actions if isinstance(item, Apply) and item.name == "chat"
    ]
    assert engine.manifest["spec"]["replicas"] == 2


def test_without_room_it_waits_in_waking_and_says_why() -> None:
    world = marked(asleep(resources={"accelerator": {"count": 1}}))
    world = replace(world, allowance=Allowance(0, "the fleet's budget of 4 GPUs"))
    world = live(world, 60.0)
    assert sleep_of(world).state is SleepState.WAKING
    assert world.engine.desired_replicas == 0
    assert world.condition("ScalingLimited") == ("True", "GPUBudget")
    world = settle(replace(world, allowance=Allowance(1, "the fleet's budget of 4 GPUs")))
    assert sleep_of(world).state is None
    (took_s,) = sleep_of(world).start_seconds
    assert 1 <= took_s <= 30, "the wait for room is no part of the start"


def test_a_failed_start_frees_its_accelerators_and_needs_a_new_mark() -> None:
    world = marked(asleep())
    failing = {world.engine.template_hash: Behaviour.BAD_OPTION}
    world = settle(replace(world, behaviours={**world.behaviours, **failing}))
    sleep = sleep_of(world)
    assert (sleep.state, sleep.number, sleep.failures) == (SleepState.ASLEEP, 2, 1)
    assert "BadEngineOption" in sleep.message
    assert world.condition("Ready") == ("False", "WakeFailed")
    assert world.condition("Available") == ("False", "Asleep")
    assert world.condition("Stalled") is None
    assert replicas(world) == (0, 0)
    assert world.pods == ()
    assert plan_of(world).is_empty


@pytest.mark.parametrize("failures", range(6))
def test_the_next_wake_after_failures_waits(failures: int) -> None:
    """1, 2, 5, then 10 minutes."""
    world = marked(failed(asleep(), failures))
    wait_s = BACKOFF_S[min(failures, 4)]
    since = sleep_of(world).since
    if wait_s:
        world = replace(world, now=since + wait_s - 7)
        world = act(world, plan_of(world))
        assert sleep_of(world).state is SleepState.ASLEEP
        assert plan_of(world).requeue_after_s == pytest.approx(7)
    plan = plan_of(replace(world, now=max(world.now, since + wait_s)))
    assert plan.status is not None
    assert plan.status["sleep"]["state"] == "Waking"


def failed(world: World, failures: int) -> World:
    """Return the world after so many failed starts in a row, the last one just now."""
    sleep = {**world.status["sleep"], "failures": failures, "message": "it failed"}
    status = {**world.status, "sleep": sleep}
    return replace(world, resource={**world.resource, "status": status})


def test_a_changed_spec_does_not_wait_for_the_failures_of_another_one() -> None:
    world = marked(failed(asleep(), 4))
    world = act(world, plan_of(world))
    assert sleep_of(world).state is SleepState.ASLEEP
    world = with_spec(world, model={"source": "pvc://models/other"})
    world = act(world, plan_of(world))
    assert sleep_of(world).state is SleepState.WAKING
    assert sleep_of(settle(world)).state is None


def test_a_wake_by_hand_does_not_wait_for_earlier_failures() -> None:
    world = failed(asleep(), 4)
    metadata = {**world.resource["metadata"], "annotations": {ANNOTATION_WAKE: "1"}}
    plan = plan_of(replace(world, resource={**world.resource, "metadata": metadata}))
    assert plan.status is not None
    assert plan.status["sleep"]["state"] == "Waking"


def test_a_mark_before_the_first_pod_is_removed_costs_no_start() -> None:
    """The pods are ready still, so there is no start to measure."""
    world = idle(step(going(), SETTLED_S))
    world = marked(act(world, plan_of(world)))
    assert sleep_of(world).state is SleepState.ASLEEP
    pods = world.pods
    world = settle(replace(act(world, plan_of(world)), idle=NOT_IDLE))
    assert world.pods == pods
    assert sleep_of(world) == Sleep(1, since=sleep_of(world).since)


def test_the_router_starts_once_an_engine_has_an_address() -> None:
    """It finds engines by DNS. A name without addresses is one that DNS servers keep for seconds."""
    world = marked(asleep())
    world = act(world, plan_of(world))
    assert sleep_of(world).state is SleepState.WAKING
    world = act(world, plan_of(world))
    assert replicas(world) == (1, 0)
    assert plan_of(world).actions == ()
    world = step(world, 1.0)
    assert not world.ready
    world = act(world, plan_of(world))
    assert replicas(world) == (1, 2)
    without_engine = replace(world, pods=())
    assert plan_of(without_engine).actions == (), "it stays when that engine is gone"


def test_it_wakes_until_a_router_is_ready_too() -> None:
    world = live(marked(asleep()), 15.0)
    assert sleep_of(world).state is None
    world = marked(asleep())
    for _ in range(15):
        world = act(world, plan_of(world))
        world = step(world, 1.0)
        unready = [
            replace(pod, ready=False) if pod.component == "router" else pod for pod in world.pods
        ]
        world = replace(world, pods=tuple(unready))
    assert world.ready == 1
    assert sleep_of(act(world, plan_of(world))).state is SleepState.WAKING


def test_a_service_that_fails_again_and_again_stays_not_ready() -> None:
    """Ready does not flip at each retry."""
    world = marked(asleep())
    hash_ = world.engine.template_hash
    world = settle(replace(world, behaviours={**world.behaviours, hash_: Behaviour.BAD_OPTION}))
    world = replace(marked(world), now=world.now + 60)
    world = live(world, 15.0)
    assert sleep_of(world).state is SleepState.WAKING
    assert world.condition("Ready") == ("False", "WakeFailed")


def test_a_start_that_works_again_forgets_the_failures() -> None:
    world = marked(asleep())
    hash_ = world.engine.template_hash
    world = settle(replace(world, behaviours={**world.behaviours, hash_: Behaviour.BAD_OPTION}))
    world = replace(marked(world), behaviours={hash_: Behaviour.READY}, now=world.now + 60)
    world = settle(world)
    assert (sleep_of(world).state, sleep_of(world).failures, sleep_of(world).message) == (
        None,
        0,
        "",
    )


@pytest.mark.parametrize("spec", [{"suspend": True}, {"replicas": 0}, {"paused": True}], ids=str)
def test_what_a_person_stopped_neither_sleeps_nor_wakes_by_itself(spec: dict[str, Any]) -> None:
    world = idle(step(with_spec(awake(), **spec), 120.0))
    assert sleep_of(settle(world)).state is None
    world = settle(marked(with_spec(asleep(), **spec)))
    assert sleep_of(world).state is SleepState.ASLEEP
    assert world.engine.desired_replicas == 0


@pytest.mark.parametrize(
    "spec",
    [
        {"scaling": {"sleep": {}, "mode": "Advisory"}},
        {"scaling": {"sleep": {}, "mode": "External"}, "replicas": 1},
    ],
    ids=["Advisory", "External"],
)
def test_a_service_that_others_scale_never_sleeps(spec: dict[str, Any]) -> None:
    """One that sleeps when the mode changes runs again: no mark would wake it anymore."""
    world = settle(idle(step(with_spec(awake(), **spec), 120.0)))
    assert sleep_of(world).state is None
    assert world.status["sleep"]["message"] == NO_AUTO
    world = settle(with_spec(asleep(), **spec))
    assert sleep_of(world).state is None
    assert world.engine.desired_replicas == 1


def test_after_a_suspension_it_still_sleeps() -> None:
    world = settle(with_spec(asleep(), suspend=True))
    assert world.condition("Ready") == ("False", "Suspended")
    world = settle(with_spec(world, suspend=False))
    assert sleep_of(world).state is SleepState.ASLEEP
    assert world.engine.desired_replicas == 0
    assert world.condition("Ready") == ("True", "Asleep")


def test_a_number_set_by_hand_wakes_it_for_good() -> None:
    world = settle(with_spec(asleep(), replicas=2))
    assert world.engine.desired_replicas == 2
    assert sleep_of(world).state is None
    world = settle(with_spec(world, replicas=None))
    assert world.engine.desired_replicas >= 1


def test_without_the_field_it_runs_again() -> None:
    world = settle(with_spec(asleep(), scaling=None))
    assert world.engine.desired_replicas == 1
    assert world.status["sleep"].keys() == {"number", "since"}


@pytest.mark.parametrize("why", [OPEN_ACCESS, NO_GATEWAY])
def test_it_stays_awake_where_no_gateway_would_wake_it(why: str) -> None:
    world = awake(access="Open") if why == OPEN_ACCESS else awake()
    if why == NO_GATEWAY:
        world = replace(world, context=replace(world.context, grant_keys=""))
    world = settle(idle(step(world, 120.0)))
    assert world.engine.desired_replicas == 1
    assert world.status["sleep"]["message"] == why


def test_a_gateway_that_cannot_hold_puts_nothing_to_sleep_and_wakes_nothing() -> None:
    world = idle(step(replace(awake(), wake=Wake()), 120.0))
    assert sleep_of(settle(world)).state is None
    world = replace(asleep(), wake=Wake())
    assert plan_of(world).is_empty


def test_it_stays_awake_for_the_least_time() -> None:
    world = idle(awake(scaling={"sleep": {"minAwakeSeconds": 3600}}))
    plan = plan_of(world)
    assert plan.status is None
    assert plan.requeue_after_s is not None
    assert 0 < plan.requeue_after_s <= 3600


def test_a_service_that_starts_does_not_go_to_sleep() -> None:
    world = new_world(**SLEEPS)
    context = replace(default_context(), grant_keys=KEYS)
    world = live(idle(replace(world, context=context, wake=Wake(can_wake=True))), 3.0, 1.0)
    assert not world.ready
    assert sleep_of(world).state is None


# -- for another service --------------------------------------------------------------------------

FOR = "team-b/wakes"


def asked(world: World, sleeps_for: str = FOR) -> World:
    """Return the world with pods that were idle for a short time, whose accelerators another service needs."""
    return replace(world, idle=Idle(is_idle=True, read_at=world.now, sleeps_for=sleeps_for))


@pytest.mark.parametrize(
    ("needy", "text"),
    [("own", "service wakes needed"), ("other", "a service of another namespace needed")],
)
def test_it_sleeps_for_another_service_within_its_least_time_and_says_so(
    needy: str, text: str
) -> None:
    """In the same two steps; the text is the one of both, and of the event. It names no foreign service."""
    world = awake(scaling={"sleep": {"minAwakeSeconds": 3600}})
    namespace = world.resource["metadata"]["namespace"] if needy == "own" else "team-b"
    world = asked(world, f"{namespace}/wakes")
    plan = plan_of(world)
    assert plan.actions == ()
    assert plan.status is not None
    assert plan.status["sleep"]["state"] == "GoingToSleep"
    assert text in plan.status["sleep"]["message"]
    world = step(act(world, plan), SETTLED_S)
    assert plan_of(world).status is None, "pods that were read before prove nothing"
    plan = plan_of(idle(world))  # the other service needs to ask no longer
    assert plan.status is not None
    assert plan.status["sleep"]["state"] == "Asleep"
    assert [event.message for event in plan.events if event.reason == "Asleep"] == [
        plan.status["sleep"]["message"]
    ]
    world = settle(idle(act(world, plan)))
    assert world.condition("Ready") == ("True", "Asleep")
    assert text in sleep_of(world).message
    assert plan_of(replace(world, idle=NOT_IDLE)).is_empty
    world = settle(marked(replace(world, idle=NOT_IDLE)))
    assert sleep_of(world).state is None
    assert sleep_of(world).message == ""


@pytest.mark.parametrize("cause", ["mark", "request"])
def test_a_request_keeps_it_awake_whoever_needs_its_accelerators(cause: str) -> None:
    world = asked(awake())
    world = asked(step(act(world, plan_of(world)), SETTLED_S))
    world = marked(world) if cause == "mark" else replace(world, idle=NOT_IDLE)
    world = act(world, plan_of(world))
    assert sleep_of(world).state is None
    assert sleep_of(world).message == ""
    assert world.engine.desired_replicas == 1
    early = replace(asked(world), idle=replace(asked(world).idle, read_at=world.now - 1.0))
    assert plan_of(early).status is None, "that was read before the request"


@pytest.mark.parametrize("begins", ["asleep", "waking"])
def test_a_crash_between_any_two_writes_ends_the_same(begins: str) -> None:
    """Children are written and the status is not: the next reconcile continues."""
    world = step(going(), SETTLED_S) if begins == "asleep" else marked(asleep())
    world = idle(world) if begins == "asleep" else world
    for _ in range(5):
        plan = plan_of(world)
        world = act(world, replace(plan, status=None) if plan.actions else plan)
    world = settle(replace(world, status_written=None))
    expected = (0, 0) if begins == "asleep" else (1, 2)
    assert replicas(world) == expected


def test_a_template_changed_asleep_runs_at_the_next_wake() -> None:
    world = asleep()
    good = world.status["lastGood"]["templateHash"]
    world = settle(with_spec(world, model={"source": "pvc://models/other"}))
    assert world.engine.desired_replicas == 0
    assert world.condition("Ready") == ("True", "Asleep")
    assert world.engine.template_hash != good
    assert world.status["lastGood"]["templateHash"] == good
    world = settle(marked(world))
    assert world.status["lastGood"]["templateHash"] == world.engine.template_hash


def test_a_template_changed_asleep_is_good_after_a_minute_of_a_ready_pod() -> None:
    world = asleep()
    good = world.status["lastGood"]["templateHash"]
    world = settle(with_spec(world, model={"source": "pvc://models/other"}))
    world = live(replace(marked(world), now=world.now + 3600), 15.0)
    since = min(pod.ready_since or 0.0 for pod in world.pods)
    changed = with_spec(world, model={"source": "pvc://models/third"})
    early = replace(changed, now=since + GOOD_AFTER_S - 10)
    assert act(early, plan_of(early)).status["lastGood"]["templateHash"] == good
    late = replace(changed, now=since + GOOD_AFTER_S + 10)
    assert act(late, plan_of(late)).status["lastGood"]["templateHash"] != good


def test_an_hour_of_sleep_proves_no_template() -> None:
    """Its pods were ready for less than a minute, and Ready is True while it sleeps."""
    world = live(idle(new(scaling={"sleep": {"minAwakeSeconds": 0}})), 20.0)
    assert world.ready == 1
    world = replace(world, status_written=None)
    for _ in range(3):
        world = idle(replace(world, now=world.now + SETTLED_S + 1))
        world = act(world, plan_of(world))
    world = settle(replace(idle(world), now=world.now + 3600))
    assert sleep_of(world).state is SleepState.ASLEEP
    assert "lastGood" not in world.status


def test_what_proves_the_template_is_remembered_before_the_pods_go() -> None:
    world = step(live(new(scaling={"sleep": {"minAwakeSeconds": 0}}), 20.0), 120.0)
    assert "lastGood" not in world.status
    plan = plan_of(idle(world))
    assert plan.status is not None
    assert plan.status["sleep"]["state"] == "GoingToSleep"
    assert plan.status["lastGood"]["templateHash"] == world.engine.template_hash


def test_a_service_that_never_sleeps_has_no_such_status() -> None:
    world = settle(new_world())
    assert "sleep" not in world.status


@pytest.mark.parametrize(
    "text",
    ["", "7", "7.", ".batch", "7.urgent", "-1.batch", "0.batch", "7.batch ", "\u0667.batch", "9" * 40 + ".batch", "1e3.batch", None, 7, ["7.batch"]],
)  # fmt: skip
def test_what_is_no_mark_is_none(text: object) -> None:
    assert parse_mark(text) is None


@pytest.mark.parametrize("tier", Tier)
def test_a_mark_survives_its_text(tier: Tier) -> None:
    assert parse_mark(format_mark(WakeMark(7, tier))) == WakeMark(7, tier)


def test_the_ninetieth_percentile_is_one_of_the_starts() -> None:
    assert start_p90_s(()) is None
    assert start_p90_s((20, 40, 30)) == 40
    assert start_p90_s(range(1, 11)) == 9


@pytest.mark.parametrize(
    "sleep",
    [None, 3, "Asleep", {"state": "Dreaming"}, {"state": []}, {"number": -4, "state": 7, "since": "noon", "startSeconds": ["x"]}],
)  # fmt: skip
def test_a_status_that_cannot_be_read_counts_as_awake(sleep: object) -> None:
    found = parse_sleep({"sleep": sleep})
    assert found.state is None
    assert found.number == 0

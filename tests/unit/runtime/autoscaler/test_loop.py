"""The control loop carries decisions between the caches, the source of samples and the engines.

Source and engines are doubles here, at the network's edge; both run for real in the e2e tests.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from prometheus_client import generate_latest

from fleetkeeper.autoscale.arbitrate import Lack
from fleetkeeper.autoscale.signals.samples import Gauges, PodSample
from fleetkeeper.autoscale.tick import decide_service
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.types import Container, Kind, Termination, Workload
from fleetkeeper.runtime.queue import Key
from tests.support.autoscale.control_cases import reported_status, sample
from tests.support.autoscale.loop_world import World, send_requests
from tests.support.operators.contained import counted

CUDA_OUT_OF_MEMORY = 72
"""The exit code of the contract, engine_image/schemas/exit-codes.json."""


async def test_every_ready_pod_gets_limits_under_a_lease_at_the_first_tick() -> None:
    """Orders carry the pod's UID and a lease; the next tick has nothing to renew."""
    world = World()
    world.add_service(replicas=2)
    await world.ticks(1)
    assert {request.uid for request in world.puts} == {"uid-chat-0", "uid-chat-1"}
    assert all(request.lease_s > 0 for request in world.puts)
    sent = len(world.puts)
    await world.ticks(1)
    assert len(world.puts) == sent


async def test_the_view_holds_status_and_the_queue_is_told_once() -> None:
    """A look follows a change of the view; an unchanged view queues nothing."""
    world = World()
    key = world.add_service()
    assert world.loop.view(key).control_report is None
    await world.ticks(1)
    status = reported_status(world.loop.view(key).control_report)
    assert {"scaling", "batching", "breaker", "memory", "conditions"} <= status.keys()
    assert await world.drained() == {key}
    await world.ticks(12)
    await world.drained()
    settled = reported_status(world.loop.view(key).control_report)
    await world.ticks(6)
    assert reported_status(world.loop.view(key).control_report) == settled
    assert await world.drained() == set()


async def test_overload_with_a_full_batch_orders_a_replica() -> None:
    """Queue wait far above its objective, nothing left to raise: the allocation goes up, with its reason."""
    world = World()
    key = world.add_service(
        replicas=1, batching={"minSequences": 32, "maxSequences": 32, "mode": "Fixed"}
    )
    late = {"wait_sum_s_standard": 16.0, "wait_within_standard": 0.0}
    await world.ticks(24, **late)
    allocation = world.loop.view(key).allocation
    assert allocation is not None
    assert allocation.replicas > 1
    assert "queue wait" in allocation.message.lower()
    assert not [event for _, event in world.events if "Replicas" in event.message]


async def test_a_lost_source_holds_and_never_lowers() -> None:
    """Nothing measured for ten minutes: no allocation below what runs, and the breaker says why."""
    world = World()
    key = world.add_service(replicas=3)
    await world.ticks(10)
    world.samples.clear()
    world.lost = frozenset({key})
    for _ in range(120):
        world.samples.clear()
        await world.loop.tick()
        await send_requests(world.loop)
        world.clock += 5.0
        allocation = world.loop.view(key).allocation
        assert allocation is None or allocation.replicas >= 3
    status = reported_status(world.loop.view(key).control_report)
    assert status["breaker"]["control"] != "Closed"
    rows = {row["type"]: row["status"] for row in status["conditions"]}
    assert rows["MetricsAvailable"] == "False"


async def test_a_budget_is_shared_by_all_services() -> None:
    """Two services want more than the namespace may have: together they get no more than that."""
    base = default_context()
    world = World(context=replace(base, max_accelerators_by_namespace=MappingProxyType({"*": 4})))
    fixed = {"minSequences": 32, "maxSequences": 32, "mode": "Fixed"}
    keys = [world.add_service(name, replicas=1, batching=fixed) for name in ("chat", "code")]
    await world.ticks(24, wait_sum_s_standard=16.0, wait_within_standard=0.0)
    allocations = [world.loop.view(key).allocation for key in keys]
    allocated = [allocation.replicas for allocation in allocations if allocation is not None]
    assert len(allocated) == 2
    assert sum(allocated) <= 4
    assert max(allocated) > 1


async def test_a_service_learns_in_its_next_tick_that_its_reserve_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The arbitration of one tick reaches the decision of the next."""
    world = World(context=replace(default_context(), max_accelerators=4))
    world.add_service("keeps", replicas=3)
    fixed = {"minSequences": 32, "maxSequences": 32, "mode": "Fixed"}
    world.add_service("lacks", replicas=1, batching=fixed)
    asked: dict[str, list[tuple[bool, bool]]] = {"keeps": [], "lacks": []}

    def decides(inputs: Any, memory: Any, now: float) -> Any:
        last = memory.allocation
        asked[inputs.name].append(
            (last is not None and last.releases, bool(last and last.confirms))
        )
        decision, memory = decide_service(inputs, memory, now)
        role = {"kept": 1} if inputs.name == "keeps" else {"lacks": Lack.CONFIRMED}
        return replace(decision, want=replace(decision.want, **role)), memory

    monkeypatch.setattr("fleetkeeper.runtime.autoscaler.loop.decide_service", decides)
    await world.ticks(24, wait_sum_s_standard=16.0, wait_within_standard=0.0)
    assert (True, False) in asked["keeps"], asked
    assert (False, True) in asked["lacks"], asked


@pytest.mark.slow
async def test_a_service_whose_decision_fails_keeps_its_accelerators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tick of one fails: the others are not given what it runs on."""
    world = World(context=replace(default_context(), max_accelerators=4))
    fixed = {"minSequences": 32, "maxSequences": 32, "mode": "Fixed"}
    broken = world.add_service("broken", replicas=3)
    key = world.add_service("chat", replicas=1, batching=fixed)

    def fails(inputs: Any, memory: Any, now: float) -> Any:
        if inputs.name == "broken":
            raise ValueError("a defect")
        return decide_service(inputs, memory, now)

    monkeypatch.setattr("fleetkeeper.runtime.autoscaler.loop.decide_service", fails)
    await world.ticks(24, wait_sum_s_standard=16.0, wait_within_standard=0.0)
    assert world.loop.view(broken).allocation is None
    allocation = world.loop.view(key).allocation
    assert allocation is None or allocation.replicas == 1
    status = reported_status(world.loop.view(key).control_report)
    rows = {row["type"]: row["reason"] for row in status["conditions"]}
    assert rows["ScalingLimited"] == "GPUBudget"


async def test_refused_limits_open_the_control_breaker() -> None:
    """Engines that take no limits requests: the breaker opens within minutes and says so."""
    world = World(refuses=True)
    key = world.add_service()
    await world.ticks(60)
    status = reported_status(world.loop.view(key).control_report)
    assert status["breaker"]["control"] == "Open"


async def test_refused_writes_of_replicas_count_for_the_breaker() -> None:
    """The API server refuses the Deployment three times: the same breaker opens."""
    world = World()
    key = world.add_service()
    await world.ticks(3)
    for _ in range(3):
        world.loop.refused_replicas(key)
        await world.ticks(1)
    status = reported_status(world.loop.view(key).control_report)
    assert status["breaker"]["control"] == "Open"


@pytest.mark.parametrize("confirms", [True, False])
async def test_a_hung_engine_is_replaced_alone_by_its_uid_and_told_once_it_went(
    confirms: bool,
) -> None:
    """It says so for long: that pod goes, the other stays. One that was kept is no news."""
    world = World(confirms=confirms)
    key = world.add_service(replicas=2)
    await world.ticks(6)
    stuck = sample(world.clock, "chat-0").counters
    waiting = Gauges(
        waiting_standard=8.0, running=4.0, limit_sequences=32.0, limit_tokens=1024.0, hung=1.0
    )
    for _ in range(15):
        world.samples[key] = (
            PodSample("chat-0", world.clock, stuck, waiting),
            sample(world.clock, "chat-1"),
        )
        await world.loop.tick()
        await send_requests(world.loop)
        world.clock += 5.0
    assert world.replaced == [(key, "chat-0", "uid-chat-0")]
    told = [event.message for _, event in world.events if event.reason == "EngineHung"]
    assert len(told) == (1 if confirms else 0)


FRAGMENTED = Gauges(
    running=4.0,
    limit_sequences=32.0,
    limit_tokens=1024.0,
    kv_capacity_tokens=400_000.0,
    memory_fragmentation_ratio=0.45,
)


def fragmented_world(status: Any = None) -> tuple[World, Key]:
    """Three calm replicas of a service that asks for restarts."""
    world = World()
    spec: dict[str, Any] = {
        "memory": {"restartFragmented": True},
        "scaling": {"minReplicas": 3, "maxReplicas": 3},
        "batching": {"mode": "Fixed"},
    }
    key = world.add_service(replicas=3, **spec)
    world.put_service(status={"observedGeneration": 1} if status is None else status, **spec)
    world.loop = world.new_leader()
    return world, key


@pytest.mark.slow
async def test_a_fragmented_replica_is_replaced_alone_by_its_uid_and_told_once() -> None:
    """Through the dispatcher, an hour after the leader's start; then its successor has an hour."""
    world, key = fragmented_world()
    await world.ticks(700, gauges=FRAGMENTED)
    assert world.replaced == []
    await world.ticks(60, gauges=FRAGMENTED)
    assert world.replaced == [(key, "chat-0", "uid-chat-0")]
    told = [event for _, event in world.events if event.reason == "EngineFragmented"]
    assert len(told) == 1
    assert told[0].type == "Normal"
    assert "chat-0 is drained" in told[0].message
    assert "45.0%" in told[0].message
    status = reported_status(world.loop.view(key).control_report)
    assert [row["to"] for row in status["decisions"] if row["what"] == "restart"] == ["chat-0"]
    await world.ticks(600, gauges=FRAGMENTED)
    assert len(world.replaced) == 1


@pytest.mark.parametrize("trouble", ["pod", "generation", "unseen"])
async def test_no_replica_is_restarted_during_a_roll_out(trouble: str) -> None:
    """A pod of another template, a Deployment not taken up, or a spec that nobody looked at yet."""
    world, _ = fragmented_world({} if trouble == "unseen" else None)
    if trouble == "pod":
        world.put_pod("chat", "chat-2", template_hash="t0")
    elif trouble == "generation":
        engine = Workload(
            Kind.DEPLOYMENT, "chat", "d-chat", "1", "digest",
            desired_replicas=3, template_hash="t1", generation=2, observed_generation=1,
        )  # fmt: skip
        world._put("Deployment", engine, "chat")
    await world.ticks(800, gauges=FRAGMENTED)
    assert world.replaced == []


async def test_out_of_accelerator_memory_lowers_the_start_up_sequences() -> None:
    """One remedy step, shown in the status, from which the planner builds the next template."""
    world = World()
    key = world.add_service(replicas=1)
    await world.ticks(2)
    line = json.dumps({"class": "CUDAOutOfMemory", "code": CUDA_OUT_OF_MEMORY, "message": "full"})
    ended = Termination(CUDA_OUT_OF_MEMORY, "Error", line, finished=world.clock)
    engine = Container("engine", ready=False, restarts=2, last_terminated=ended)
    world.put_pod("chat", "chat-0", ready=False, ready_since=None, containers=(engine,))
    await world.ticks(2)
    status = reported_status(world.loop.view(key).control_report)
    assert status["remedy"]["reason"] == "CUDAOutOfMemory"
    assert status["remedy"]["maxSequences"] == 128


async def test_a_new_leader_begins_with_what_the_status_says_and_lowers_nothing() -> None:
    """After a restart: limits from the status, and no scale-down inside one delay."""
    world = World()
    key = world.add_service(replicas=4)
    await world.ticks(10)
    status = reported_status(world.loop.view(key).control_report)
    world.put_service(status={**(status or {}), "observedGeneration": 1})
    world.loop = world.new_leader()
    await world.ticks(60, wait_count_standard=0.0, arrivals_standard=0.0)
    allocation = world.loop.view(key).allocation
    assert allocation is None or allocation.replicas >= 4


@pytest.mark.slow
async def test_one_failing_decision_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A defect met by one service leaves it as it was; the others are decided, and it is counted."""
    world = World()
    bad, good = world.add_service("bad"), world.add_service("good")
    real = decide_service

    def decide(inputs: Any, memory: Any, now: float) -> Any:
        if inputs.name == "bad":
            raise ValueError("a defect")
        return real(inputs, memory, now)

    monkeypatch.setattr("fleetkeeper.runtime.autoscaler.loop.decide_service", decide)
    await world.ticks(2)
    assert world.loop.view(bad).control_report is None
    assert world.loop.view(good).control_report is not None
    assert counted(world.operator_metrics) == {"decide": 2.0}


async def test_a_service_that_is_gone_leaves_nothing_behind() -> None:
    """Neither its view nor its series."""
    world = World()
    key = world.add_service()
    await world.ticks(2)
    assert 'inference_service="chat"' in generate_latest(world.registry).decode()
    world.cache.drop_service(key)
    world.loop.forget(key)
    assert world.loop.view(key).control_report is None
    assert 'inference_service="chat"' not in generate_latest(world.registry).decode()


async def test_services_that_are_invalid_or_without_a_deployment_are_left_alone() -> None:
    """Nothing to measure, nothing to order, nothing asked."""
    world = World()
    world.put_service("new")
    world.add_service("broken", scaling={"minReplicas": 9, "maxReplicas": 2})
    await world.loop.tick()
    assert world.asked == []
    assert world.puts == []


async def test_services_of_a_namespace_that_cannot_be_read_are_left_as_they_are() -> None:
    """Nothing is measured and no limits are renewed, until it can be read again."""
    world = World()
    key = world.add_service(replicas=1)
    await world.ticks(2)
    view, asked = world.loop.view(key), len(world.asked)
    world.puts.clear()
    world.cache.hold("team-a")
    await world.ticks(30)
    assert (world.puts, len(world.asked), world.loop.view(key)) == ([], asked, view)
    world.cache.resume("team-a")
    await world.ticks(2)
    assert {request.uid for request in world.puts} == {"uid-chat-0"}

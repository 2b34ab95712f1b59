"""The control loop carries decisions between the caches, the source of samples and the engines.

Source and engines are doubles here, at the network's edge; both run for real in the e2e tests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pytest
from prometheus_client import generate_latest

from fleetkeeper.adapters.kubernetes.records import Seen
from fleetkeeper.autoscale.rules.removal import Removal
from fleetkeeper.autoscale.signals.samples import Gauges, PodSample
from fleetkeeper.autoscale.tick import decide_service
from fleetkeeper.autoscale.types import LimitsRequest, PodView, PutOutcome
from fleetkeeper.common.values import Event
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.types import Container, Kind, Pod, Termination, Workload
from fleetkeeper.runtime.autoscaler.loop import ControlLoop, Readings, Target
from fleetkeeper.runtime.autoscaler.metrics import ControlMetrics
from fleetkeeper.runtime.metrics import OperatorMetrics
from fleetkeeper.runtime.queue import Key, KeyedQueue
from fleetkeeper.runtime.state.cache import Cache
from tests.support.contained import counted, new_defects
from tests.support.control_cases import reported_status, sample

START = 1_000_000.0
CUDA_OUT_OF_MEMORY = 72
"""The exit code of the contract, engine_image/contract/exit-codes.json."""
SPEC: dict[str, Any] = {
    "model": {"source": "pvc://models/llama"},
    "engine": {"profile": "cuda"},
    "resources": {"accelerator": {"resource": "nvidia.com/gpu", "count": 1}},
    "scaling": {"minReplicas": 1, "maxReplicas": 8},
}


@dataclass
class World:
    """A cache with services, a clock that tests move, and what the loop asked the doubles."""

    clock: float = START
    samples: dict[Key, tuple[PodSample, ...]] = field(default_factory=dict)
    lost: frozenset[Key] = frozenset()
    asked: list[Sequence[Target]] = field(default_factory=list)
    puts: list[LimitsRequest] = field(default_factory=list)
    refuses: bool = False
    confirms: bool = True
    replaced: list[tuple[Key, str, str]] = field(default_factory=list)
    events: list[tuple[Key, Event]] = field(default_factory=list)
    operator_metrics: OperatorMetrics = field(default_factory=OperatorMetrics)
    context: Any = field(default_factory=default_context)

    def __post_init__(self) -> None:
        self.queue = KeyedQueue(monotonic=lambda: self.clock, jitter=lambda s: s)
        self.cache = Cache(now=lambda: self.clock, changed=lambda _key: None)
        self.registry = self.operator_metrics.registry
        self.metrics = ControlMetrics(self.registry)
        self.defects = new_defects(self.operator_metrics, monotonic=lambda: self.clock)
        self.version = 10
        self.loop = self.new_leader()

    def new_leader(self) -> ControlLoop:
        """A loop that knows nothing but the cache, as after a restart."""
        return ControlLoop(
            cache=self.cache,
            queue=self.queue,
            context=self.context,
            source=self,
            engines=self,
            replace_pod=self._replace,
            post_event=self._event,
            post_fleet_event=self._fleet_event,
            metrics=self.metrics,
            defects=self.defects,
            now=lambda: self.clock,
            monotonic=lambda: self.clock,
        )

    async def observe(self, targets: Sequence[Target], now: float) -> Readings:
        """The source."""
        del now
        self.asked.append(targets)
        return Readings(dict(self.samples), self.lost)

    async def put_limits(self, requests: Sequence[LimitsRequest]) -> Sequence[PutOutcome]:
        """The engines."""
        self.puts += requests
        return [PutOutcome(o.pod, o.generation, not self.refuses) for o in requests]

    async def _replace(self, key: Key, pod: PodView, removal: Removal) -> bool:
        assert removal.why
        self.replaced.append((key, pod.name, pod.uid))
        return self.confirms

    async def _event(self, key: Key, event: Event) -> None:
        self.events.append((key, event))

    async def _fleet_event(self, event: Event) -> None:
        raise AssertionError(event)

    def add_service(self, name: str = "chat", *, replicas: int = 2, **spec: Any) -> Key:
        """A service with its Deployment and that many ready pods, an hour old."""
        key = Key("team-a", name)
        self.put_service(name, **spec)
        engine = Workload(
            Kind.DEPLOYMENT,
            name,
            f"d-{name}",
            "1",
            "digest",
            desired_replicas=replicas,
            template_hash="t1",
            accelerators=1,
        )
        self._put("Deployment", engine, name)
        for number in range(replicas):
            self.put_pod(name, f"{name}-{number}")
        return key

    def put_service(self, name: str = "chat", status: Any = None, **spec: Any) -> None:
        """The resource, with a new resourceVersion."""
        self.version += 1
        self.cache.put_service(
            {
                "apiVersion": "fleetkeeper.io/v1alpha1",
                "kind": "InferenceService",
                "metadata": {
                    "namespace": "team-a",
                    "name": name,
                    "uid": f"u-{name}",
                    "generation": 1,
                    "resourceVersion": str(self.version),
                },
                "spec": {**SPEC, **spec},
                "status": status or {},
            }
        )

    def put_pod(self, service: str, name: str, **fields: Any) -> None:
        """An engine pod, ready for an hour unless told otherwise."""
        pod = Pod(
            name=name,
            uid=f"uid-{name}",
            service=service,
            component="engine",
            revision_uid="r1",
            template_hash="t1",
            created=self.clock - 3700.0,
            phase="Running",
            ip="127.0.0.1",
            ready=True,
            ready_since=self.clock - 3600.0,
            scheduled=True,
            accelerators=1,
        )
        self._put("Pod", replace(pod, **fields), service)

    def _put(self, kind: str, record: Any, service: str) -> None:
        self.version += 1
        self.cache.put(Seen(kind, "team-a", record.name, self.version, service, record))

    async def ticks(self, count: int, **per_second: Any) -> None:
        """Ticks of 5 s with fresh samples of all ready pods of all services."""
        for _ in range(count):
            for key in self.cache.services():
                self.samples[key] = tuple(
                    sample(self.clock, pod.name, **per_second)
                    for pod in self.cache.pods(key)
                    if pod.ready
                )
            await self.loop.tick()
            await self.loop.outbox.drain()
            self.clock += 5.0

    async def drained(self) -> set[Key]:
        """The keys in the queue, taken out."""
        found = set()
        while len(self.queue):
            key = await self.queue.get()
            assert key is not None
            found.add(key)
            self.queue.done(key)
        return found


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
        await world.loop.outbox.drain()
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
        await world.loop.outbox.drain()
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
    """Through the outbox, an hour after the leader's start; then its successor has an hour."""
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

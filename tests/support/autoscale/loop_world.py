"""A control loop whose source and engines are doubles, at the network's edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleetkeeper.adapters.kubernetes.records import Seen
from fleetkeeper.autoscale.rules.removal import Removal
from fleetkeeper.autoscale.signals.samples import PodSample
from fleetkeeper.autoscale.types import LimitsRequest, PodView, PutOutcome
from fleetkeeper.common.values import Event
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.types import Kind, Pod, Workload
from fleetkeeper.runtime.autoscaler.loop import ControlLoop
from fleetkeeper.runtime.autoscaler.metrics import ControlMetrics
from fleetkeeper.runtime.autoscaler.readings import Readings, Target
from fleetkeeper.runtime.queue import Key, KeyedQueue
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.gpu_ledger import GpuLedger
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from tests.support.autoscale.control_cases import sample
from tests.support.operators.contained import new_defects

START = 1_000_000.0
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
            recorder=self,
            metrics=self.metrics,
            defects=self.defects,
            now=lambda: self.clock,
            monotonic=lambda: self.clock,
            ledger=GpuLedger(self.cache, self.context.gpu_budget),
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

    def record(self, key: Key, event: Event) -> None:
        """The recorder of events."""
        self.events.append((key, event))

    def record_fleet(self, event: Event) -> None:
        """Never called here."""
        raise AssertionError(event)

    def add_service(self, name: str = "chat", *, replicas: int = 2, **spec: Any) -> Key:
        """A service with its Deployment and that many ready pods, an hour old."""
        key = Key("team-a", name)
        self.put_service(name, **spec)
        self.set_replicas(name, replicas)
        for number in range(replicas):
            self.put_pod(name, f"{name}-{number}")
        return key

    def set_replicas(self, name: str, replicas: int) -> None:
        """The engine Deployment with this number."""
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
        """Ticks of 5 s with fresh samples of all ready pods; their engines have read the newest limits."""
        for _ in range(count):
            for key in self.cache.services():
                self.samples[key] = tuple(
                    self._sample(pod.name, per_second) for pod in self.cache.pods(key) if pod.ready
                )
            await self.loop.tick()
            await send_requests(self.loop)
            self.clock += 5.0

    def _sample(self, pod: str, per_second: Mapping[str, Any]) -> PodSample:
        row = sample(self.clock, pod, **per_second)
        taken = [put.generation for put in self.puts if put.pod == pod and not self.refuses]
        newest = max(taken, default=0)
        return replace(row, gauges=row.gauges._replace(limit_generation=float(newest)))

    async def drained(self) -> set[Key]:
        """The keys in the queue, taken out."""
        found = set()
        while len(self.queue):
            key = await self.queue.get()
            assert key is not None
            found.add(key)
            self.queue.done(key)
        return found


async def send_requests(loop: ControlLoop) -> None:
    """Carries out what the last tick asks of pods, as the loop's workers do."""
    for lane in loop.dispatcher.lanes:
        await lane.finish()

"""Several services in one operator without a cluster: the real cache, controller and control loop.

The API server, the engines and the source of samples are doubles at the network's edge.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from fleetkeeper.adapters.kubernetes.records import Seen
from fleetkeeper.autoscale.types import LimitsRequest, PutOutcome
from fleetkeeper.common.values import Event
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.types import Kind, Pod
from fleetkeeper.runtime.autoscaler.loop import ControlLoop
from fleetkeeper.runtime.autoscaler.metrics import ControlMetrics
from fleetkeeper.runtime.autoscaler.pod_replacement import PodReplacer
from fleetkeeper.runtime.autoscaler.readings import Readings, Target
from fleetkeeper.runtime.event_recorder import EventRecorder
from fleetkeeper.runtime.namespaces import NamespaceReads
from fleetkeeper.runtime.queue import Key, KeyedQueue
from fleetkeeper.runtime.reconciler.controller import Controller
from fleetkeeper.runtime.reconciler.executor import Executor
from fleetkeeper.runtime.reconciler.live_services import LiveServices
from fleetkeeper.runtime.resync import Resync
from fleetkeeper.runtime.service_feed import ServiceFeed
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.gpu_ledger import GpuLedger
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper_kube.resource import Resource
from tests.support.autoscale.control_cases import sample
from tests.support.autoscale.loop_world import send_requests
from tests.support.operators.contained import new_defects
from tests.support.operators.queue_steps import handed_out

Live = dict[str, Any]
NAMESPACE = "team-a"
SPEC: Live = {
    "model": {"source": "pvc://models/llama"},
    "engine": {"profile": "cuda"},
    "resources": {"accelerator": {"resource": "nvidia.com/gpu", "count": 1}},
    "routing": {"policy": "None"},
}


class Server:
    """The API server: takes every write. `services` holds what it would answer."""

    def __init__(self) -> None:
        self.version = 10
        self.services: dict[str, Live] = {}
        self.status_writes: list[str] = []
        self.events: list[tuple[str, str]] = []

    def stamped(self, live: Live) -> Live:
        """The object with the next resourceVersion."""
        self.version += 1
        meta = {**live["metadata"], "resourceVersion": str(self.version)}
        meta.setdefault("uid", f"{live.get('kind')}-{meta['name']}")
        return {**live, "metadata": meta}

    async def read(self, resource: Resource, namespace: str, name: str) -> Live | None:
        del namespace
        return self.services.get(name) if resource.kind == "InferenceService" else None

    async def list_pages(self, *_: Any, **__: Any) -> AsyncIterator[Live]:
        yield {
            "metadata": {"resourceVersion": str(self.version)},
            "items": list(self.services.values()),
        }

    async def apply_child(self, _: Resource, manifest: Live, **__: Any) -> Live:
        return self.stamped(manifest)

    async def create_child(self, _: Resource, manifest: Live) -> Live:
        return self.stamped(manifest)

    async def apply_status(self, namespace: str, name: str, status: Live, **_: str) -> Live:
        del namespace
        self.status_writes.append(name)
        self.services[name] = self.stamped({**self.services[name], "status": status})
        return self.services[name]

    async def delete(self, *_: Any, **__: Any) -> bool:
        return True

    async def mark_pod(self, namespace: str, name: str, uid: str, cost: int) -> Live:
        del uid, cost
        return self.stamped({"metadata": {"name": name, "namespace": namespace}})

    async def post_event(self, namespace: str, manifest: Live) -> None:
        del namespace
        self.events.append((manifest["involvedObject"]["name"], manifest["reason"]))


class Operator:
    """One operator that leads over the services `names`, each with one ready pod."""

    def __init__(self, *names: str) -> None:
        self.clock = 1_000_000.0
        self.server = Server()
        self.sent: list[LimitsRequest] = []
        self.load = 0.0
        self.metrics = OperatorMetrics()
        self.queue = KeyedQueue(monotonic=self.now, jitter=lambda s: s)
        self.cache = Cache(now=self.now, changed=self.queue.add)
        self.defects = new_defects(self.metrics, monotonic=self.now, changed=self.queue.add)
        self._build()
        self.keys = [self._add(name) for name in names]

    def now(self) -> float:
        """The clock that tests move."""
        return self.clock

    def _build(self) -> None:
        server: Any = self.server
        context = default_context()
        ledger = GpuLedger(self.cache, context.gpu_budget)
        self.recorder = EventRecorder(
            server,
            self.cache,
            self.metrics,
            now=self.now,
            instance="pod-1",
            defects=self.defects,
            lease=Key("fleet", "fleetkeeper"),
        )
        self.loop = ControlLoop(
            cache=self.cache,
            queue=self.queue,
            context=context,
            ledger=ledger,
            source=self,
            engines=self,
            replace_pod=PodReplacer(
                server,
                self.cache,
                self.metrics,
                is_unchanged=LiveServices(server, self.cache).is_unchanged,
                read_pod=None,
            ).replace,
            recorder=self.recorder,
            metrics=ControlMetrics(self.metrics.registry),
            defects=self.defects,
            now=self.now,
            monotonic=self.now,
        )
        self.controller = Controller(
            queue=self.queue,
            cache=self.cache,
            client=server,
            executor=Executor(
                server, server, self.cache, self.metrics, now=self.now, recorder=self.recorder
            ),
            metrics=self.metrics,
            defects=self.defects,
            context=context,
            ledger=ledger,
            now=self.now,
            monotonic=self.now,
            control=self.loop,
        )
        self.controller.settled_since = self.clock - 3600.0
        self.feed = ServiceFeed(self.cache, self.defects, lambda: None)
        self.resync = Resync(
            server,
            self.cache,
            self.queue,
            self.metrics,
            self,  # type: ignore[arg-type]
            defects=self.defects,
            namespaces=(None,),
            reads=NamespaceReads((), self.cache, self.metrics, recovered=lambda: None),
            period_s=300.0,
            page_size=100,
            also=self._nothing,
        )

    async def _nothing(self) -> None:
        """What else a resync does."""

    monotonic = now

    def _add(self, name: str) -> Key:
        live = {
            "apiVersion": "fleetkeeper.io/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"namespace": NAMESPACE, "name": name, "generation": 1},
            "spec": SPEC,
        }
        self.server.services[name] = self.server.stamped(live)
        return Key(NAMESPACE, name)

    def put_pod(self, name: str) -> None:
        """An engine pod of a service, ready for an hour, of the Deployment's template."""
        engine: Any = self.cache.children(Key(NAMESPACE, name))[Kind.DEPLOYMENT, name]
        pod = Pod(
            name=f"{name}-0",
            uid=f"uid-{name}-0",
            service=name,
            component="engine",
            revision_uid="r1",
            template_hash=engine.template_hash,
            created=self.clock - 3700.0,
            phase="Running",
            ip="127.0.0.1",
            ready=True,
            ready_since=self.clock - 3600.0,
            scheduled=True,
        )
        self.server.version += 1
        self.cache.put(Seen("Pod", NAMESPACE, pod.name, self.server.version, name, pod))

    async def observe(self, targets: Sequence[Target], now: float) -> Readings:
        """The source: a fresh sample of every pod, with another load each time."""
        self.load += 1.0
        found = {}
        for target in targets:
            rows = [sample(now, pod.name) for pod in target.pods]
            found[target.key] = tuple(
                replace(row, gauges=row.gauges._replace(running=self.load)) for row in rows
            )
        return Readings(found)

    async def put_limits(self, requests: Sequence[LimitsRequest]) -> Sequence[PutOutcome]:
        """The engines."""
        self.sent += requests
        return [PutOutcome(request.pod, request.generation, True) for request in requests]

    async def round(self) -> None:
        """Every per-service step once: event, resync, tick, orders, events and reconciles."""
        for name, live in self.server.services.items():
            self.server.services[name] = self.server.stamped(live)
            self.feed.changed(self.server.services[name])
        await self.resync.once()
        await self.loop.tick()
        for key in self.keys:
            self.recorder.record(key, Event("Normal", "Tested", "text"))
        await send_requests(self.loop)
        await self.reconcile_queued()
        await self.recorder.drain()
        self.clock += 5.0

    async def reconcile_queued(self) -> None:
        """Reconcile what the queue hands out now."""
        while (key := await handed_out(self.queue)) is not None:
            await self.controller.reconcile(key)
            self.queue.done(key)

    async def started(self) -> Operator:
        """Two rounds make the children; then every service has its pod."""
        for live in self.server.services.values():
            self.feed.changed(live)
        await self.reconcile_queued()
        for key in self.keys:
            self.put_pod(key.name)
        for _ in range(3):
            await self.round()
        return self

    def change(self, name: str, **spec: Any) -> None:
        """A person changes a service's spec."""
        live = self.server.services[name]
        meta = {**live["metadata"], "generation": live["metadata"]["generation"] + 1}
        self.server.services[name] = {**live, "metadata": meta, "spec": {**live["spec"], **spec}}

    def is_served(self, name: str) -> bool:
        """Whether the last round reached the service: its spec was seen, its load was taken."""
        live = self.server.services[name]
        view = self.loop.view(Key(NAMESPACE, name))
        seen = live.get("status", {}).get("observedGeneration") == live["metadata"]["generation"]
        return seen and dict(view.pod_load) == {f"{name}-0": self.load}

    def condition(self, name: str, kind: str) -> tuple[str, str]:
        """Status and reason of a condition, as the API server has it."""
        found = self.server.services[name].get("status", {}).get("conditions", ())
        row: Live = next((item for item in found if item["type"] == kind), {})
        return row.get("status", ""), row.get("reason", "")


@dataclass
class Fault:
    """Raises in a step whenever it is for the service `name`; else the step is as it is."""

    name: str
    error: BaseException
    hits: int = 0

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """The step with the fault. An iterator among the arguments is read first."""

        def step(*args: Any, **kwargs: Any) -> Any:
            given = [
                list(item) if isinstance(item, Iterable) and not _keeps(item) else item
                for item in args
            ]
            if any(_concerns(item, self.name) for item in given):
                self.hits += 1
                raise copy(self.error)
            return real(*given, **kwargs)

        return step


def _keeps(item: object) -> bool:
    return isinstance(item, Mapping | Sequence | str) or not hasattr(item, "__next__")


def _concerns(item: object, name: str) -> bool:
    """Whether an argument of a step is of the service."""
    if isinstance(item, str):
        return False
    if isinstance(item, Mapping):
        meta = item.get("metadata") or {}
        of = (item.get("involvedObject") or {}).get("name") or meta.get("name")
        return bool(of == name)
    if isinstance(item, Sequence):
        return any(_concerns(one, name) for one in item)
    for part in ("resource", "state", "inputs"):
        if hasattr(item, part):
            return _concerns(getattr(item, part), name)
    return name in (getattr(item, "name", None), str(getattr(item, "pod", "")).rpartition("-")[0])

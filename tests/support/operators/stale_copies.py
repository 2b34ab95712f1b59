"""Every kind of write that the operator makes for a service, and an operator without watches to make it.

The operator's cache holds each service as it was when `service` made it: no watch brings what came after.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fleetkeeper.adapters.kubernetes.resources import CHILDREN, DEPLOYMENT, INFERENCE_SERVICE, POD
from fleetkeeper.adapters.kubernetes.writes import KubernetesWriter, Write, WritePoint
from fleetkeeper.api.names import API_VERSION, KIND, LABEL_SERVICE
from fleetkeeper.autoscale.rules.removal import Cause, Removal
from fleetkeeper.autoscale.signals.samples import Gauges, PodSample
from fleetkeeper.autoscale.types import PodView
from fleetkeeper.common.values import Event
from fleetkeeper.reconcile.children import Why
from fleetkeeper.reconcile.plan import Apply, Delete, MarkPod, Plan
from fleetkeeper.reconcile.types import Kind
from fleetkeeper.runtime.autoscaler.pod_replacement import PodReplacer
from fleetkeeper.runtime.event_recorder import EventRecorder
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.reconciler.executor import Executor
from fleetkeeper.runtime.reconciler.live_services import LiveServices
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.resource import Resource
from tests.support.autoscale.control_cases import sample
from tests.support.operators.contained import new_defects
from tests.support.operators.operator_world import World, service

Live = dict[str, Any]
CONFIG_MAP = CHILDREN[Kind.CONFIG_MAP]
FINALIZER = "example.com/hold"
LABELS = {"app": "stale-copies"}
CONTAINER = {"name": "a", "image": "example.invalid/a:1"}


class _Called:
    """The writer; keeps the names of its methods that were called."""

    def __init__(self, writer: KubernetesWriter) -> None:
        self._writer = writer
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self._writer, name)


class StaleOperator:
    """An executor and a replacer of pods, with the operator's rights on a real API server."""

    def __init__(self, world: World, client: KubernetesClient) -> None:
        self.world = world
        self.accepted: list[Write] = []
        """The writes that the API server carried out."""
        self.cache = Cache(now=lambda: 100.0, changed=lambda _: None)
        writer = KubernetesWriter(client, fence=lambda: None, hook=self._hook)
        self.called = _Called(writer)
        called: Any = self.called
        metrics = OperatorMetrics()
        self._recorder = EventRecorder(
            called,
            self.cache,
            metrics,
            now=lambda: 100.0,
            instance="pod-1",
            defects=new_defects(metrics),
            lease=Key(world.namespace, "fleetkeeper"),
        )
        self._executor = Executor(
            client, called, self.cache, metrics, now=lambda: 100.0, recorder=self._recorder
        )
        self._replacer = PodReplacer(
            called,
            self.cache,
            metrics,
            is_unchanged=LiveServices(client, self.cache).is_unchanged,
            read_pod=_fragmented,
        )

    def _hook(self, point: WritePoint, write: Write) -> None:
        if point is WritePoint.ANSWERED:
            self.accepted.append(write)

    async def service(self, name: str, **metadata: Any) -> Live:
        """Create a service and return it as the cache has it from now on."""
        manifest = service(name)
        live = await self.world.create(
            {**manifest, "metadata": {**manifest["metadata"], **metadata}}
        )
        self.cache.put_service(live)
        return live

    async def post(self, resource: Resource, manifest: Live) -> Live:
        """Create another object."""
        path = resource.path(self.world.namespace)
        return await self.world.client.request("POST", path, body=manifest, timeout_s=30)

    async def carry_out(self, live: Live, plan: Plan) -> None:
        """Execute a plan that was made for this copy of the service, and post its events."""
        key = Key(self.world.namespace, live["metadata"]["name"])
        await self._executor.carry_out(key, live, plan, {})
        await self._recorder.drain()

    async def replace(self, live: Live, pod: Live) -> None:
        """Delete a pod as the control loop does."""
        key = Key(self.world.namespace, live["metadata"]["name"])
        view = PodView(pod["metadata"]["name"], pod["metadata"]["uid"], 1.0)
        event = Event("Normal", "EngineFragmented", "why")
        await self._replacer.replace(key, view, Removal(Cause.FRAGMENTED, "why", event))


async def _fragmented(pod: PodView) -> PodSample:
    return sample(100.0, pod.name, gauges=Gauges(memory_fragmentation_ratio=0.4))


Go = Callable[[], Awaitable[None]]
Prepare = Callable[[StaleOperator, Live], Awaitable[Go]]


@dataclass(frozen=True)
class Case:
    """A write for a service. `prepare` makes what it changes; the result makes the write."""

    name: str
    prepare: Prepare
    why: Why | None = None
    action: type | None = None


def _child(live: Live, kind: Kind, *, is_owned: bool = True, **rest: Any) -> Live:
    meta = live["metadata"]
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": meta["name"], "uid": meta["uid"]}
    return {
        "apiVersion": "apps/v1" if kind is Kind.DEPLOYMENT else "v1",
        "kind": kind.value,
        "metadata": {
            "name": f"{meta['name']}-x",
            "namespace": meta["namespace"],
            "labels": {LABEL_SERVICE: meta["name"]},
            **({"ownerReferences": [{**owner, "controller": True}]} if is_owned else {}),
        },
        **rest,
    }


def _applied(
    operator: StaleOperator, live: Live, manifest: Live, why: Why, child: Live | None
) -> Go:
    action = Apply(
        Kind(manifest["kind"]),
        manifest["metadata"]["name"],
        manifest,
        "",
        why,
        create_only=child is None,
        resource_version=child["metadata"]["resourceVersion"] if child else None,
    )
    return partial(operator.carry_out, live, Plan(actions=(action,)))


async def _create(operator: StaleOperator, live: Live) -> Go:
    return _applied(operator, live, _child(live, Kind.CONFIG_MAP), Why.CREATE, None)


async def _repair(operator: StaleOperator, live: Live) -> Go:
    child = await operator.post(CONFIG_MAP, _child(live, Kind.CONFIG_MAP, data={"a": "1"}))
    wanted = _child(live, Kind.CONFIG_MAP, data={"a": "2"})
    return _applied(operator, live, wanted, Why.REPAIR, child)


async def _adopt(operator: StaleOperator, live: Live) -> Go:
    child = await operator.post(CONFIG_MAP, _child(live, Kind.CONFIG_MAP, is_owned=False))
    return _applied(operator, live, _child(live, Kind.CONFIG_MAP), Why.ADOPT, child)


async def _scale(operator: StaleOperator, live: Live) -> Go:
    def deployment(replicas: int) -> Live:
        template = {"metadata": {"labels": LABELS}, "spec": {"containers": [CONTAINER]}}
        spec = {"replicas": replicas, "selector": {"matchLabels": LABELS}, "template": template}
        return _child(live, Kind.DEPLOYMENT, spec=spec)

    name = (await operator.post(DEPLOYMENT, deployment(0)))["metadata"]["name"]

    def is_observed() -> bool:
        found = operator.world.get("Deployment", name)
        return found is not None and found.get("status", {}).get("observedGeneration") == 1

    await operator.world.until(f"{name} observed", is_observed)
    child = operator.world.get("Deployment", name)
    return _applied(operator, live, deployment(1), Why.SCALE, child)


async def _prune(operator: StaleOperator, live: Live) -> Go:
    meta = (await operator.post(CONFIG_MAP, _child(live, Kind.CONFIG_MAP)))["metadata"]
    version = meta["resourceVersion"]
    action = Delete("ConfigMap", meta["name"], meta["uid"], version, Why.PRUNE)
    return partial(operator.carry_out, live, Plan(actions=(action,)))


async def _pod(operator: StaleOperator, live: Live) -> Live:
    """Create a pod of the service that no scheduler takes and no collector deletes."""
    meta = {"name": f"{live['metadata']['name']}-0", "labels": {LABEL_SERVICE: "any"}}
    spec = {"containers": [CONTAINER], "schedulerName": "none"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
    return await operator.post(POD, pod)


async def _mark(operator: StaleOperator, live: Live) -> Go:
    meta = (await _pod(operator, live))["metadata"]
    action = MarkPod(meta["name"], meta["uid"], -1)
    return partial(operator.carry_out, live, Plan(actions=(action,)))


async def _status(operator: StaleOperator, live: Live) -> Go:
    plan = Plan(status={"replicas": 1}, events=(Event("Normal", "Ready", "text"),))
    return partial(operator.carry_out, live, plan)


async def _replacement(operator: StaleOperator, live: Live) -> Go:
    pod = await _pod(operator, live)
    meta = {**pod["metadata"], "labels": {LABEL_SERVICE: live["metadata"]["name"]}}
    operator.cache.take(POD.kind, {**pod, "metadata": meta})
    return partial(operator.replace, live, pod)


CASES = (
    Case("create", _create, Why.CREATE, Apply),
    Case("repair", _repair, Why.REPAIR, Apply),
    Case("adopt", _adopt, Why.ADOPT, Apply),
    Case("scale", _scale, Why.SCALE, Apply),
    Case("prune", _prune, Why.PRUNE, Delete),
    Case("mark", _mark, action=MarkPod),
    Case("status", _status),
    Case("replacement", _replacement),
)

Change = Callable[[World, Live], Awaitable[Live | None]]
"""What the operator does not see of a service; returns the service after it."""


async def edited(world: World, live: Live) -> Live:
    """Somebody changes the spec."""
    change = {"spec": {"replicas": 3}}
    return await world.patch(INFERENCE_SERVICE, live["metadata"]["name"], change)


async def deletion_requested(world: World, live: Live) -> Live:
    """Its deletion is requested and not finished, as during the removal of owners from children."""
    path = INFERENCE_SERVICE.path(world.namespace, live["metadata"]["name"])
    return await world.client.request("DELETE", path, body={"propagationPolicy": "Background"})


async def _deleted(world: World, live: Live, policy: str) -> None:
    name = live["metadata"]["name"]
    await world.patch(INFERENCE_SERVICE, name, {"metadata": {"finalizers": None}})
    path = INFERENCE_SERVICE.path(world.namespace, name)
    await world.client.request("DELETE", path, body={"propagationPolicy": policy})

    def is_gone() -> bool:
        found = world.fis(name)
        return found is None or found["metadata"]["uid"] != live["metadata"]["uid"]

    await world.until(f"{name} gone", is_gone)


async def deleted_without_children(world: World, live: Live) -> None:
    """It is gone, and its children were kept."""
    await _deleted(world, live, "Orphan")


async def deleted_with_children(world: World, live: Live) -> None:
    """It is gone, and the garbage collector deletes its children."""
    await _deleted(world, live, "Background")


async def recreated(world: World, live: Live) -> Live:
    """It is gone, its children were kept, and another service has its name."""
    await deleted_without_children(world, live)
    return await world.create(service(live["metadata"]["name"]))


CHANGES: tuple[Change, ...] = (
    edited,
    deletion_requested,
    deleted_without_children,
    deleted_with_children,
    recreated,
)

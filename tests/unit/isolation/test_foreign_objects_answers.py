# ruff: noqa: ARG002 - the doubles take what the real ones take
"""Whatever stands in an object that the operator asks for, writes or watches: the others go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.adapters.kubernetes.reflector import watch_managed
from fleetkeeper.adapters.kubernetes.resources import INFERENCE_SERVICE, REPLICA_SET
from fleetkeeper.autoscale.rules.removal import Cause, Removal
from fleetkeeper.autoscale.signals.samples import Gauges, PodSample
from fleetkeeper.autoscale.types import PodView
from fleetkeeper.common.values import Event
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.plan import Apply, MarkPod, Plan
from fleetkeeper.reconcile.types import Kind, Revision, WriteProblem
from fleetkeeper.runtime.autoscaler.pod_replacement import PodReplacer
from fleetkeeper.runtime.event_recorder import EventRecorder
from fleetkeeper.runtime.queue import Key, KeyedQueue
from fleetkeeper.runtime.reconciler.controller import Controller, _Memory
from fleetkeeper.runtime.reconciler.executor import Executor
from fleetkeeper.runtime.reconciler.live_services import LiveServices
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.gpu_ledger import GpuLedger
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper_kube.resource import Resource
from tests.support.autoscale.control_cases import sample
from tests.support.operators.contained import new_defects

Live = dict[str, Any]
CHAT = Key("a", "chat")
RESOURCE: Live = {
    "metadata": {"name": "chat", "namespace": "a", "uid": "u1", "resourceVersion": "3"}
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["²", "9" * 5000, "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["metadata", "name", "labels", "spec", "template", "status", "ownerReferences"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)
ANSWERS = st.dictionaries(st.sampled_from(["metadata", "spec", "status", "items"]), JSON)
META = {"name": "chat-fk-x", "namespace": "a", "uid": "c1", "resourceVersion": "9"}
UNREADABLE: Live = {"metadata": {**META, "labels": "²"}}


class Server:
    """Answers every read and write with the same object, but for the service."""

    def __init__(self, answer: Live, service: Live) -> None:
        self.answer = answer
        self.service = service
        self.deleted: list[str] = []

    async def read(self, resource: Resource, namespace: str, name: str) -> Live | None:
        return self.service if resource == INFERENCE_SERVICE else self.answer

    async def apply_child(self, resource: Resource, manifest: Live, **_: Any) -> Live:
        return self.answer

    create_child = apply_child

    async def apply_status(self, *_: Any, **__: Any) -> Live:
        return self.answer

    async def mark_pod(self, *_: Any) -> Live:
        return self.answer

    async def delete(self, resource: Resource, namespace: str, name: str, **_: Any) -> bool:
        self.deleted.append(name)
        return True

    async def list_pages(self, *_: Any, **__: Any) -> AsyncIterator[Live]:
        yield self.answer


def _any(double: object) -> Any:
    """The double in the place of the client and of the writer."""
    return double


class Scene:
    """An executor and a controller on that server."""

    def __init__(self, answer: Live, service: Live = RESOURCE) -> None:
        self.server = _any(Server(answer, service))
        self.cache = Cache(now=lambda: 100.0, changed=lambda _: None)
        self.metrics = OperatorMetrics()
        self.failures: dict[Any, Any] = {}
        defects = new_defects(self.metrics)
        recorder = EventRecorder(
            self.server,
            self.cache,
            self.metrics,
            now=lambda: 100.0,
            instance="i",
            defects=defects,
            lease=Key("fleet", "fleetkeeper"),
        )
        self.executor = Executor(
            self.server, self.server, self.cache, self.metrics, now=lambda: 100.0, recorder=recorder
        )
        self.controller = Controller(
            queue=KeyedQueue(monotonic=lambda: 0.0, jitter=lambda seconds: seconds),
            cache=self.cache,
            client=self.server,
            executor=self.executor,
            metrics=self.metrics,
            defects=defects,
            context=default_context(),
            ledger=GpuLedger(self.cache, default_context().gpu_budget),
            now=lambda: 100.0,
            monotonic=lambda: 0.0,
        )

    async def carry_out(self, plan: Plan, resource: Live = RESOURCE) -> Any:
        return await self.executor.carry_out(CHAT, resource, plan, self.failures)


def apply(kind: Kind, *, create_only: bool = False) -> Apply:
    manifest = {"kind": kind.value, "metadata": {"name": "chat-fk-x", "namespace": "a"}}
    return Apply(kind, "chat-fk-x", manifest, "d", "test", create_only=create_only)


@given(ANSWERS, st.sampled_from(list(Kind)))
def test_an_answer_to_our_own_write_may_be_anything(answer: Live, kind: Kind) -> None:
    plans = (
        Plan(actions=(apply(kind), MarkPod("p", "u", -1)), status={"a": 1}),
        Plan(
            actions=(
                apply(Kind.DEPLOYMENT, create_only=True),
                apply(Kind.SERVICE, create_only=True),
            )
        ),
    )

    async def run() -> None:
        for plan in plans:
            await Scene(answer).carry_out(plan)
            await Scene(answer, answer).carry_out(plan)

    asyncio.run(run())


@given(ANSWERS)
def test_a_replicaset_or_an_event_that_is_read_may_be_anything(answer: Live) -> None:
    async def run() -> None:
        scene, memory = Scene(answer), _Memory("u1")
        await scene.controller._read_template(CHAT, "chat-1", memory)
        await scene.controller._read_events(CHAT, "u", memory)
        assert all(isinstance(template, dict) for template in memory.templates.values())

    asyncio.run(run())


async def test_an_unreadable_answer_to_a_write_is_held_against_its_service() -> None:
    scene = Scene({"metadata": {**META, "labels": {"fleetkeeper.io/service": "chat"}}, "spec": 7})
    await scene.carry_out(Plan(actions=(apply(Kind.DEPLOYMENT),)))
    (found,) = scene.cache.unreadable(CHAT)
    assert (found.kind, found.name, found.why) == (
        "Deployment",
        "chat-fk-x",
        "spec is not an object",
    )


async def test_a_name_that_is_taken_by_what_cannot_be_read_is_a_conflict_and_named() -> None:
    """It is not planned with, not overwritten, and the next attempt reads before it writes."""
    scene = Scene(UNREADABLE)
    service = apply(Kind.SERVICE, create_only=True)
    outcome = await scene.carry_out(
        Plan(actions=(apply(Kind.DEPLOYMENT, create_only=True), service))
    )
    assert outcome.plan_again
    assert scene.failures["Service", "chat-fk-x"].problem is WriteProblem.CONFLICT
    (found,) = scene.cache.unreadable(CHAT)
    assert (found.kind, found.name, found.why) == (
        "Service",
        "chat-fk-x",
        "metadata.labels is not an object",
    )


async def fragmented(pod: PodView) -> PodSample:
    """The pod confirms the cause."""
    return sample(100.0, pod.name, gauges=Gauges(memory_fragmentation_ratio=0.4))


REMOVAL = Removal(Cause.FRAGMENTED, "why", Event("Normal", "EngineFragmented", "why"))


async def test_the_control_loop_replaces_no_pod_of_a_service_that_is_partly_unknown() -> None:
    pod = {"metadata": {**META, "name": "p", "labels": {"fleetkeeper.io/service": "chat"}}}
    scene = Scene(pod)
    is_unchanged = LiveServices(scene.server, scene.cache).is_unchanged
    replacer = PodReplacer(
        *(scene.server, scene.cache, scene.metrics), is_unchanged=is_unchanged, read_pod=fragmented
    )
    scene.cache.put_service(RESOURCE)
    view = PodView("p", "c1", 1.0)
    scene.cache.take("Pod", pod)
    assert await replacer.replace(CHAT, view, REMOVAL)
    assert scene.server.deleted == ["p"]
    scene.cache.take("Pod", {"metadata": {**pod["metadata"], "resourceVersion": "10"}, "status": 1})
    assert not await replacer.replace(CHAT, view, REMOVAL)
    assert scene.server.deleted == ["p"]


def replicaset(name: object, version: str, **more: Any) -> Live:
    labels = {"fleetkeeper.io/service": "chat"}
    return {
        "metadata": {"name": name, "namespace": "a", "resourceVersion": version, "labels": labels},
        **more,
    }


class Watched:
    """One list, then one watch."""

    def __init__(self, items: list[Live], events: list[Live]) -> None:
        self.items, self.events = items, events

    async def list_pages(self, *_: Any, **__: Any) -> AsyncIterator[Live]:
        yield {"metadata": {"resourceVersion": "50"}, "items": list(self.items)}

    @asynccontextmanager
    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        async def lines() -> AsyncIterator[bytes]:
            for event in self.events:
                yield json.dumps(event).encode()
            self.events = []
            await asyncio.Event().wait()

        yield lines()


HOSTILE = [
    {
        **replicaset("bad", "9")["metadata"],
        "annotations": {"deployment.kubernetes.io/revision": "²"},
    },
    {**replicaset("bad", "9")["metadata"], "labels": [1]},
    {**replicaset("bad", "²")["metadata"]},
    {"name": 7, "namespace": "a", "resourceVersion": "9"},
    "metadata",
    None,
]


@pytest.mark.parametrize("metadata", HOSTILE)
async def test_the_watch_goes_on_after_an_object_of_any_shape(metadata: object) -> None:
    """In a list and in a watch: what comes after it is seen, and what was there stays."""
    cache = Cache(now=lambda: 0.0, changed=lambda _: None)
    cache.take("ReplicaSet", replicaset("kept", "40"))
    bad: Live = {"metadata": metadata}
    server: Any = Watched(
        [bad, replicaset("kept", "40"), replicaset("first", "41")],
        [
            {"type": "MODIFIED", "object": bad},
            {"type": "ADDED", "object": replicaset("second", "60")},
        ],
    )
    reflector = watch_managed(server, REPLICA_SET, "a", cache, None)
    running = asyncio.create_task(reflector.run())
    try:
        async with asyncio.timeout(60):
            while cache.known("ReplicaSet", "a", "second") is None:
                assert not running.done(), running.exception()
                await asyncio.sleep(0)
    finally:
        running.cancel()
    names = {revision.name for revision in cache.revisions(CHAT) if isinstance(revision, Revision)}
    assert names >= {"kept", "first", "second"}
    assert reflector.failures == 0


async def test_a_list_with_an_object_without_a_name_proves_no_absence() -> None:
    """What it leaves out may be that object."""
    cache = Cache(now=lambda: 0.0, changed=lambda _: None)
    cache.take("ReplicaSet", replicaset("kept", "40"))
    server: Any = Watched([{"metadata": {"name": {}}}], [])
    reflector = watch_managed(server, REPLICA_SET, "a", cache, None)
    running = asyncio.create_task(reflector.run())
    async with asyncio.timeout(60):
        await reflector.synced.wait()
    running.cancel()
    assert cache.known("ReplicaSet", "a", "kept") is not None

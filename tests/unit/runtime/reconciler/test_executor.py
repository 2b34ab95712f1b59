# ruff: noqa: ARG002 - the doubles take what the real ones take
"""The executor does what the plan says, in its order, and tells what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fleetkeeper.adapters.kubernetes.lease import LeaseLost
from fleetkeeper.common.values import Event
from fleetkeeper.reconcile.plan import Apply, Delete, MarkPod, Plan
from fleetkeeper.reconcile.types import Kind, WriteFailure, WriteProblem
from fleetkeeper.runtime.event_recorder import EventRecorder
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.reconciler.executor import Executor
from fleetkeeper.runtime.reconciler.outcome import Outcome
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_kube.resource import Resource
from tests.support.operators.contained import new_defects

Live = dict[str, Any]
CHAT = Key("a", "chat")
NEW: Live = {"metadata": {"name": "chat", "namespace": "a", "uid": "u1", "resourceVersion": "3"}}
CONFIRMED = ("read", "InferenceService", "chat")


class Server:
    """Reads, writes, and what they are answered with; an ApiError in `refuse` is raised by name."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.objects: dict[tuple[str, str], Live] = {("InferenceService", "chat"): NEW}
        self.refuse: dict[str, Exception] = {}

    def _call(self, what: str, *details: Any) -> None:
        self.calls.append((what, *details))
        if what in self.refuse:
            raise self.refuse[what]

    async def read(self, resource: Resource, namespace: str, name: str) -> Live | None:
        self._call("read", resource.kind, name)
        return self.objects.get((resource.kind, name))

    async def apply_child(
        self,
        resource: Resource,
        manifest: Live,
        *,
        force: bool,
        resource_version: str | None = None,
    ) -> Live:
        self._call(f"apply {resource.kind}", force, resource_version)
        meta = {**manifest["metadata"], "uid": "c1", "resourceVersion": "10"}
        return {**manifest, "metadata": meta}

    async def create_child(self, resource: Resource, manifest: Live) -> Live:
        self._call(f"create {resource.kind}")
        if (resource.kind, manifest["metadata"]["name"]) in self.objects:
            raise ApiError(409, "Conflict", "the object has been modified")
        meta = {**manifest["metadata"], "uid": "c1", "resourceVersion": "10"}
        return {**manifest, "metadata": meta}

    async def apply_status(
        self, namespace: str, name: str, status: Live, *, uid: str, resource_version: str
    ) -> Live:
        self._call("status", uid, resource_version, status)
        return {**NEW, "metadata": {**NEW["metadata"], "resourceVersion": "9"}, "status": status}

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str, resource_version: str
    ) -> bool:
        self._call("delete", resource.kind, name, uid, resource_version)
        return True

    async def mark_pod(self, namespace: str, name: str, uid: str, deletion_cost: int) -> Live:
        self._call("mark", name, uid, deletion_cost)
        return {"metadata": {"name": name, "namespace": namespace, "resourceVersion": "9"}}

    async def post_event(self, namespace: str, manifest: Live) -> None:
        self._call("event", manifest["reason"])


class Scene:
    def __init__(self) -> None:
        self.server = Server()
        self.cache = Cache(now=lambda: 100.0, changed=lambda _: None)
        self.metrics = OperatorMetrics()
        self.failures: dict[tuple[str, str], WriteFailure] = {}
        self.cache.put_service(NEW)
        self.recorder = EventRecorder(
            self.server,  # type: ignore[arg-type]
            self.cache,
            self.metrics,
            now=lambda: 100.0,
            instance="pod-1",
            defects=new_defects(self.metrics),
            lease=Key("fleet", "fleetkeeper"),
        )

    async def run(
        self, plan: Plan, resource: Live = NEW, now: Callable[[], float] = lambda: 100.0
    ) -> Outcome:
        executor = Executor(
            self.server,  # type: ignore[arg-type]
            self.server,  # type: ignore[arg-type]
            self.cache,
            self.metrics,
            now=now,
            recorder=self.recorder,
        )
        return await executor.carry_out(CHAT, resource, plan, self.failures)

    @property
    def names(self) -> list[str]:
        """What was called, but for the read of the service before it."""
        return [call[0] for call in self.server.calls if call != CONFIRMED]


def apply(kind: Kind = Kind.CONFIG_MAP, **more: Any) -> Apply:
    manifest = {"kind": kind.value, "metadata": {"name": "chat-fk-x", "namespace": "a"}}
    fields = {"kind": kind, "name": "chat-fk-x", "manifest": manifest, "digest": "", "why": "test"}
    return Apply(**{**fields, **more})


async def test_children_then_the_status_then_notices() -> None:
    scene = Scene()
    plan = Plan(
        actions=(apply(), Delete("Service", "old", "u9", "7", "pruned"), MarkPod("p", "u2", -5)),
        status={"replicas": 1},
        events=(Event("Normal", "Scaled", "1 -> 2"),),
    )
    outcome = await scene.run(plan)
    assert scene.server.calls == [
        CONFIRMED,
        ("apply ConfigMap", True, None),
        ("delete", "Service", "old", "u9", "7"),
        ("mark", "p", "u2", -5),
        ("status", "u1", "3", {"replicas": 1}),
    ]
    await scene.recorder.drain()
    assert scene.server.calls[-1] == ("event", "Scaled")
    assert (outcome.written, outcome.stopped) == (4, False)


async def test_an_empty_plan_writes_nothing() -> None:
    scene = Scene()
    outcome = await scene.run(Plan())
    assert (scene.server.calls, outcome.written) == ([], 0)


async def test_a_child_believed_absent_is_created_in_one_request() -> None:
    scene = Scene()
    outcome = await scene.run(Plan(actions=(apply(create_only=True),)))
    assert scene.server.calls == [CONFIRMED, ("create ConfigMap",)]
    assert outcome.written == 1


async def test_a_creation_refused_though_nothing_is_there_is_applied_without_force() -> None:
    """The object went in between, or the server takes no resourceVersion of what is absent."""
    scene = Scene()
    scene.server.refuse["create ConfigMap"] = ApiError(409, "Conflict", "")
    await scene.run(Plan(actions=(apply(create_only=True),)))
    assert scene.server.calls == [
        CONFIRMED,
        ("create ConfigMap",),
        ("read", "ConfigMap", "chat-fk-x"),
        ("apply ConfigMap", False, None),
    ]


async def test_a_name_known_to_be_taken_is_read_before_it_is_tried_again() -> None:
    """To wait for a conflict to end costs no writes; its end is noticed."""
    scene = Scene()
    scene.server.objects["ConfigMap", "chat-fk-x"] = found()
    plan = Plan(actions=(apply(create_only=True),))
    await scene.run(plan)
    await scene.run(plan)
    assert scene.names == ["create ConfigMap", "read", "read"]
    del scene.server.objects["ConfigMap", "chat-fk-x"]
    await scene.run(plan)
    assert scene.names[-2:] == ["read", "create ConfigMap"]
    assert not scene.failures


def found(**meta: Any) -> Live:
    return {"metadata": {"name": "chat-fk-x", "namespace": "a", "resourceVersion": "4", **meta}}


@pytest.mark.parametrize(
    "meta",
    [
        {"ownerReferences": [{"uid": "u1", "controller": True, "kind": "InferenceService"}]},
        {"labels": {"fleetkeeper.io/service": "chat"}},
    ],
    ids=["owned", "labelled without owner"],
)
async def test_a_child_that_is_there_after_all_is_planned_with(meta: Live) -> None:
    scene = Scene()
    scene.server.objects["ConfigMap", "chat-fk-x"] = found(**meta)
    outcome = await scene.run(Plan(actions=(apply(create_only=True),), status={"a": 1}))
    assert scene.names == ["create ConfigMap", "read"]
    assert outcome.plan_again
    assert (Kind.CONFIG_MAP, "chat-fk-x") in scene.cache.children(CHAT)
    assert not scene.failures


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"labels": {"fleetkeeper.io/service": "other"}},
        {
            "labels": {"fleetkeeper.io/service": "chat"},
            "ownerReferences": [
                {"uid": "u7", "controller": True, "kind": "Deployment", "name": "theirs"}
            ],
        },
    ],
    ids=["plain", "another service's", "another's"],
)
async def test_a_foreign_object_is_a_conflict_and_not_touched(meta: Live) -> None:
    scene = Scene()
    scene.server.objects["ConfigMap", "chat-fk-x"] = found(**meta)
    outcome = await scene.run(Plan(actions=(apply(create_only=True),), status={"a": 1}))
    assert scene.names == ["create ConfigMap", "read"]
    assert outcome.plan_again
    assert scene.failures["ConfigMap", "chat-fk-x"].problem is WriteProblem.CONFLICT


async def test_a_services_name_is_looked_at_before_pods_are_created() -> None:
    """Services come last; one whose name is taken still keeps accelerators from being held."""
    scene = Scene()
    plan = Plan(
        actions=(
            apply(create_only=True),
            apply(Kind.DEPLOYMENT, create_only=True),
            apply(Kind.SERVICE, create_only=True),
        )
    )
    scene.server.objects["Service", "chat-fk-x"] = found()
    outcome = await scene.run(plan)
    assert scene.names == ["create ConfigMap", "read"]
    assert scene.failures["Service", "chat-fk-x"].problem is WriteProblem.CONFLICT
    assert outcome.plan_again
    del scene.server.objects["Service", "chat-fk-x"]
    scene.failures.clear()
    scene.server.calls.clear()
    await scene.run(plan)
    assert scene.names == ["create ConfigMap", "read", "create Deployment", "create Service"]


async def test_children_that_vanish_with_their_service_are_not_made_anew() -> None:
    scene = Scene()
    del scene.server.objects["InferenceService", "chat"]
    outcome = await scene.run(Plan(actions=(apply(create_only=True),)))
    assert outcome.plan_again
    assert scene.server.calls == [CONFIRMED]
    assert scene.cache.service(CHAT) is None


async def test_a_long_plan_reads_its_service_again_and_stops_where_that_changed() -> None:
    """A write may take seconds, and a deletion may be requested meanwhile."""
    scene = Scene()
    creation = apply(create_only=True)

    def now() -> float:
        """Each write takes 0.8 s, and the deletion comes with the first."""
        if scene.names:
            scene.server.objects.pop(("InferenceService", "chat"), None)
        return 100.0 + 0.8 * len(scene.names)

    outcome = await scene.run(Plan(actions=(creation,) * 9, status={"a": 1}), now=now)
    assert scene.names == ["create ConfigMap", "create ConfigMap"]
    assert outcome.plan_again
    assert scene.cache.service(CHAT) is None


async def test_a_refused_write_is_remembered_others_go_on_and_the_status_waits() -> None:
    scene = Scene()
    scene.server.refuse["apply ConfigMap"] = ApiError(403, "Forbidden", "exceeded quota: x")
    plan = Plan(actions=(apply(), apply(Kind.SERVICE)), status={"a": 1})
    outcome = await scene.run(plan)
    assert scene.names == ["apply ConfigMap", "apply Service"]
    assert outcome.plan_again
    failure = scene.failures["ConfigMap", "chat-fk-x"]
    assert (failure.problem, failure.since, failure.tried) == (WriteProblem.QUOTA, 100.0, 100.0)
    scene.server.refuse.clear()
    await scene.run(Plan(actions=(apply(),)))
    assert not scene.failures


@pytest.mark.parametrize(
    "problem",
    [ApiError(409, "Conflict", ""), ApiError(503, "Down", ""), ApiError(0, "Timeout", "")],
)
async def test_a_stale_view_or_a_server_in_trouble_is_waited_for(problem: ApiError) -> None:
    """No failure of the service: nothing is told of it, and nothing else is tried now."""
    scene = Scene()
    scene.server.refuse["apply ConfigMap"] = problem
    outcome = await scene.run(Plan(actions=(apply(), apply(Kind.SERVICE)), status={"a": 1}))
    assert scene.names == ["apply ConfigMap"]
    assert (outcome.wait, outcome.plan_again, scene.failures) == (True, False, {})


async def test_a_status_for_a_service_that_is_gone_is_planned_again() -> None:
    scene = Scene()
    scene.server.refuse["status"] = ApiError(404, "NotFound", "")
    scene.server.objects.clear()
    outcome = await scene.run(Plan(status={"a": 1}, events=(Event("Normal", "X", "x"),)))
    assert (outcome.plan_again, outcome.wait) == (True, False)
    assert scene.cache.service(CHAT) is None
    assert len(scene.recorder) == 0


async def test_a_status_refused_although_the_service_is_as_planned_is_waited_for() -> None:
    """A webhook may answer 409, too: to plan again at once would be the same write again."""
    scene = Scene()
    scene.server.refuse["status"] = ApiError(409, "Conflict", "")
    outcome = await scene.run(Plan(status={"a": 1}))
    assert (outcome.plan_again, outcome.wait) == (False, True)


async def test_a_child_read_by_name_that_changed_since_is_read_again() -> None:
    """No watch shows it, so its old version would be refused until it counts as gone."""
    scene = Scene()
    scene.server.objects["ConfigMap", "chat-fk-x"] = found(
        labels={"fleetkeeper.io/service": "chat"}
    )
    await scene.run(Plan(actions=(apply(create_only=True),)))
    assert (Kind.CONFIG_MAP, "chat-fk-x") in scene.cache.children(CHAT)
    scene.server.refuse["apply ConfigMap"] = ApiError(409, "Conflict", "")
    await scene.run(Plan(actions=(apply(resource_version="4"),)))
    assert (Kind.CONFIG_MAP, "chat-fk-x") not in scene.cache.children(CHAT)


async def test_a_lost_lease_ends_everything() -> None:
    scene = Scene()
    scene.server.refuse["apply ConfigMap"] = LeaseLost("too old")
    with pytest.raises(LeaseLost):
        await scene.run(Plan(actions=(apply(), apply(Kind.SERVICE))))
    assert scene.names == ["apply ConfigMap"]


async def test_what_admission_changed_is_accepted_and_counted() -> None:
    """Else the same apply would be sent for ever."""
    scene = Scene()
    await scene.run(Plan(actions=(apply(digest="asked"),)))
    count = scene.metrics.registry.get_sample_value(
        "fleetkeeper_digest_mismatches_total", {"kind": "ConfigMap"}
    )
    assert count == 1.0

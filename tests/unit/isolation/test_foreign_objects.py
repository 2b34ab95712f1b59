"""Whoever may write an object decides what is in it; it troubles its own service alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleetkeeper.adapters.kubernetes.pod_records import event_record
from fleetkeeper.adapters.kubernetes.records import Seen, Unread, observe
from fleetkeeper.adapters.kubernetes.resources import WATCHED
from fleetkeeper.api.conditions import ConditionType, Reason
from fleetkeeper.api.names import KIND
from fleetkeeper.reconcile.planner import decide_plan
from fleetkeeper.reconcile.types import Kind, Revision, Workload
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.named import NAMED_S
from fleetkeeper_kube.reading import stand_in
from tests.support.lanes import examples
from tests.support.reconcile.plan_world import World, service

Live = dict[str, Any]
CHAT = Key("a", "chat")
DIGITS = ("²", "٣", "9" * 5000, "-1", "1e9", "0x7", " 7 ", "\ud800", "")
OWNER = {
    "apiVersion": "fleetkeeper.io/v1alpha1",
    "kind": KIND,
    "name": "chat",
    "uid": "u1",
    "controller": True,
}
FIELDS = {
    "f:metadata": {"f:labels": {"f:fleetkeeper.io/service": {}}},
    "f:spec": {"f:replicas": {}, "f:items": {'k:{"name":"a"}': {"f:name": {}}, 'v:"b"': {}}},
}
CONTAINER = {
    "name": "engine",
    "ready": True,
    "started": True,
    "restartCount": 1,
    "state": {"waiting": {"reason": "r", "message": "m"}, "running": {"startedAt": "t"}},
    "lastState": {"terminated": {"exitCode": 1, "reason": "r", "message": "m", "finishedAt": "t"}},
}
WHOLE: Live = {
    "metadata": {
        "name": "chat",
        "namespace": "a",
        "uid": "d1",
        "resourceVersion": "50",
        "generation": 4,
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"fleetkeeper.io/service": "chat", "fleetkeeper.io/component": "engine"},
        "annotations": {
            "deployment.kubernetes.io/revision": "3",
            "controller.kubernetes.io/pod-deletion-cost": "3",
            "fleetkeeper.io/template-hash": "7f3a",
        },
        "ownerReferences": [OWNER],
        "managedFields": [
            {"manager": "fleetkeeper", "operation": "Apply", "time": "t", "fieldsV1": FIELDS}
        ],
    },
    "spec": {
        "replicas": 3,
        "nodeName": "n",
        "items": [{"name": "a"}, "b"],
        "strategy": {"rollingUpdate": {"maxSurge": 1}},
        "template": {"metadata": {"annotations": {"fleetkeeper.io/template-hash": "7f3a"}}},
    },
    "status": {
        "observedGeneration": 4,
        "replicas": 3,
        "readyReplicas": 2,
        "updatedReplicas": 1,
        "availableReplicas": 1,
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [
            {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"},
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "m"},
        ],
        "containerStatuses": [CONTAINER],
        "initContainerStatuses": [CONTAINER],
    },
    "involvedObject": {"uid": "p1"},
    "series": {"lastObservedTime": "t"},
    "reason": "r",
    "message": "m",
    "lastTimestamp": "t",
}
"""Every field that a record of any kind reads."""


def paths(value: object, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a nested value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [at, *(path for key, inner in items for path in paths(inner, (*at, key)))]


PATHS = [path for path in paths(WHOLE) if path]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**80, -(2**80), 1e308, -1.5])
    | st.sampled_from(DIGITS)
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


def changed(path: tuple[Any, ...], value: object) -> Live:
    """The whole object with something else in one place."""
    live = copy.deepcopy(WHOLE)
    part: Any = live
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    return live


@pytest.mark.slow
@examples(1500)
@given(st.sampled_from(WATCHED), st.sampled_from(PATHS), JSON)
@example(WATCHED[0], ("metadata", "namespace"), "²")
def test_an_object_with_anything_in_any_field_is_seen_or_named(
    resource: Any, path: tuple[Any, ...], value: object
) -> None:
    """Never an exception, never a different object, never more kept than a few KiB."""
    live = changed(path, value)
    cache = Cache(now=lambda: 0.0, changed=lambda _: None)
    place = cache.take(resource.kind, live)
    metadata = live["metadata"] if isinstance(live["metadata"], dict) else {}
    name, namespace = metadata.get("name"), metadata.get("namespace")
    if place is None:
        assert path[:1] == ("metadata",)
        assert len(path) == 1 or path[1] in {"name", "namespace"}
        return
    assert (place.namespace, place.name) == (namespace, name)
    found = observe(resource.kind, live)
    assert isinstance(found, Seen | Unread)
    if isinstance(found, Unread) and found.service:
        assert [item.name for item in cache.unreadable(Key(place.namespace, found.service))] == [
            name
        ]
    json.dumps(repr(found)).encode()
    event_record(live)
    cache.put_service(live)


@pytest.mark.parametrize("number", DIGITS)
def test_a_revision_that_is_no_number_has_none(number: str) -> None:
    path = ("metadata", "annotations", "deployment.kubernetes.io/revision")
    found = observe("ReplicaSet", changed(path, number))
    assert isinstance(found, Seen)
    assert isinstance(found.record, Revision)
    assert found.record.number == 0


@pytest.mark.parametrize(
    "path",
    [
        ("spec", "replicas"),
        ("status", "readyReplicas"),
        ("metadata", "generation"),
        ("metadata", "labels"),
        ("metadata", "ownerReferences"),
        ("metadata", "resourceVersion"),
        ("status",),
    ],
)
@pytest.mark.parametrize("value", ["²", -1, 2**70, 1.5, [3]])
def test_a_deployment_whose_identity_or_counts_cannot_be_read_is_not_guessed(
    path: tuple[str, ...], value: object
) -> None:
    assert isinstance(observe(Kind.DEPLOYMENT, changed(path, value)), Unread)


def nested(depth: int) -> Live:
    """A value as deep as the API server takes one."""
    value: Live = {}
    for _ in range(depth):
        value = {"f:a": value}
    return value


@pytest.mark.parametrize(
    "fields",
    [nested(9000), {"k:{": {}}, {"f:spec": 7}, {"f:spec": {"f:items": {"v:": {}}}}, "x", [1]],
)
def test_fields_that_cannot_be_read_are_as_if_we_owned_none(fields: object) -> None:
    """So that one apply, which writes our entry anew, repairs them."""
    live = changed(("metadata", "managedFields", 0, "fieldsV1"), fields)
    found = observe(Kind.DEPLOYMENT, live)
    assert isinstance(found, Seen)
    assert isinstance(found.record, Workload)
    assert found.record.digest == ""


def cache_with(told: list[Key] | None = None) -> Cache:
    """A cache with a service and its readable Deployment."""
    cache = Cache(now=lambda: 100.0, changed=(told if told is not None else []).append)
    cache.put_service({"metadata": {"namespace": "a", "name": "chat", "resourceVersion": "2"}})
    cache.take(Kind.DEPLOYMENT, WHOLE)
    return cache


def at(version: int, **metadata: object) -> Live:
    """The Deployment in a newer state that is, or is not, readable."""
    live = copy.deepcopy(WHOLE)
    live["metadata"].update({"resourceVersion": str(version), **metadata})
    return live


def test_the_last_good_record_stays_until_the_object_is_readable_again() -> None:
    told: list[Key] = []
    cache = cache_with(told)
    cache.take(Kind.DEPLOYMENT, at(60, generation="²"))
    assert (Kind.DEPLOYMENT, "chat") in cache.children(CHAT)
    (unreadable,) = cache.unreadable(CHAT)
    assert (unreadable.kind, unreadable.name) == ("Deployment", "chat")
    assert "metadata.generation" in unreadable.why
    assert cache.unreadable_counts()["Deployment"] == 1
    told.clear()
    cache.take(Kind.DEPLOYMENT, at(61))
    assert cache.unreadable(CHAT) == ()
    assert CHAT in told


def test_an_older_state_does_not_hide_that_the_object_is_unreadable() -> None:
    cache = cache_with()
    cache.take(Kind.DEPLOYMENT, at(60, generation="²"))
    cache.take(Kind.DEPLOYMENT, at(55))
    assert cache.unreadable(CHAT)


def forget_by_event(cache: Cache) -> None:
    found = observe(Kind.DEPLOYMENT, at(70, generation="²"))
    cache.gone(found)


def forget_by_list(cache: Cache) -> None:
    cache.listed("Deployment", None, frozenset(), 70)


@pytest.mark.parametrize("forget", [forget_by_event, forget_by_list])
def test_an_unreadable_object_that_is_gone_is_forgotten(forget: Callable[[Cache], None]) -> None:
    told: list[Key] = []
    cache = cache_with(told)
    cache.take(Kind.DEPLOYMENT, at(60, generation="²"))
    told.clear()
    forget(cache)
    assert cache.unreadable(CHAT) == ()
    assert cache.children(CHAT) == {}
    assert CHAT in told


def test_an_object_that_hides_whose_it_is_is_held_against_the_service_it_is_named_after() -> None:
    cache = cache_with()
    cache.put_service({"metadata": {"namespace": "a", "name": "chat-b", "resourceVersion": "2"}})
    cache.put_service({"metadata": {"namespace": "z", "name": "chat", "resourceVersion": "2"}})
    live = stand_in("takes too much", name="chat-b-5f7", namespace="a", resourceVersion="9")
    cache.take("ReplicaSet", live)
    assert [found.name for found in cache.unreadable(Key("a", "chat-b"))] == ["chat-b-5f7"]
    assert cache.unreadable(CHAT) == cache.unreadable(Key("z", "chat")) == ()


def test_what_was_read_by_name_and_cannot_be_read_is_believed_for_as_long() -> None:
    now = [100.0]
    cache = Cache(now=lambda: now[0], changed=lambda _: None)
    cache.put_named(CHAT, Unread("ConfigMap", "a", "chat-fk-x", 3, "chat", "labels"))
    assert cache.unreadable(CHAT)
    assert cache.children(CHAT) == {}
    now[0] += NAMED_S + 1
    assert cache.unreadable(CHAT) == ()


def test_a_service_with_an_unreadable_object_gets_no_write_and_says_which() -> None:
    """Its Deployment is not seen, and must not be taken for absent."""
    world = World(service())
    cache = Cache(now=lambda: 0.0, changed=lambda _: None)
    cache.take("Deployment", changed(("spec", "replicas"), "²"))
    snapshot = replace(world.snapshot(), unreadable=cache.unreadable(CHAT))
    plan = decide_plan(snapshot, world.context, world.now)
    assert plan.actions == ()
    assert plan.status is not None
    stalled = next(c for c in plan.status["conditions"] if c["type"] == ConditionType.STALLED)
    assert stalled["reason"] == Reason.UNREADABLE_OBJECT
    assert "Deployment chat" in stalled["message"]
    assert "Repair or delete" in stalled["message"]
    assert plan.requeue_after_s is not None
    assert decide_plan(world.snapshot(), world.context, world.now).actions != ()

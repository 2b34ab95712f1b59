"""The cache holds the newest of everything, whatever the order in which it hears of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.adapters.kubernetes.records import Seen, seen
from fleetkeeper.api.names import ANNOTATION_WAKE
from fleetkeeper.reconcile.types import Child, Kind, Pod, Workload
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.named import NAMED_S
from fleetkeeper.runtime.state.service_entry import pack_service

Live = dict[str, Any]
CHAT = Key("a", "chat")


class Scene:
    """A cache, a clock, and what was told."""

    def __init__(self) -> None:
        self.time_s = 1000.0
        self.changed: list[Key] = []
        self.on_status_change: list[Key] = []
        self.cache = Cache(
            now=lambda: self.time_s,
            changed=self.changed.append,
            on_status_change=self.on_status_change.append,
        )


def owner(service: str = "chat", uid: str = "u1") -> Live:
    return {
        "apiVersion": "fleetkeeper.io/v1alpha1",
        "kind": "InferenceService",
        "name": service,
        "uid": uid,
        "controller": True,
    }


def meta(name: str, version: int, **more: Any) -> Live:
    return {
        "name": name,
        "namespace": "a",
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "labels": {"fleetkeeper.io/service": "chat"},
        **more,
    }


def config(version: int, name: str = "chat-fk-control", **more: Any) -> Seen:
    metadata = meta(name, version, ownerReferences=[owner()])
    return seen("ConfigMap", {"metadata": {**metadata, **more}})


def deployment(version: int, replicas: int = 1, manager: str = "fleetkeeper") -> Seen:
    fields = [
        {
            "manager": manager,
            "operation": "Update",
            "fieldsV1": {"f:spec": {"f:replicas": {}}},
        }
    ]
    metadata = meta("chat", version, ownerReferences=[owner()], managedFields=fields)
    return seen("Deployment", {"metadata": metadata, "spec": {"replicas": replicas}})


def service(version: int, uid: str = "u1", **spec: Any) -> Live:
    return {
        "metadata": {
            "name": "chat",
            "namespace": "a",
            "uid": uid,
            "resourceVersion": str(version),
            "managedFields": [{"manager": "x"}],
        },
        "spec": spec,
    }


def test_a_service_is_kept_without_managed_fields() -> None:
    scene = Scene()
    scene.cache.put_service(service(5, replicas=2))
    entry = scene.cache.service(CHAT)
    assert entry is not None
    assert entry.unpack()["spec"] == {"replicas": 2}
    assert "managedFields" not in entry.unpack()["metadata"]
    assert scene.changed == [CHAT]


def test_an_older_state_never_replaces_a_newer_one() -> None:
    scene = Scene()
    scene.cache.put_service(service(5, replicas=2))
    scene.cache.put_service(service(4, replicas=1))
    scene.cache.put_service(service(5, replicas=3))
    entry = scene.cache.service(CHAT)
    assert entry is not None
    assert entry.unpack()["spec"] == {"replicas": 2}
    assert scene.changed == [CHAT]


def test_a_late_answer_does_not_bring_back_what_is_gone() -> None:
    scene = Scene()
    scene.cache.put(config(5))
    scene.cache.gone(config(7))
    scene.cache.put(config(6))
    assert scene.cache.children(CHAT) == {}
    scene.cache.put(config(8))
    assert (Kind.CONFIG_MAP, "chat-fk-control") in scene.cache.children(CHAT)


def test_a_deleted_service_stays_deleted_and_a_new_one_of_its_name_is_another() -> None:
    scene = Scene()
    scene.cache.put_service(service(5))
    scene.cache.drop_service(CHAT, uid="other", version=6)
    assert scene.cache.service(CHAT) is not None
    scene.cache.drop_service(CHAT, uid="u1", version=6)
    assert scene.cache.service(CHAT) is None
    scene.cache.put_service(service(6))
    assert scene.cache.service(CHAT) is None
    scene.cache.put_service(service(9, uid="u2"))
    entry = scene.cache.service(CHAT)
    assert entry is not None
    assert entry.uid == "u2"


def test_what_a_finished_list_lacks_is_gone_unless_it_is_newer_than_the_list() -> None:
    scene = Scene()
    for name, version in (("kept", 3), ("ghost", 4), ("younger", 12)):
        scene.cache.put(config(version, name))
    scene.cache.listed("ConfigMap", None, frozenset({("a", "kept")}), 10)
    assert {name for _, name in scene.cache.children(CHAT)} == {"kept", "younger"}
    assert scene.changed == [CHAT]


def test_a_list_of_one_namespace_or_kind_says_nothing_of_others() -> None:
    scene = Scene()
    scene.cache.put(config(3))
    scene.cache.listed("ConfigMap", "b", frozenset(), 10)
    scene.cache.listed("Service", None, frozenset(), 10)
    assert scene.cache.children(CHAT)


def test_ghost_services_are_found_by_a_list() -> None:
    scene = Scene()
    scene.cache.put_service(service(5))
    assert scene.cache.listed_services("b", {}, 9) == []
    assert scene.cache.listed_services(None, {}, 4) == []
    assert scene.cache.listed_services(None, {}, 9) == [CHAT]
    assert len(scene.cache) == 0


def test_the_owner_decides_before_the_label() -> None:
    scene = Scene()
    stolen = {"fleetkeeper.io/service": "other"}
    scene.cache.put(config(3, labels=stolen))
    assert scene.cache.children(CHAT)
    scene.cache.put(config(4, labels=stolen, ownerReferences=[]))
    assert not scene.cache.children(CHAT)
    assert scene.cache.children(Key("a", "other"))


def test_only_what_matters_wakes_the_service() -> None:
    scene = Scene()
    scene.cache.put(config(3))
    scene.cache.put(config(4))
    assert (scene.changed, scene.on_status_change) == ([], [CHAT])
    scene.cache.put(config(5, deletionTimestamp="2026-01-01T00:00:00Z"))
    assert (scene.changed, scene.on_status_change) == ([CHAT], [CHAT])


def test_changes_of_replicas_by_others_are_remembered_for_ten_minutes() -> None:
    scene = Scene()
    scene.cache.put(deployment(3, 1))
    scene.cache.put(deployment(4, 3, manager="hpa"))
    scene.cache.put(deployment(5, 1))
    scene.time_s += 100
    scene.cache.put(deployment(6, 4, manager="kubectl"))
    assert scene.cache.foreign_replica_writes(CHAT) == ((1000.0, "hpa"), (1100.0, "kubectl"))
    scene.time_s += 550
    assert scene.cache.foreign_replica_writes(CHAT) == ((1100.0, "kubectl"),)


def test_what_was_read_by_name_is_believed_for_a_short_while() -> None:
    scene = Scene()
    child = config(3).record
    assert isinstance(child, Child)
    scene.cache.put_named(CHAT, child)
    assert scene.cache.children(CHAT) == {(Kind.CONFIG_MAP, "chat-fk-control"): child}
    scene.time_s += NAMED_S + 1
    assert scene.cache.children(CHAT) == {}


def test_what_the_server_made_of_an_apply_counts_as_what_was_asked() -> None:
    """Until it changes again: else a webhook that rewrites a field would be fought for ever."""
    scene = Scene()
    found = deployment(3)
    record = found.record
    assert isinstance(record, Workload)
    scene.cache.put(found)
    scene.cache.accept_digest(record, "asked")
    assert scene.cache.children(CHAT)[Kind.DEPLOYMENT, "chat"].digest == "asked"


def test_a_pod_deleted_by_us_counts_as_going() -> None:
    scene = Scene()
    scene.cache.put(seen("Pod", {"metadata": meta("chat-1", 3)}))
    scene.cache.deleting(CHAT, "Pod", "chat-1")
    (pod,) = scene.cache.pods(CHAT)
    assert isinstance(pod, Pod)
    assert pod.deleting


EVENTS = st.lists(
    st.tuples(st.sampled_from(["put", "gone"]), st.integers(1, 30)), min_size=1, max_size=25
)


@given(EVENTS, st.randoms(use_true_random=False))
def test_any_order_of_news_ends_in_the_newest(events: list[tuple[str, int]], order: Any) -> None:
    """Each version is one state of the object: what the greatest one says holds in the end."""
    by_version = {version: what for what, version in events}
    news = [(what, version) for version, what in by_version.items()]
    order.shuffle(news)
    scene = Scene()
    for what, version in news:
        if what == "put":
            scene.cache.put(config(version))
        else:
            scene.cache.gone(config(version))
    there = bool(scene.cache.children(CHAT))
    assert there is (by_version[max(by_version)] == "put")


@pytest.mark.parametrize(
    "status", [{}, {"observedGeneration": 1}, {"observedGeneration": 0, "url": "u"}]
)
def test_a_written_status_is_kept(status: Live) -> None:
    assert _kept(status) == status


def test_the_default_status_of_the_schema_is_none() -> None:
    """A service that nobody has written to is new, whatever the API server fills in."""
    assert _kept({"observedGeneration": 0}) == {}


def test_of_the_annotations_only_the_one_that_wakes_is_kept() -> None:
    annotations: Live = {ANNOTATION_WAKE: "7", "example.com/a": "x"}
    for found, kept in (
        (annotations, {ANNOTATION_WAKE: "7"}),
        ({ANNOTATION_WAKE: 7}, None),
        ("text", None),
    ):
        live = {"metadata": {"name": "chat", "annotations": found}, "spec": {}}
        assert pack_service(live).unpack()["metadata"].get("annotations") == kept


def _kept(status: Live) -> Any:
    live = {"metadata": {"name": "chat", "generation": 1}, "status": status}
    return pack_service(live).unpack().get("status", {})

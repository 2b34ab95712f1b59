"""What of a live object is ours, by its managedFields."""

from __future__ import annotations

from typing import Any

import pytest

from fleetkeeper.adapters.kubernetes.fields import (
    manager_of_replicas,
    owned_digest,
    owned_fields,
    project,
)
from fleetkeeper.reconcile.digest import digest_of

Live = dict[str, Any]


def entry(
    fields: Live, *, manager: str = "fleetkeeper", operation: str = "Apply", **more: Any
) -> Live:
    return {"manager": manager, "operation": operation, "fieldsV1": fields, **more}


def live_service(*entries: Live) -> Live:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": "chat",
            "labels": {"a": "1", "foreign": "x"},
            "managedFields": list(entries),
        },
        "spec": {
            "clusterIP": "10.0.0.1",
            "type": "ClusterIP",
            "selector": {"app": "chat"},
            "ports": [
                {"name": "other", "port": 81, "protocol": "TCP"},
                {"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8000},
            ],
        },
    }


OURS: Live = {
    "f:metadata": {"f:labels": {"f:a": {}}},
    "f:spec": {
        "f:selector": {},
        "f:ports": {
            'k:{"port":80,"protocol":"TCP"}': {
                ".": {},
                "f:name": {},
                "f:port": {},
                "f:protocol": {},
                "f:targetPort": {},
            }
        },
    },
}
DESIRED: Live = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "chat", "namespace": "a", "labels": {"a": "1"}},
    "spec": {
        "selector": {"app": "chat"},
        "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8000}],
    },
}


def test_the_owned_part_has_the_digest_of_what_was_applied() -> None:
    assert owned_digest(live_service(entry(OURS))) == digest_of(DESIRED)


def test_fields_of_others_do_not_count() -> None:
    live = live_service(entry(OURS), entry({"f:metadata": {"f:labels": {"f:foreign": {}}}}))
    live["metadata"]["annotations"] = {"kubectl": "was here"}
    live["spec"]["ports"].insert(0, {"port": 9000, "protocol": "TCP"})
    assert owned_digest(live) == digest_of(DESIRED)


@pytest.mark.parametrize(
    "change",
    [
        lambda live: live["spec"]["selector"].update(app="other"),
        lambda live: live["spec"]["ports"][1].update(targetPort=1),
        lambda live: live["spec"]["ports"].pop(1),
        lambda live: live["metadata"]["labels"].pop("a"),
        lambda live: live["metadata"]["managedFields"][0]["fieldsV1"].pop("f:metadata"),
    ],
)
def test_a_change_of_a_field_of_ours_changes_the_digest(change: Any) -> None:
    live = live_service(entry(OURS))
    change(live)
    assert owned_digest(live) != digest_of(DESIRED)


def test_only_our_apply_counts() -> None:
    for other in (
        entry(OURS, manager="kubectl"),
        entry(OURS, operation="Update"),
        entry(OURS, subresource="status"),
    ):
        assert owned_digest(live_service(other)) == ""
    assert owned_digest({"metadata": {}}) == ""


def test_items_of_a_set_and_whole_atomic_values() -> None:
    live = {"finalizers": ["a", "b"], "args": ["x", "y"], "map": {"k": {"deep": 1}}}
    fields: Live = {
        "f:finalizers": {'v:"b"': {}},
        "f:args": {},
        "f:map": {"f:k": {}},
        "f:absent": {},
    }
    assert project(live, fields) == {
        "finalizers": ["b"],
        "args": ["x", "y"],
        "map": {"k": {"deep": 1}},
    }


def test_owner_references_are_items_by_uid() -> None:
    mine = {"uid": "u1", "name": "chat", "controller": True}
    live = {
        "metadata": {
            "ownerReferences": [{"uid": "u0"}, mine],
            "managedFields": [entry({"f:metadata": {"f:ownerReferences": {'k:{"uid":"u1"}': {}}}})],
        }
    }
    assert owned_fields(live) == {"metadata": {"ownerReferences": [mine]}}


def test_replicas_have_a_manager() -> None:
    scale = entry(
        {"f:spec": {"f:replicas": {}}}, manager="hpa", operation="Update", subresource="scale"
    )
    ours = entry({"f:spec": {"f:replicas": {}}})
    assert manager_of_replicas({"metadata": {"managedFields": [scale]}}) == "hpa"
    assert manager_of_replicas({"metadata": {"managedFields": [scale, ours]}}) == "fleetkeeper"
    assert manager_of_replicas({"metadata": {"managedFields": [entry(OURS)]}}) == ""

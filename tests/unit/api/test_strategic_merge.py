"""The strategic merge of a podTemplate: Kubernetes' own keys, without its directives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.api.profiles.strategic_merge import MERGE_KEYS, strategic_merge
from tests.support.lanes import examples

POD: dict[str, Any] = {
    "containers": [
        {
            "name": "engine",
            "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
            "ports": [{"containerPort": 8000, "name": "http"}],
            "volumeMounts": [{"mountPath": "/tmp", "name": "tmp"}],
            "securityContext": {"capabilities": {"drop": ["ALL"]}},
        }
    ],
    "tolerations": [{"key": "gpu"}],
    "volumes": [{"name": "tmp", "emptyDir": {}}],
    "nodeSelector": {"a": "1"},
}


def engine(**fields: Any) -> dict[str, Any]:
    """A patch of the engine container."""
    return {"containers": [{"name": "engine", **fields}]}


CASES: dict[str, tuple[dict[str, Any], tuple[Any, ...], Any]] = {
    "a container is appended": (
        {"containers": [{"name": "logs", "image": "i"}]},
        ("containers",),
        [POD["containers"][0], {"name": "logs", "image": "i"}],
    ),
    "a container is merged by its name": (
        engine(tty=True),
        ("containers",),
        [{**POD["containers"][0], "tty": True}],
    ),
    "a variable is changed in its place": (
        engine(env=[{"name": "A", "value": "3"}, {"name": "C", "value": "4"}]),
        ("containers", 0, "env"),
        [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}, {"name": "C", "value": "4"}],
    ),
    "a port is merged by its number": (
        engine(ports=[{"containerPort": 8000, "hostPort": 80}]),
        ("containers", 0, "ports"),
        [{"containerPort": 8000, "name": "http", "hostPort": 80}],
    ),
    "a mount is merged by its path": (
        engine(volumeMounts=[{"mountPath": "/tmp", "readOnly": True}]),
        ("containers", 0, "volumeMounts"),
        [{"mountPath": "/tmp", "name": "tmp", "readOnly": True}],
    ),
    "a map is merged": (
        engine(securityContext={"capabilities": {"add": ["IPC_LOCK"]}}),
        ("containers", 0, "securityContext", "capabilities"),
        {"drop": ["ALL"], "add": ["IPC_LOCK"]},
    ),
    "a list of words is replaced": (
        engine(securityContext={"capabilities": {"drop": ["NET_RAW"]}}),
        ("containers", 0, "securityContext", "capabilities"),
        {"drop": ["NET_RAW"]},
    ),
    "tolerations are replaced": (
        {"tolerations": [{"key": "rdma"}]},
        ("tolerations",),
        [{"key": "rdma"}],
    ),
    "a volume is appended": (
        {"volumes": [{"name": "logs", "emptyDir": {}}]},
        ("volumes",),
        [{"name": "tmp", "emptyDir": {}}, {"name": "logs", "emptyDir": {}}],
    ),
    "labels of nodes are merged": (
        {"nodeSelector": {"b": "2"}},
        ("nodeSelector",),
        {"a": "1", "b": "2"},
    ),
    "a list that was absent is set": (
        {"initContainers": [{"name": "x"}]},
        ("initContainers",),
        [{"name": "x"}],
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_a_patch_is_merged_as_kubernetes_merges_it(what: str) -> None:
    patch, path, wanted = CASES[what]
    before, given_patch = copy.deepcopy(POD), copy.deepcopy(patch)
    found: Any = strategic_merge(POD, patch)
    for step in path:
        found = found[step]
    assert found == wanted
    assert (before, given_patch) == (POD, patch)


NAMES = st.sampled_from(["a", "b", "c", "d"])
ENTRIES = st.lists(NAMES, unique=True).map(lambda names: [{"name": name} for name in names])


@examples(100, guarded=True)
@given(original=ENTRIES, patch=ENTRIES)
def test_a_merged_list_has_each_item_once_and_keeps_the_order(
    original: list[dict[str, str]], patch: list[dict[str, str]]
) -> None:
    merged = strategic_merge({"volumes": original}, {"volumes": patch})["volumes"]
    assert merged[: len(original)] == original
    assert sorted(item["name"] for item in merged) == sorted(
        {item["name"] for item in [*original, *patch]}
    )
    assert strategic_merge({"volumes": merged}, {"volumes": patch})["volumes"] == merged


def test_the_keys_are_those_of_kubernetes() -> None:
    """As `patchMergeKey` of PodSpec and Container in k8s.io/api/core/v1 names them."""
    assert {key: MERGE_KEYS[key] for key in ("hostAliases", "topologySpreadConstraints")} == {
        "hostAliases": "ip",
        "topologySpreadConstraints": "topologyKey",
    }
    assert MERGE_KEYS["volumeDevices"] == "devicePath"
    assert "tolerations" not in MERGE_KEYS
    assert "envFrom" not in MERGE_KEYS

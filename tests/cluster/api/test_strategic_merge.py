"""Fleetkeeper's merge of a podTemplate against Kubernetes' own, which `kubectl patch --local` runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fleetkeeper.api.parse import parse_service
from fleetkeeper.api.profiles.profile import EngineProfile
from fleetkeeper.api.profiles.strategic_merge import MERGE_KEYS, strategic_merge
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.manifests.engine_pod import desired_engine_template
from fleetkeeper_local.control_plane.programs import program_path
from tests.support.reconcile.plan_world import service
from tests.support.reconcile.pod_templates import EVERY_FORM, PROFILE, RDMA_AND_LOGS

Pod = dict[str, Any]
PLACED = {
    "placement": {
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "schedulerName": "mine",
    },
    "imagePullSecrets": [{"name": "theirs"}],
    "engine": {"profile": PROFILE["name"], "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]},
}
OVER: dict[str, Any] = {
    "metadata": {"labels": {"b": "2"}},
    "spec": {
        "nodeSelector": {"rdma": "true"},
        "tolerations": [{"key": "rdma", "operator": "Exists"}],
        "schedulerName": "other",
        "imagePullSecrets": [{"name": "theirs"}, {"name": "mine"}],
        "topologySpreadConstraints": [
            {
                "topologyKey": "kubernetes.io/hostname",
                "maxSkew": 3,
                "whenUnsatisfiable": "DoNotSchedule",
            }
        ],
        "containers": [
            {"name": "first", "image": "a:1"},
            {
                "name": "engine",
                "env": [{"name": "Z", "value": "1"}, {"name": "A", "value": "2"}],
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            },
        ],
        "initContainers": [{"name": "second", "image": "a:1"}],
        "volumes": [{"name": "more", "emptyDir": {}}],
    },
}


def patched(pod: Pod, patch: Pod, tmp_path: Path) -> Pod:
    """The pod as kubectl patches it, in the form in which it writes pods."""
    file = tmp_path / "pod.json"
    metadata = {**pod["metadata"], "name": "chat"}
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "Pod", **pod, "metadata": metadata}))
    done = subprocess.run(
        [
            *(str(program_path("kubectl")), "patch", "--local", "-f", str(file), "-o", "json"),
            *("--type=strategic", f"--patch={json.dumps(patch)}"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    return {"metadata": found["metadata"], "spec": found["spec"]}


@pytest.mark.parametrize("template", [OVER, RDMA_AND_LOGS, EVERY_FORM])
def test_a_pod_is_merged_as_kubectl_merges_it(template: Pod, tmp_path: Path) -> None:
    plain = EngineProfile.model_validate(PROFILE)
    profile = EngineProfile.model_validate({**PROFILE, "podTemplate": template})
    pod = desired_engine_template(parse_service(service(**PLACED)), plain, default_context())
    written = profile.pod_template
    assert written is not None
    ours = patched(strategic_merge(pod, written), {"metadata": {}}, tmp_path)
    theirs = patched(pod, {**written}, tmp_path)
    assert in_order(ours) == in_order(theirs)
    assert ours["spec"]["containers"][0]["name"] == "engine"


def in_order(value: Any, key: str = "") -> Any:
    """A value with sorted merged lists: kubectl puts new items first, Fleetkeeper last."""
    if isinstance(value, dict):
        return {name: in_order(item, name) for name, item in value.items()}
    if isinstance(value, list):
        items = [in_order(item) for item in value]
        by = MERGE_KEYS.get(key)
        return sorted(items, key=lambda item: item[by]) if by else items
    return value

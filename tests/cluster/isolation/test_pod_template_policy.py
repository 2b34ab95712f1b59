"""The chart's admission policy and podTemplates: closed by default, opened by values one by one."""

from __future__ import annotations

import copy
import json
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleetkeeper.api.profiles.profile import EngineProfile, ProfileCatalog
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.manifests.children import desired_children
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.chart.helm_chart import rendered
from tests.support.guards import GUARD_S
from tests.support.plane.dry_run import refusal
from tests.support.plane.plane_state import claim_namespace
from tests.support.reconcile.golden_services import CASES
from tests.support.reconcile.pod_templates import LOGS_IMAGE, PROFILE, RDMA_AND_LOGS

PAGE = Path(__file__).parents[3] / "docs" / "engine-profiles.md"
KINDS = {
    "ServiceAccount",
    "ClusterRole",
    "ClusterRoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}
OPENED: dict[str, Any] = {
    "extraImages": [LOGS_IMAGE],
    "podTemplates": {
        "containers": ["logs"],
        "rootContainers": ["engine"],
        "capabilities": ["IPC_LOCK"],
        "hostNetwork": True,
        "configMaps": ["vllm-logging"],
        "secrets": ["logs-token"],
        "hostPaths": ["/dev/infiniband"],
        "csiDrivers": ["secrets.example.com"],
        "volumeTypes": ["nfs"],
    },
}
Manifest = dict[str, Any]


class Account:
    """The operator's account of an installation with its own policies."""

    def __init__(self, plane: ControlPlane, values: Manifest) -> None:
        self.plane = plane
        self.name = f"opened-{secrets.token_hex(3)}"
        claim_namespace(plane, self.name)
        profile = {key: item for key, item in PROFILE.items() if key != "name"}
        profile["podTemplate"] = WRITTEN
        usual = {"fullnameOverride": self.name, "engineProfiles": {PROFILE["name"]: profile}}
        self.objects = [
            item
            for item in rendered({**usual, **values}, namespace=self.name)
            if item["kind"] in KINDS
            and "helm.sh/hook" not in item["metadata"].get("annotations", {})
        ]
        plane.kubectl(
            "apply",
            "--server-side",
            "-f",
            "-",
            input=json.dumps({"apiVersion": "v1", "kind": "List", "items": self.objects}),
        )
        self.kubeconfig: Path = plane.service_account_kubeconfig(self.name, self.name)

    def says(self, manifest: Manifest) -> str:
        """What the API server answers to a write; nothing is kept."""
        manifest["metadata"]["namespace"] = self.name
        return refusal(self.plane, self.kubeconfig, manifest)

    def enforced(self) -> None:
        """Wait until the policy is in force: the API server says nowhere when it is."""
        end = time.monotonic() + GUARD_S
        while "denied request" not in self.says(deployment({"spec": {"volumes": HOST_PATH["/"]}})):
            assert time.monotonic() < end, "the policy is not in force"
            time.sleep(0.2)

    def remove(self) -> None:
        made = [
            f"{item['kind']}/{item['metadata']['name']}"
            for item in self.objects
            if item["kind"] != "ServiceAccount"
        ]
        self.plane.kubectl("delete", *made)
        self.plane.kubectl("delete", "namespace", self.name, "--wait=false")


HOST_PATH = {path: [{"name": "x", "hostPath": {"path": path}}] for path in ("/", "/dev/infiniband")}


@pytest.fixture(scope="module")
def closed(control_plane: ControlPlane) -> Iterator[Account]:
    """The policy as the chart installs it, except for the image, which another rule is about."""
    account = Account(control_plane, {"admissionPolicy": {"extraImages": [LOGS_IMAGE]}})
    try:
        account.enforced()
        yield account
    finally:
        account.remove()


@pytest.fixture(scope="module")
def opened(control_plane: ControlPlane) -> Iterator[Account]:
    """The policy with an exception for each thing that the cases need."""
    account = Account(control_plane, {"admissionPolicy": OPENED})
    try:
        account.enforced()
        yield account
    finally:
        account.remove()


def _is_engines(item: Manifest) -> bool:
    return bool(item["kind"] == "Deployment" and item["metadata"]["name"] == "chat")


def deployment(template: Manifest) -> Manifest:
    """The Deployment of the engines with this podTemplate."""
    return deployment_of({**PROFILE, "podTemplate": template})


def deployment_of(profile_text: Manifest) -> Manifest:
    """The Deployment of the engines with this profile."""
    profile = EngineProfile.model_validate(profile_text)
    context = replace(default_context(), catalog=ProfileCatalog(profiles=(profile,)))
    service = CASES["minimal-cuda"].service()
    children = desired_children(service, profile, context, replicas=1)
    (found,) = (item for item in children if _is_engines(item))
    return copy.deepcopy(found)


def logs(**fields: Any) -> Manifest:
    """A podTemplate with the container that reads logs, and changed fields of it."""
    container = copy.deepcopy(RDMA_AND_LOGS["spec"]["containers"][1])
    del container["volumeMounts"]
    return {"spec": {"containers": [{**container, **fields}]}}


def an_engine(**fields: Any) -> Manifest:
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


ROOT = {"runAsUser": 0, "runAsNonRoot": False}
SECRET = {"valueFrom": {"secretKeyRef": {"name": "logs-token", "key": "t"}}}
CONFIG = {"valueFrom": {"configMapKeyRef": {"name": "vllm-logging", "key": "t"}}}
NEEDS: dict[str, tuple[Manifest, str]] = {
    "everything of the example": (RDMA_AND_LOGS, "podTemplates"),
    "an added container": (logs(), "podTemplates.containers"),
    "its hook": (
        logs(args=[], lifecycle={"preStop": {"exec": {"command": ["sync"]}}}),
        "podTemplates.containers",
    ),
    "a capability": (
        an_engine(securityContext={"capabilities": {"add": ["IPC_LOCK"]}}),
        "podTemplates",
    ),
    "root": (an_engine(securityContext=ROOT), "podTemplates"),
    "the node's network": ({"spec": {"hostNetwork": True}}, "podTemplates.hostNetwork"),
    "a ConfigMap": (
        {"spec": {"volumes": [{"name": "x", "configMap": {"name": "vllm-logging"}}]}},
        "podTemplates",
    ),
    "a Secret": (
        {"spec": {"volumes": [{"name": "x", "secret": {"secretName": "logs-token"}}]}},
        "podTemplates",
    ),
    "a variable from a Secret": (an_engine(env=[{"name": "A", **SECRET}]), "podTemplates"),
    "a variable from a ConfigMap": (an_engine(env=[{"name": "A", **CONFIG}]), "podTemplates"),
    "a path on the node": ({"spec": {"volumes": HOST_PATH["/dev/infiniband"]}}, "podTemplates"),
    "a CSI volume": (
        {"spec": {"volumes": [{"name": "x", "csi": {"driver": "secrets.example.com"}}]}},
        "podTemplates",
    ),
    "a volume of another type": (
        {"spec": {"volumes": [{"name": "x", "nfs": {"server": "nfs.example.com", "path": "/m"}}]}},
        "podTemplates",
    ),
}


@pytest.mark.parametrize("what", NEEDS)
def test_what_a_template_adds_is_refused_unless_values_open_it(
    closed: Account, opened: Account, what: str
) -> None:
    template, names = NEEDS[what]
    said = closed.says(deployment(template))
    assert "denied request" in said, said
    assert names in said
    assert opened.says(deployment(template)) == ""


WRITTEN: Manifest = copy.deepcopy(RDMA_AND_LOGS)
"""The podTemplate in the values: the policy knows names and values of variables from there."""
WRITTEN["spec"]["containers"][0]["env"].append({"name": "A", **SECRET})
WRITTEN["spec"]["volumes"] += [
    {"name": "x", "image": {"reference": "registry.example.com/plugins:1"}},
    {"name": "y", "persistentVolumeClaim": {"claimName": "plugins"}},
]
FREE: dict[str, Manifest] = {
    "devices": an_engine(resources={"limits": {"rdma/hca": 1}, "requests": {"rdma/hca": 1}}),
    "an emptyDir": {"spec": {"volumes": [{"name": "x", "emptyDir": {}}]}},
    "an image": {
        "spec": {
            "volumes": [{"name": "x", "image": {"reference": "registry.example.com/plugins:1"}}]
        }
    },
    "an image in a path of Python": {
        "spec": {
            "containers": [{"name": "engine", "volumeMounts": [{"name": "x", "mountPath": "/p"}]}],
            "volumes": [{"name": "x", "image": {"reference": "registry.example.com/plugins:1"}}],
        }
    },
    "a claim in another path": {
        "spec": {
            "containers": [{"name": "engine", "volumeMounts": [{"name": "x", "mountPath": "/p"}]}],
            "volumes": [{"name": "x", "persistentVolumeClaim": {"claimName": "plugins"}}],
        }
    },
    "a variable with its value": an_engine(env=[{"name": "NCCL_IB_HCA", "value": "mlx5_0"}]),
    "placement": {
        "metadata": {"labels": {"team": "a"}},
        "spec": {"schedulerName": "x", "runtimeClassName": "nvidia", "priorityClassName": "high"},
    },
}


@pytest.mark.parametrize("what", FREE)
def test_what_needs_no_rights_is_open(closed: Account, what: str) -> None:
    said = closed.says(deployment(FREE[what]))
    assert "denied request" not in said
    assert said == "" or "runtimeclass" in said.lower() or "priority" in said.lower()


STILL_CLOSED: dict[str, Manifest] = {
    "another capability": an_engine(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
    "privileges": an_engine(
        securityContext={"privileged": True, "allowPrivilegeEscalation": True}
    ),
    "another image": logs(image="evil.example.com/miner:1"),
    "another container": logs(name="other"),
    "root in another container": logs(securityContext={**ROOT, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}),
    "another image by its tag": {
        "spec": {"volumes": [{"name": "x", "image": {"reference": "registry.example.com/plugins:2"}}]}
    },
    "another variable": an_engine(env=[{"name": "PLUGINS", "value": "x"}]),
    "a variable with another source": an_engine(env=[{"name": "A", "value": "x"}]),
    "another annotation": {"metadata": {"annotations": {"example.com/other": ""}}},
    "the host's processes on Windows": {
        "spec": {"hostNetwork": True, "securityContext": {"windowsOptions": {"hostProcess": True}}}
    },
    "another path": {"spec": {"volumes": HOST_PATH["/"]}},
    "another Secret": {"spec": {"volumes": [{"name": "x", "secret": {"secretName": "other"}}]}},
    "another ConfigMap": {"spec": {"volumes": [{"name": "x", "configMap": {"name": "other"}}]}},
    "another driver": {"spec": {"volumes": [{"name": "x", "csi": {"driver": "other"}}]}},
    "a token": {
        "spec": {
            "volumes": [
                {"name": "x", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}
            ]
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("what", STILL_CLOSED)
def test_what_no_value_names_stays_closed(opened: Account, what: str) -> None:
    assert "denied request" in opened.says(deployment(STILL_CLOSED[what]))


def test_an_engine_without_a_template_passes_both(closed: Account, opened: Account) -> None:
    for account in (closed, opened):
        assert account.says(deployment({})) == ""


def test_an_engine_runs_nothing_but_the_supervisor(opened: Account) -> None:
    """Also if somebody could change the Deployment past the profile."""
    found = deployment({})
    found["spec"]["template"]["spec"]["containers"][0]["command"] = ["sh", "-c", "id"]
    assert "podTemplates.containers" in opened.says(found)


def shown_values() -> list[Manifest]:
    """The values of the chart that the page about profiles shows, with a policy."""
    blocks = re.findall(r"^```yaml$(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [values for text in blocks if "admissionPolicy" in (values := yaml.safe_load(text))]


@pytest.mark.parametrize(
    "values", shown_values(), ids=lambda values: next(iter(values["engineProfiles"]))
)
def test_values_that_the_page_shows_open_what_their_profile_needs(
    control_plane: ControlPlane, values: Manifest
) -> None:
    ((name, profile),) = values["engineProfiles"].items()
    account = Account(control_plane, values)
    try:
        account.enforced()
        assert account.says(deployment_of({**profile, "name": name})) == ""
    finally:
        account.remove()


def test_the_page_shows_two_templates() -> None:
    assert len(shown_values()) == 2

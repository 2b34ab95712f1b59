"""What a stolen operator account may do, on a real API server with the chart's admission policies."""

from __future__ import annotations

import copy
import json
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetkeeper.api.profiles.metadata_names import DEFAULT_ALLOWED
from fleetkeeper.api.profiles.profile import EngineProfile
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.manifests.children import desired_children
from fleetkeeper.reconcile.manifests.engine_pod import desired_engine_template
from fleetkeeper_local.control_plane.access import KubectlError
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.chart.helm_chart import rendered
from tests.support.guards import GUARD_S
from tests.support.plane.dry_run import refusal
from tests.support.plane.plane_state import claim_namespace
from tests.support.reconcile.dangerous_metadata import ANNOTATIONS, LABELS
from tests.support.reconcile.golden_services import CASES
from tests.support.reconcile.pod_templates import PROFILE
from tests.support.reconcile.random_specs import random_services
from tests.unit.isolation.test_engine_env import REFUSED

INSTALLED = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding"}
POLICIES = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
OTHER_CHART_SETTINGS = {"namespaced-install"}
"""Golden cases of a namespaced installation, which has no policies: a Role in place of the ClusterRole."""
GOLDEN_METADATA = ("azure.workload.identity/use", "sidecar.istio.io/inject")
HUB = {"HF_ENDPOINT": "https://hub.example.com"}
ARGUMENT = '--compilation-config={"mode":3,"a":"<\u00e9>"}'
ARGUMENTS = {key: item for key, item in PROFILE.items() if key != "name"}
CODE = f"evil.example.com/code@sha256:{'e' * 64}"
DOCUMENT = "FLEETKEEPER_ENGINE"
RELEASE = f"stolen-{secrets.token_hex(3)}"
"""The namespace of the release."""
Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def account(control_plane: ControlPlane) -> Iterator[Path]:
    """The kubeconfig of the operator's account; the policies are in force when a test begins."""
    for namespace in (RELEASE, "team-a"):
        claim_namespace(control_plane, namespace)
    objects = [
        item
        for item in rendered(
            {
                "gateway": {"enabled": True},
                "engineServiceAccounts": ["model-*", "reader"],
                "exposedServiceTypes": ["LoadBalancer"],
                "simulatedEngines": True,
                "podMetadataNames": [*DEFAULT_ALLOWED, *GOLDEN_METADATA],
                "engineProfiles": {
                    "cpu-0.32.0-1": {"variables": HUB},
                    "cuda-0.32.0-1": {
                        "objectStorage": {"endpoint": "https://minio.storage.svc:9000"},
                        "variables": HUB,
                    },
                    "cuda-0.32.0-2": {**ARGUMENTS, "extraArguments": [ARGUMENT]},
                },
            },
            namespace=RELEASE,
        )
        if item["kind"] in INSTALLED | POLICIES
        and "gateway" not in item["metadata"]["name"]
        and "helm.sh/hook" not in item["metadata"].get("annotations", {})
    ]
    apply(control_plane, {"apiVersion": "v1", "kind": "List", "items": objects})
    kubeconfig = control_plane.service_account_kubeconfig(RELEASE, "fleetkeeper")
    policies = [item for item in objects if item["kind"] in POLICIES]
    try:
        for probe in (foreign(), privileged(), child("ConfigMap", name="other")):
            _await_refusal(control_plane, kubeconfig, probe)
        yield kubeconfig
    finally:
        for item in policies:
            control_plane.kubectl("delete", item["kind"], item["metadata"]["name"])
        control_plane.kubectl("delete", "clusterrolebinding", "fleetkeeper")
        control_plane.kubectl("delete", "namespace", RELEASE, "team-a", "--wait=false")


def apply(
    plane: ControlPlane, manifest: Manifest, *more: str, kubeconfig: Path | None = None
) -> None:
    """Server-side apply."""
    arguments = ("apply", "--server-side", "--force-conflicts", *more, "-f", "-")
    plane.kubectl(*arguments, input=json.dumps(manifest), kubeconfig=kubeconfig)


def _await_refusal(plane: ControlPlane, kubeconfig: Path, probe: Manifest) -> None:
    """Waits until a policy is in force: the API server says nowhere when it is."""
    end = time.monotonic() + GUARD_S
    while not refusal(plane, kubeconfig, probe):
        assert time.monotonic() < end, "a policy is not in force"
        time.sleep(0.2)


def children() -> Iterator[Manifest]:
    """Children of the golden services and of random ones, as the operator writes them."""
    for name, case in CASES.items():
        if name not in OTHER_CHART_SETTINGS:
            yield from case.children()
            yield from case.children(router=case.vllm_router)
            yield case.prefetch_job()
    context = default_context()
    profile = context.catalog.resolve("cuda")
    for service in random_services(seed=18, count=25):
        yield from desired_children(service, profile, context, replicas=2)


def child(kind: str, *, name: str = "", component: str = "") -> Manifest:
    """A child of a usual service, free to be changed."""
    case = CASES["everything"]
    for item in case.children(router=case.vllm_router):
        labels = item["metadata"]["labels"]
        if item["kind"] == kind and component in {"", labels["fleetkeeper.io/component"]}:
            found = copy.deepcopy(item)
            found["metadata"]["name"] = name or found["metadata"]["name"]
            return found
    raise AssertionError(kind)


def engine(change: Callable[[Manifest], None]) -> Manifest:
    """The engine Deployment of minimal-cuda with its pod's spec changed."""
    (found,) = (
        copy.deepcopy(item)
        for item in CASES["minimal-cuda"].children()
        if item["kind"] == "Deployment" and item["metadata"]["name"] == "chat"
    )
    change(found["spec"]["template"]["spec"])
    return found


def job(change: Callable[[Manifest], None]) -> Manifest:
    """The Job that downloads the model of minimal-cuda, with its pod's spec changed."""
    found = CASES["minimal-cuda"].prefetch_job()
    change(found["spec"]["template"]["spec"])
    return found


def privileged() -> Manifest:
    return engine(first(securityContext={"privileged": True}))


def foreign() -> Manifest:
    """A Deployment as anybody makes one."""
    found = _without_owner(engine(lambda _: None))
    del found["metadata"]["labels"]
    return found


def first(**fields: Any) -> Callable[[Manifest], None]:
    return lambda pod: pod["containers"][0].update(fields)


def pod(**fields: Any) -> Callable[[Manifest], None]:
    return lambda spec: spec.update(fields)


def variable(name: str, value: str = "x", **entry: Any) -> Callable[[Manifest], None]:
    """Add or replace a variable of the engine."""
    given = entry or {"value": value}

    def change(spec: Manifest) -> None:
        env = spec["containers"][0]["env"]
        env[:] = [item for item in env if item["name"] != name] + [{"name": name, **given}]

    return change


def document(old: str, new: str) -> Callable[[Manifest], None]:
    """Replace a part of the engine's document."""

    def change(spec: Manifest) -> None:
        (entry,) = (item for item in spec["containers"][0]["env"] if item["name"] == DOCUMENT)
        assert old in entry["value"]
        entry["value"] = entry["value"].replace(old, new, 1)

    return change


def mounted(path: str, *, read_only: bool = True, **source: Any) -> Callable[[Manifest], None]:
    """Mount a volume in the engine."""

    def change(spec: Manifest) -> None:
        spec["volumes"].append({"name": "x", **source})
        mount = {"name": "x", "mountPath": path, "readOnly": read_only}
        spec["containers"][0]["volumeMounts"].append(mount)

    return change


def secured(**fields: Any) -> Callable[[Manifest], None]:
    return lambda spec: spec["containers"][0]["securityContext"].update(fields)


def secured_pod(**fields: Any) -> Callable[[Manifest], None]:
    return lambda spec: spec["securityContext"].update(fields)


def volume(**source: Any) -> Callable[[Manifest], None]:
    return lambda spec: spec["volumes"].append({"name": "x", **source})


def test_every_child_that_the_operator_writes_passes(
    control_plane: ControlPlane, account: Path
) -> None:
    items = sorted({json.dumps(item, sort_keys=True) for item in children()})
    assert len(items) > 300
    for begin in range(0, len(items), 50):  # each call has its own time limit, for a busy machine
        some = items[begin : begin + 50]
        said = control_plane.kubectl(
            *("apply", "--server-side", "--dry-run=server", "-f", "-"),
            input="\n---\n".join(some),
            kubeconfig=account,
        )
        assert said.count("serverside-applied") == len(some)


PODS: dict[str, tuple[Callable[[Manifest], None], str]] = {
    "another image": (first(image="evil.example.com/miner:1"), "admissionPolicy.extraImages"),
    "another command": (first(command=["sh", "-c", "id"]), "only run the router"),
    "arguments": (first(args=["--allow-anything"]), "only run the router"),
    "a hook": (
        first(lifecycle={"postStart": {"exec": {"command": ["sh"]}}}),
        "hooks and probes",
    ),
    "a probe": (first(livenessProbe={"exec": {"command": ["sh"]}}), "hooks and probes"),
    "privileges": (
        first(securityContext={"privileged": True, "capabilities": {"drop": ["ALL"]}}),
        "privileges",
    ),
    "a capability": (
        first(
            securityContext={
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]},
            }
        ),
        "capabilities",
    ),
    "root": (pod(securityContext={"runAsUser": 0}), "non-root"),
    "the node's network": (pod(hostNetwork=True), "host namespaces"),
    "the node's processes": (pod(hostPID=True), "host namespaces"),
    "a host path": (volume(hostPath={"path": "/"}), "volumes may only"),
    "a Secret as a volume": (volume(secret={"secretName": "any"}), "volumes may only"),
    "a token as a volume": (
        volume(projected={"sources": [{"serviceAccountToken": {"path": "t"}}]}),
        "volumes may only",
    ),
    "a Secret as variables": (
        first(envFrom=[{"secretRef": {"name": "any"}}]),
        "may come from Secrets",
    ),
    "a Secret as a variable": (
        first(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]),
        "may come from Secrets",
    ),
    "a Secret as a tuning variable": (
        first(env=[{"name": "NCCL_*", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]),
        "may come from Secrets",
    ),
    "another account": (
        pod(serviceAccountName="admin", automountServiceAccountToken=True),
        "earlier release may have",
    ),
    "the account of a router": (
        pod(serviceAccountName="chat-fk-router", automountServiceAccountToken=True),
        "earlier release may have",
    ),
    "an account that is not allowed": (pod(serviceAccountName="reader-2"), "engineServiceAccounts"),
    "an account that begins like none": (
        pod(serviceAccountName="a-model"),
        "engineServiceAccounts",
    ),
    "an allowed account with its token": (
        pod(serviceAccountName="reader", automountServiceAccountToken=True),
        "earlier release may have",
    ),
    "a node": (pod(nodeName="node-a"), "nodeName"),
    "a type of SELinux": (secured(seLinuxOptions={"type": "spc_t"}), "SELinux"),
    "a user of SELinux": (secured_pod(seLinuxOptions={"user": "system_u"}), "SELinux"),
    "a role of SELinux": (secured(seLinuxOptions={"role": "system_r"}), "SELinux"),
    "no AppArmor": (secured(appArmorProfile={"type": "Unconfined"}), "AppArmor"),
    "no AppArmor in the pod": (secured_pod(appArmorProfile={"type": "Unconfined"}), "AppArmor"),
    "a working directory": (first(workingDir="/models/llama"), "only run the router"),
    "another home": (variable("HOME", "/models/x"), "variables must be"),
    "another cache": (variable("HF_HOME", "/models/x"), "variables must be"),
    "another hub": (variable("HF_ENDPOINT", "https://evil.example.com"), "variables must be"),
    "another storage": (variable("AWS_ENDPOINT_URL", "https://e.example.com"), "variables must"),
    "a home from a field": (
        variable("HOME", valueFrom={"fieldRef": {"fieldPath": "metadata.name"}}),
        "variables must be",
    ),
    "a variable in another container": (
        lambda spec: spec["initContainers"][0].update(env=[{"name": "LD_PRELOAD", "value": "x"}]),
        "variables must be",
    ),
    "a document from a field": (
        variable(DOCUMENT, valueFrom={"fieldRef": {"fieldPath": "metadata.annotations['a']"}}),
        "extraArguments",
    ),
    "arguments of vLLM": (
        document('"options":{}', '"options":{},"profile":{"extraArguments":["--a"],"name":"a"}'),
        "extraArguments",
    ),
    "arguments of vLLM by another name": (
        document('"options":{}', '"options":{},"profile":{"extra_arguments":["--a"],"name":"a"}'),
        "extraArguments",
    ),
    "arguments of vLLM with an escape": (
        document(
            '"options":{}', '"options":{},"profile":{"extra\\u0041rguments":["--a"],"name":"a"}'
        ),
        "extraArguments",
    ),
    "arguments of vLLM beside those of a profile": (
        document(
            '"options":{}',
            '"options":{},"profile":{"extraArguments":["--a"],"name":"a",'
            f'"b":[{{"extraArguments":[{json.dumps(ARGUMENT)}]}}]}}',
        ),
        "extraArguments",
    ),
    "a document from another variable": (
        document('"options":{}', "$(NCCL_HOSTID)"),
        "extraArguments",
    ),
    "an image by its tag": (
        mounted("/images/a", image={"reference": "registry.example.com/code:1"}),
        "images by digest",
    ),
    "an image in a path of Python": (
        mounted("/usr/lib/python3/dist-packages", image={"reference": CODE}),
        "must be mounted in",
    ),
    "an image in the home": (
        mounted("/home/engine/.local", image={"reference": CODE}),
        "mounted in",
    ),
    "an image by a detour": (
        mounted("/images/../home/engine", image={"reference": CODE}),
        "must be mounted in",
    ),
    "an image that is written to": (
        mounted("/images/a", read_only=False, image={"reference": CODE}),
        "must be mounted in",
    ),
    "a claim in a path of Python": (
        mounted("/opt/x", persistentVolumeClaim={"claimName": "a"}),
        "must be mounted in",
    ),
    "a control ConfigMap in another path": (
        mounted("/home/engine/.local", configMap={"name": "mine-fk-control"}),
        "must be mounted in",
    ),
    "system priority": (pod(priorityClassName="system-node-critical"), "system PriorityClasses"),
}


@pytest.mark.promise("variables-from-secrets", "admission-policies")
@pytest.mark.parametrize("what", PODS)
def test_a_pod_with_more_than_an_engine_has_is_refused(
    control_plane: ControlPlane, account: Path, what: str
) -> None:
    change, words = PODS[what]
    said = refusal(control_plane, account, engine(change))
    assert "denied request" in said, said
    assert words in said


@pytest.mark.promise("admission-policies")
@pytest.mark.parametrize("name", [*REFUSED, "PATH", "BASH_ENV", "NCCL_NEW", "VLLM_LOGGING_LEVEL"])
def test_a_variable_that_no_profile_allows_is_refused(
    control_plane: ControlPlane, account: Path, name: str
) -> None:
    """What loads code or redirects Secrets, and what nobody knows."""
    for change in (variable(name), variable(name, "")):
        said = refusal(control_plane, account, engine(change))
        assert "denied request" in said, said
        assert "variables must be those" in said


ALLOWED: dict[str, Callable[[Manifest], None]] = {
    "a tuning variable": variable("NCCL_DEBUG", "INFO"),
    "a proxy": variable("HTTPS_PROXY", "http://proxy:3128"),
    "the profile's hub": variable("HF_ENDPOINT", HUB["HF_ENDPOINT"]),
    "a model's image": mounted("/images/a", image={"reference": CODE}),
    "a claim": mounted("/models/a", persistentVolumeClaim={"claimName": "a"}),
    "SELinux as containers have it": secured(seLinuxOptions={"type": "container_t"}),
}


@pytest.mark.parametrize("what", ALLOWED)
def test_what_an_engine_may_have_passes(
    control_plane: ControlPlane, account: Path, what: str
) -> None:
    assert refusal(control_plane, account, engine(ALLOWED[what])) == ""


def test_the_arguments_of_a_profile_pass_as_they_are(
    control_plane: ControlPlane, account: Path
) -> None:
    """Written by the operator's own code, with characters that JSON and YAML escape."""
    profile = EngineProfile.model_validate({**PROFILE, "extraArguments": [ARGUMENT]})
    template = desired_engine_template(CASES["minimal-cuda"].service(), profile, default_context())
    found = engine(lambda _: None)
    found["spec"]["template"] = template
    assert refusal(control_plane, account, found) == ""
    env = template["spec"]["containers"][0]["env"]
    (entry,) = (item for item in env if item["name"] == DOCUMENT)
    entry["value"] = entry["value"].replace("mode", "node")
    assert "extraArguments" in refusal(control_plane, account, found)


@pytest.mark.promise("admission-policies")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind, names in (("annotations", ANNOTATIONS), ("labels", LABELS))
        for name in names
        if name not in GOLDEN_METADATA
    ],
)
def test_an_instruction_to_another_program_is_refused(
    control_plane: ControlPlane, account: Path, kind: str, name: str
) -> None:
    found = engine(lambda _: None)
    found["spec"]["template"]["metadata"][kind][name] = {**ANNOTATIONS, **LABELS}[name]
    said = refusal(control_plane, account, found)
    assert "podMetadataNames" in said, said


def test_what_others_added_to_a_deployment_stays(
    control_plane: ControlPlane, account: Path
) -> None:
    """Before an upgrade of the chart, or with another account: the operator's writes go on."""
    found = engine(variable("STAKATER_CHAT_SECRET", "1"))
    found["spec"]["template"]["metadata"]["annotations"]["example.com/reloaded-at"] = "1"
    # Without an owner, which does not exist: the garbage collector would delete it.
    apply(control_plane, _without_owner(copy.deepcopy(found)))
    try:
        found["spec"]["replicas"] = 2
        assert refusal(control_plane, account, found) == ""
        found["spec"]["template"]["metadata"]["annotations"]["example.com/reloaded-at"] = "2"
        assert "podMetadataNames" in refusal(control_plane, account, found)
    finally:
        control_plane.kubectl("-n", "team-a", "delete", "deployment", "chat")


def test_a_router_of_an_earlier_release_can_be_scaled(
    control_plane: ControlPlane, account: Path
) -> None:
    """An upgrade keeps its image, which no value of the chart names any more."""
    found = engine(first(image="registry.example.com/router:earlier"))
    apply(control_plane, _without_owner(copy.deepcopy(found)))
    try:
        found["spec"]["replicas"] = 2
        assert refusal(control_plane, account, found) == ""
        found["spec"]["template"]["spec"]["containers"][0]["image"] = "evil.example.com/miner:1"
        assert "admissionPolicy.extraImages" in refusal(control_plane, account, found)
    finally:
        control_plane.kubectl("-n", "team-a", "delete", "deployment", "chat")


JOBS: dict[str, tuple[Callable[[Manifest], None], str]] = {
    "another image": (first(image="evil.example.com/miner:1"), "admissionPolicy.extraImages"),
    "another command": (first(command=["sh", "-c", "id"]), "only download models"),
    "the supervisor itself": (first(command=["fleetkeeper-engine"]), "only download models"),
    "a router": (first(command=["vllm-router"]), "only download models"),
    "arguments": (first(args=["--allow-anything"]), "only download models"),
    "a working directory": (first(workingDir="/models/llama"), "only download models"),
    "a variable": (variable("PYTHONPATH", "/models"), "variables must be"),
    "an accelerator": (
        first(resources={"limits": {"nvidia.com/gpu": "1"}}),
        "only download models",
    ),
    "a second container": (
        lambda spec: spec["containers"].append({**spec["containers"][0], "name": "second"}),
        "only download models",
    ),
    "the node's network": (pod(hostNetwork=True), "host namespaces"),
    "a Secret as a volume": (volume(secret={"secretName": "any"}), "volumes may only"),
    "a router's account": (
        pod(serviceAccountName="chat-fk-router", automountServiceAccountToken=True),
        "earlier release may have",
    ),
}


@pytest.mark.parametrize("what", JOBS)
def test_a_job_that_does_more_than_download_a_model_is_refused(
    control_plane: ControlPlane, account: Path, what: str
) -> None:
    change, words = JOBS[what]
    said = refusal(control_plane, account, job(change))
    assert "denied request" in said, said
    assert words in said


def test_a_job_has_a_name_and_a_deadline_of_ours(
    control_plane: ControlPlane, account: Path
) -> None:
    """And no engine runs the command of a Job."""
    named = job(lambda _: None)
    named["metadata"]["name"] = "miner"
    endless = job(lambda _: None)
    del endless["spec"]["activeDeadlineSeconds"]
    many = job(lambda _: None)
    many["spec"] |= {"parallelism": 5, "completions": 5}
    fetching = engine(first(command=["fleetkeeper-engine", "fetch"]))
    for manifest in (named, endless, many, fetching, _without_owner(job(lambda _: None))):
        assert "denied request" in refusal(control_plane, account, manifest)


@pytest.mark.promise("service-accounts")
@pytest.mark.parametrize("name", ["reader", "model-reader", "model-a.b", "default"])
def test_an_engine_may_use_an_account_that_the_chart_allows(
    control_plane: ControlPlane, account: Path, name: str
) -> None:
    assert refusal(control_plane, account, engine(pod(serviceAccountName=name))) == ""


def _without_owner(item: Manifest) -> Manifest:
    del item["metadata"]["ownerReferences"]
    return item


def _role(item: Manifest) -> Manifest:
    item["subjects"] = [{"kind": "ServiceAccount", "name": "mine", "namespace": "team-a"}]
    return item


def _everybodys(item: Manifest) -> Manifest:
    item["spec"]["podSelector"] = {}
    return item


def _selector(item: Manifest) -> Manifest:
    item["spec"]["selector"] = {"app": "bank"}
    return item


def _node_port(item: Manifest) -> Manifest:
    item["spec"]["type"] = "NodePort"
    return item


OBJECTS: dict[str, tuple[Manifest, str]] = {
    "a Deployment without our labels": (foreign(), "must have the labels"),
    "a Deployment of no service": (_without_owner(engine(lambda _: None)), "as their controller"),
    "a ConfigMap of another name": (child("ConfigMap", name="kube-root"), "control ConfigMaps"),
    "a ServiceAccount of another name": (child("ServiceAccount", name="x"), "those of routers"),
    "a RoleBinding to another account": (_role(child("RoleBinding")), "the router role"),
    "a NetworkPolicy for all pods": (
        _everybodys(child("NetworkPolicy")),
        "select the pods of an InferenceService",
    ),
    "a Service of a type that is not allowed": (
        _node_port(child("Service", component="router")),
        "exposedServiceTypes",
    ),
    "a Service for other pods": (
        _selector(child("Service", component="router")),
        "select the pods of an InferenceService",
    ),
}


@pytest.mark.promise("exposed-services")
@pytest.mark.parametrize("what", OBJECTS)
def test_an_object_that_is_no_child_of_a_service_is_refused(
    control_plane: ControlPlane, account: Path, what: str
) -> None:
    manifest, words = OBJECTS[what]
    said = refusal(control_plane, account, manifest)
    assert "denied request" in said, said
    assert words in said


def marks(namespace: str = RELEASE, name: str = "fleetkeeper-wake-marks", **more: Any) -> Manifest:
    """The ConfigMap of wake marks as the operator creates it."""
    place = {"namespace": namespace, "name": name}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": place, **more}


def test_wake_marks_may_be_created_without_content_and_never_changed(
    control_plane: ControlPlane, account: Path
) -> None:
    written = marks(data={"uid": "7.realtime"})
    assert refusal(control_plane, account, marks()) == ""
    for other in (marks("team-a"), marks(name="other"), written, marks(binaryData={"a": ""})):
        assert "ValidatingAdmissionPolicy" in refusal(control_plane, account, other)
    apply(control_plane, marks())
    assert "ValidatingAdmissionPolicy" in refusal(control_plane, account, written)


@pytest.mark.promise("admission-policies")
def test_objects_of_others_are_neither_changed_nor_deleted(
    control_plane: ControlPlane, account: Path
) -> None:
    """Taking one over by adding our labels is a change of a foreign object too."""
    apply(control_plane, foreign())
    where = ("-n", "team-a", "deployment", "chat")
    takes_over = engine(lambda _: None)
    assert "app.kubernetes.io/managed-by=fleetkeeper or" in refusal(
        control_plane, account, takes_over
    )
    with pytest.raises(KubectlError, match=r"app\.kubernetes\.io/managed-by=fleetkeeper or"):
        control_plane.kubectl("delete", *where, kubeconfig=account)
    control_plane.kubectl("delete", *where)


@pytest.mark.promise("admission-policies")
def test_a_running_pod_keeps_its_image(control_plane: ControlPlane, account: Path) -> None:
    """The right to mark pods is no right to change what they run."""
    labels = {"app.kubernetes.io/managed-by": "fleetkeeper", "fleetkeeper.io/service": "chat"}
    name = f"chat-{secrets.token_hex(3)}"
    made: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "team-a", "labels": labels},
        "spec": {"containers": [{"name": "engine", "image": "a:1"}]},
    }
    control_plane.kubectl("create", "-f", "-", input=json.dumps(made))
    about: Manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {**made["metadata"]}}
    about["metadata"]["annotations"] = {"controller.kubernetes.io/pod-deletion-cost": "5"}
    apply(control_plane, about, kubeconfig=account)
    about["spec"] = {"containers": [{"name": "engine", "image": "evil:1"}]}
    assert "only the metadata" in refusal(control_plane, account, about)
    control_plane.kubectl("-n", "team-a", "delete", "pod", name, "--force")


def test_nobody_else_is_held_to_it(control_plane: ControlPlane, account: Path) -> None:
    """The policies look at requests of the operator's account alone."""
    for manifest in (foreign(), privileged(), OBJECTS["a NetworkPolicy for all pods"][0]):
        apply(control_plane, manifest, "--dry-run=server")

"""Every reason for not ready that a cluster can cause, by its real cause on a real API server.

Each shows the condition, the reason and a message that says what to do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest_asyncio

from fleetkeeper.adapters.kubernetes.errors import ApiError
from fleetkeeper.adapters.kubernetes.resources import DEPLOYMENT, INFERENCE_SERVICE, POD
from fleetkeeper.api.names import LABEL_SERVICE
from fleetkeeper.api.schema.crd import desired_crd
from fleetkeeper.reconcile.observe.pod_problems import ADVICE
from fleetkeeper_contract.exit_codes import DeathClass
from fleetkeeper_engine.supervisor.termination import Death
from fleetkeeper_local.control_plane.access import KubectlError
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operator_world import (
    CRDS,
    HOOKED,
    PATIENCE_S,
    Live,
    World,
    condition,
    operator_world,
    service,
)

MANUAL = "test.fleetkeeper.io/kubelet"
"""Label of a node that no kubelet keeps, kwok neither: the test says what becomes of its pods."""
TRIES_SOON = {"PLAN_WAITS": json.dumps({"children.TRY_AGAIN_AFTER_S": 5})}
"""A refused write is tried again after 5 s instead of 30."""


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-reasons") as found:
        yield found


def apply(plane: ControlPlane, *manifests: Live) -> None:
    """Applies objects as the administrator."""
    for manifest in manifests:
        text = json.dumps(manifest)
        plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=text)


async def told(world: World, name: str, kind: str, status: str, reason: str, *words: str) -> None:
    """Waits for a condition, and looks for the words of its message that say what to do."""

    def holds() -> bool:
        found = condition(world.fis(name), kind)
        return (found.get("status"), found.get("reason")) == (status, reason)

    try:
        await world.until(f"{name}: {kind} {status} {reason}", holds, 40)
    except AssertionError as problem:
        stood = ((world.fis(name) or {}).get("status") or {}).get("conditions")
        raise AssertionError(f"{problem}\n{json.dumps(stood, indent=1)}") from None
    message = condition(world.fis(name), kind)["message"]
    assert len(message) <= 256
    for word in words:
        assert word in message, message


def _advice(reason: str) -> str:
    """What the message has to say at its end."""
    return next(text for known, text in ADVICE.items() if known == reason)


async def not_ready(world: World, name: str, reason: str, *words: str) -> None:
    """Not ready for this reason, and told in an event too."""
    await told(world, name, "Ready", "False", reason, *words)
    assert condition(world.fis(name), "Available")["status"] == "False"


@contextmanager
def policy(world: World, name: str, *, rule: Live, expression: str) -> Iterator[None]:
    """A ValidatingAdmissionPolicy for this namespace alone."""
    full = f"{name}-{world.namespace}"
    api = "admissionregistration.k8s.io/v1"
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": world.namespace}},
            "resourceRules": [{"apiVersions": ["*"], **rule}],
        },
        "validations": [{"expression": expression, "message": "the company forbids it"}],
    }
    kind = "ValidatingAdmissionPolicy"
    binding = {"policyName": full, "validationActions": ["Deny"]}
    apply(
        world.plane,
        {"apiVersion": api, "kind": kind, "metadata": {"name": full}, "spec": spec},
        {"apiVersion": api, "kind": f"{kind}Binding", "metadata": {"name": full}, "spec": binding},
    )
    try:
        yield
    finally:
        for what in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
            world.plane.kubectl("delete", what, full, "--ignore-not-found")


async def denies(world: World, name: str) -> None:
    """Waits until the policy is in force: the API server takes it up within seconds."""
    probe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "probe", "labels": {LABEL_SERVICE: name}},
    }

    def is_denied() -> bool:
        try:
            world.plane.kubectl(
                *("-n", world.namespace, "create", "--dry-run=server", "-f", "-"),
                input=json.dumps(probe),
            )
        except KubectlError as refusal:
            return "the company forbids it" in str(refusal)
        return False

    await world.until("policy in force", is_denied)


async def test_what_a_spec_alone_makes_impossible(world: World) -> None:
    """Nothing is created for it, and no accelerator taken, but where a person chose so."""
    world.plane.kubectl(
        *("-n", world.namespace, "create", "deployment", "taken", "--image=other", "--replicas=0")
    )
    await world.operator(command=HOOKED, env=TRIES_SOON).start().leads()
    tiny = service()["spec"]
    await world.create(service("no-profile", engine={"profile": "no-such"}))
    options = {"profile": "cuda", "options": {"no-such-option": "1"}}
    await world.create(service("bad-option", engine=options))
    await world.create(service("stopped", replicas=0))
    await world.create(service("paused", paused=True))
    await world.create(service("taken"))

    await not_ready(world, "no-profile", "UnknownProfile", "no-such", "cuda")
    await not_ready(world, "bad-option", "BadEngineOption", "spec.engine.options.no-such-option")
    await not_ready(world, "stopped", "Stopped", "spec.replicas is 0")
    await not_ready(world, "paused", "Paused", "spec.paused is true")
    await not_ready(world, "taken", "NameConflict", "Deployment taken", "Delete it")
    for name in ("no-profile", "bad-option", "taken"):
        stalled = condition(world.fis(name), "Stalled")
        assert stalled["status"] == "True"
        await world.told(name, "Warning")
    for name in ("no-profile", "bad-option", "paused"):
        assert world.children(name) == {}
    assert LABEL_SERVICE not in (world.get("Deployment", "taken") or {})["metadata"]["labels"]
    assert (world.get("Deployment", "stopped") or {})["spec"]["replicas"] == 0

    # Each is mended by what its message says.
    await world.change("no-profile", engine={"profile": "cuda"})
    await world.change("bad-option", engine={**tiny["engine"], "options": None})
    await world.change("stopped", replicas=1)
    await world.change("paused", paused=False)
    await world.delete(DEPLOYMENT, "taken")
    await world.ready("no-profile", "bad-option", "stopped", "paused", "taken")


async def test_what_the_scheduler_refuses(world: World) -> None:
    """Its own verdict in words, without the counts that change."""
    await world.operator().start().leads()
    await world.create(service("nowhere", placement={"nodeSelector": {"no": "such-node"}}))
    tiny = service()["spec"]
    many = {"accelerator": {"resource": "nvidia.com/gpu", "count": 16}}
    sections = {
        "resources": {**tiny["resources"], **many},
        "engine": {**tiny["engine"], "tensorParallelSize": 16},
    }
    await world.create(service("too-big", **sections))
    await world.create(service("no-claim", model={"source": "pvc://no-such-claim/model"}))
    await not_ready(world, "nowhere", "Unschedulable", _advice("Unschedulable"))
    advice = _advice("InsufficientGPU")
    await not_ready(world, "too-big", "InsufficientGPU", "nvidia.com/gpu", advice)
    await not_ready(world, "no-claim", "MissingVolume", "no-such-claim", _advice("MissingVolume"))


async def test_what_quota_and_policies_refuse(world: World) -> None:
    """Refused pods and refused children, told apart, and forgotten when it is allowed."""
    await world.operator(command=HOOKED, env=TRIES_SOON).start().leads()
    expression = f"!has(object.metadata.labels) || object.metadata.labels[?'{LABEL_SERVICE}'].orValue('') != "
    pods = {"apiGroups": [""], "resources": ["pods", "configmaps"], "operations": ["CREATE"]}
    with (
        policy(
            world,
            "pods",
            rule={**pods, "resources": ["pods"]},
            expression=f"{expression}'denied-pods'",
        ),
        policy(
            world,
            "child",
            rule={**pods, "resources": ["configmaps"]},
            expression=f"{expression}'denied-child'",
        ),
    ):
        await denies(world, "denied-child")
        await world.create(service("denied-child"))
        await world.create(service("denied-pods"))
        # Its other children are made all the same, pods among them, which may already answer.
        refused = ("Ready", "False", "AdmissionDenied", "company forbids it", "policy")
        await told(world, "denied-child", *refused)
        await not_ready(world, "denied-pods", "AdmissionDenied", "company forbids it", "policy")
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none", "namespace": world.namespace},
        "spec": {"hard": {"count/networkpolicies.networking.k8s.io": "0"}},
    }
    await world.ready("denied-pods")
    apply(world.plane, quota)
    await world.until("quota in force", partial(_has_status, world, "none"))
    await world.create(service("no-room"))
    exceeded = ("Ready", "False", "QuotaExceeded", "exceeded quota: none", "ResourceQuota")
    await told(world, "no-room", *exceeded)
    quota["spec"]["hard"] = {"pods": "0"}  # type: ignore[index]
    apply(world.plane, quota)
    await world.create(service("no-pods"))
    await not_ready(world, "no-pods", "QuotaExceeded", "exceeded quota: none", "ResourceQuota")
    world.plane.kubectl("-n", world.namespace, "delete", "resourcequota", "none")
    await world.ready("no-room", "denied-child")


def _has_status(world: World, name: str) -> bool:
    path = f"/api/v1/namespaces/{world.namespace}/resourcequotas/{name}"
    return bool((world.plane.get(path) or {}).get("status", {}).get("hard"))


WAITING: dict[str, tuple[str, str, str]] = {
    "image": (
        "ImagePull",
        "ImagePullBackOff",
        'Back-off pulling image "x": ErrImagePull: not found',
    ),
    "secret": ("MissingSecret", "CreateContainerConfigError", 'secret "hf" not found'),
}
ENDS: dict[str, tuple[str, DeathClass | None]] = {
    "option": ("BadEngineOption", DeathClass.BAD_ENGINE_OPTION),
    "model": ("ModelNotFound", DeathClass.MODEL_NOT_FOUND),
    "gated": ("ModelNotReadable", DeathClass.MODEL_NOT_READABLE),
    "arch": ("UnsupportedArchitecture", DeathClass.UNSUPPORTED_ARCHITECTURE),
    "gpu-memory": ("CUDAOutOfMemory", DeathClass.CUDA_OUT_OF_MEMORY),
    "memory": ("HostOutOfMemory", DeathClass.HOST_OUT_OF_MEMORY),
    "hung": ("EngineHung", DeathClass.HUNG),
    "unknown": ("CrashLoop", DeathClass.UNKNOWN),
    "killed": ("HostOutOfMemory", None),
}


async def test_what_a_kubelet_and_the_engine_tell(world: World) -> None:
    """Pods whose status is what a kubelet reports, with the line that the real engine writes."""
    node = f"manual-{world.namespace}"
    apply(world.plane, _node(node))
    room = {"cpu": "64", "memory": "512Gi", "pods": "100", "nvidia.com/gpu": "64"}
    ready = [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]
    patch = {"status": {"capacity": room, "allocatable": room, "conditions": ready}}
    world.plane.kubectl(
        *("patch", "node", node, "--subresource=status", "--type=merge", "-p", json.dumps(patch))
    )
    try:
        await world.operator().start().leads()
        for name in (*WAITING, *ENDS):
            await world.create(service(name, placement={"nodeSelector": {MANUAL: node}}))
        for name in (*WAITING, *ENDS):
            await world.until(f"{name} bound", partial(_pod, world, name))
            await _report(world, name)
        reasons = {name: reason for name, (reason, *_) in WAITING.items()}
        reasons |= {name: reason for name, (reason, _) in ENDS.items()}
        for name, reason in reasons.items():
            await not_ready(world, name, reason, _advice(reason))
    finally:
        world.plane.kubectl("delete", "node", node, "--wait=false")


def _node(name: str) -> Live:
    labels = {MANUAL: name, "kubernetes.io/os": "linux"}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}


def _pod(world: World, service_name: str) -> Live | None:
    """The pod of a service that has a node."""
    for (kind, _), live in world.objects.items():
        label = (live["metadata"].get("labels") or {}).get(LABEL_SERVICE)
        if (kind, label) == ("Pod", service_name) and live["spec"].get("nodeName"):
            return live
    return None


async def _report(world: World, name: str) -> None:
    """The status of the service's pod, as a kubelet writes it."""
    pod = _pod(world, name)
    assert pod is not None
    restarts, state, last = 0, {}, {}
    if name in WAITING:
        _, reason, message = WAITING[name]
        state = {"waiting": {"reason": reason, "message": message}}
    else:
        restarts, last = 3, {"terminated": _end(ENDS[name][1])}
        state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}
    first = pod["spec"]["containers"][0]
    told: dict[str, Any] = {
        "phase": "Running",
        "containerStatuses": [
            {
                "name": first["name"],
                "image": first["image"],
                "imageID": "",
                "ready": False,
                "restartCount": restarts,
                "state": state,
                "lastState": last,
            }
        ],
    }
    path = POD.path(world.namespace, pod["metadata"]["name"]) + "/status"
    await world.client.request(
        "PATCH", path, body={"status": told}, content_type="application/merge-patch+json"
    )


def _end(death: DeathClass | None) -> Live:
    """How the container ended: by the engine's own account, else killed by the kernel."""
    times = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:01:00Z"}
    if death is None:
        return {"exitCode": 137, "reason": "OOMKilled", "containerID": "containerd://a", **times}
    end = Death(death, "as the engine says it", "start", "last output")
    return {
        "exitCode": end.code,
        "reason": "Error",
        "message": end.termination_line(),
        "containerID": "containerd://a",
        **times,
    }


async def test_a_spec_that_was_valid_yesterday_keeps_what_runs(world: World) -> None:
    """A schema without rules let it in; the operator says what is wrong and touches nothing."""
    await world.operator().start().leads()
    await world.create(service(replicas=1))
    await world.ready()
    before = _uids(world)
    loose = desired_crd()
    schema = loose["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    _without_rules(schema)
    apply(world.plane, loose)
    try:
        await _scale_once_let_in(world, {"minReplicas": 5, "maxReplicas": 2})
        await told(world, "chat", "Stalled", "True", "InvalidSpec", "spec.scaling")
        await told(world, "chat", "Ready", "False", "InvalidSpec", "spec.scaling")
        assert condition(world.fis(), "Available")["status"] == "True"
        assert _uids(world) == before
        await world.change(scaling={"minReplicas": 1, "maxReplicas": 2})
        await world.ready()
        assert _uids(world) == before
    finally:
        world.plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))


async def _scale_once_let_in(world: World, scaling: Live) -> None:
    """The API server follows a changed CRD some moments later, and tells nobody when."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await world.change(scaling=scaling)
            except ApiError as refused:
                if refused.status != 422:
                    raise
                await asyncio.sleep(0.1)
            else:
                return


def _without_rules(schema: Any) -> None:
    """Takes every CEL rule out of a schema."""
    if isinstance(schema, dict):
        schema.pop("x-kubernetes-validations", None)
        for part in schema.values():
            _without_rules(part)
    elif isinstance(schema, list):
        for part in schema:
            _without_rules(part)


def _uids(world: World) -> set[str]:
    """Of all children and pods."""
    return {
        live["metadata"]["uid"]
        for (kind, _), live in world.objects.items()
        if kind != "InferenceService"
    }


async def test_an_older_crd_deletes_nothing_and_is_told(world: World) -> None:
    """It lacks a field that the spec may hold: no child is written until the CRD is upgraded."""
    operator = world.operator(env={"FLEETKEEPER_RESYNC_S": "5"})
    await operator.start().leads()
    await world.create(service(replicas=1, routing={"policy": "LeastLoaded"}))
    await world.ready()
    await world.quiet(1.0)
    before = _uids(world)
    older = desired_crd()
    spec = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["breaker"]
    _without_rules(older)  # some speak of the missing field
    apply(world.plane, older)
    try:
        words = ("spec.breaker", "Upgrade the CRDs")
        await told(world, "chat", "Stalled", "True", "CRDTooOld", *words)
        operator.kill()
        await operator.start().leads()
        await told(world, "chat", "Stalled", "True", "CRDTooOld", *words)
        assert condition(world.fis(), "Available")["status"] == "True"
        assert _uids(world) == before
    finally:
        world.plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    await world.until("told no more", lambda: not condition(world.fis(), "Stalled"))
    await world.ready()
    assert _uids(world) == before


async def test_a_namespace_that_cannot_end_is_told(world: World) -> None:
    """Children go and cannot come back: it is said once and not fought.

    The operator's rights are the cluster's and it has no Lease: those in the namespace end with it.
    """
    with world.cluster_rights():
        await _end_a_kept_namespace(world)


async def _end_a_kept_namespace(world: World) -> None:
    await world.operator(env={"FLEETKEEPER_LEADER__ENABLED": "false"}).start().leads()
    await world.create(service(replicas=1))
    await world.ready()
    rule = {
        "apiGroups": [INFERENCE_SERVICE.api_version.split("/")[0]],
        "resources": ["inferenceservices"],
        "operations": ["DELETE"],
    }
    with policy(world, "keep", rule=rule, expression="false"):
        await world.until("policy in force", partial(_is_kept, world))
        world.plane.kubectl("delete", "namespace", world.namespace, "--wait=false")
        await not_ready(world, "chat", "NamespaceTerminating", "namespace is being deleted")
    await world.until("all gone", lambda: world.fis() is None and not world.children(), 90)


def _is_kept(world: World) -> bool:
    try:
        world.plane.kubectl(
            *("-n", world.namespace, "delete", "inferenceservice", "chat", "--dry-run=server")
        )
    except KubectlError as refusal:
        return "the company forbids it" in str(refusal)
    return False

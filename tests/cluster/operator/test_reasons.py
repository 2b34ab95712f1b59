"""Every reason for not ready that a spec or a cluster can cause, by its real cause.

Each shows the condition, the reason and a message that says what to do.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial

import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import DEPLOYMENT, INFERENCE_SERVICE
from fleetkeeper.api.names import LABEL_SERVICE
from fleetkeeper_local.control_plane.access import KubectlError
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.guards import GUARD_S
from tests.support.operators.operator_world import World, condition, operator_world, service
from tests.support.operators.reason_checks import advice_of, apply, not_ready, policy, reports

TRIES_SOON = {"reconcile.children.TRY_AGAIN_AFTER_S": 1.0}
"""A refused write is tried again after 1 s instead of 30."""


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-reasons") as found:
        yield found


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
    await world.operator(waits=TRIES_SOON).start().leads()
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
        await world.wait_for_event(name, "Warning")
    for name in ("no-profile", "bad-option", "paused"):
        assert world.children(name) == {}
    assert LABEL_SERVICE not in (world.get("Deployment", "taken") or {})["metadata"]["labels"]
    assert (world.get("Deployment", "stopped") or {})["spec"]["replicas"] == 0

    # Each is fixed as its message advises.
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
    await not_ready(world, "nowhere", "Unschedulable", advice_of("Unschedulable"))
    advice = advice_of("InsufficientGPU")
    await not_ready(world, "too-big", "InsufficientGPU", "nvidia.com/gpu", advice)
    await not_ready(world, "no-claim", "MissingVolume", "no-such-claim", advice_of("MissingVolume"))


async def test_what_quota_and_policies_refuse(world: World) -> None:
    """Refused pods and refused children have their own reasons, which end with the refusal."""
    await world.operator(waits=TRIES_SOON).start().leads()
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
        await reports(world, "denied-child", *refused)
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
    await reports(world, "no-room", *exceeded)
    quota["spec"]["hard"] = {"pods": "0"}  # type: ignore[index]
    apply(world.plane, quota)
    await world.create(service("no-pods"))
    await not_ready(world, "no-pods", "QuotaExceeded", "exceeded quota: none", "ResourceQuota")
    world.plane.kubectl("-n", world.namespace, "delete", "resourcequota", "none")
    await world.ready("no-room", "denied-child")


def _has_status(world: World, name: str) -> bool:
    path = f"/api/v1/namespaces/{world.namespace}/resourcequotas/{name}"
    return bool((world.plane.get(path) or {}).get("status", {}).get("hard"))


async def test_service_accounts_that_are_missing_or_not_allowed(world: World) -> None:
    """The settings decide which names; a name that does not exist has its own reason."""
    allowed = {"FLEETKEEPER_ENGINE_SERVICE_ACCOUNTS": '["model-*"]'}
    await world.operator(env=allowed).start().leads()
    await world.create(service("no-account", serviceAccountName="model-reader"))
    await world.create(service("not-allowed", serviceAccountName="default"))
    await not_ready(
        world,
        "no-account",
        "MissingServiceAccount",
        "ServiceAccount model-reader does not exist",
        advice_of("MissingServiceAccount"),
    )
    await reports(
        world, "not-allowed", "Ready", "False", "InvalidSpec", "engineServiceAccounts", "model-*"
    )
    assert world.children("not-allowed") == {}
    world.plane.kubectl("-n", world.namespace, "create", "serviceaccount", "model-reader")
    await world.ready("no-account")
    assert condition(world.fis("no-account"), "Stalled") == {}


async def test_a_namespace_that_cannot_end_is_reported(world: World) -> None:
    """Children go and cannot come back: it is reported once and not fought.

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
    await world.until("all gone", lambda: world.fis() is None and not world.children(), GUARD_S)


def _is_kept(world: World) -> bool:
    try:
        world.plane.kubectl(
            *("-n", world.namespace, "delete", "inferenceservice", "chat", "--dry-run=server")
        )
    except KubectlError as refusal:
        return "the company forbids it" in str(refusal)
    return False

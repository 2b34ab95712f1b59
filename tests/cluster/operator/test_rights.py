"""Every request of the operator is allowed by the chart's rules, and every rule is needed.

All tests of this folder run the operator with the rules that the chart renders; here they are held
against what the API server's audit log says was asked.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import CHILDREN, DEPLOYMENT, INFERENCE_SERVICE
from fleetkeeper.api.names import LABEL_MANAGED_BY, LABEL_SERVICE
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_kube.resource import Resource
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.earlier_router import give_vllm_router
from tests.support.operators.operator_rights import operator_rules
from tests.support.operators.operator_world import MARKER_PATH, Live, World, operator_world, service

Right = tuple[str, str, str]
"""API group, resource (with its subresource), verb."""

BY_OTHER_TESTS: dict[Right, str] = {
    (
        "",
        "events",
        "list",
    ): "why a pod's volumes are not mounted (tests/unit/reconcile/test_reasons.py)",
    ("apps", "replicasets", "get"): "the template of a roll-back (test_rollback.py)",
    ("", "pods", "patch"): "the deletion cost of the emptiest pod, where its load is known",
    (
        "",
        "pods",
        "delete",
    ): "a pod whose engine hangs is replaced (test_service_pods, end to end)",
    ("batch", "jobs", "create"): "the download of a new model (test_prefetch.py)",
    ("batch", "jobs", "patch"): "the same: a server-side apply creates it",
    ("batch", "jobs", "get"): "the name of that Job is taken, as for every other kind of child",
    ("rbac.authorization.k8s.io", "clusterroles", "bind"): "checked by admission, never asked for",
}
"""Rights that the life below does not use."""


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-rights") as found:
        yield found


def asked(audit_log: Path, user: str) -> Iterator[tuple[Right, str, bool]]:
    """What users of this prefix asked for: the right, the URI, and whether it was granted.

    An apply that made its object needed the right to create, too.
    """
    for line in audit_log.read_text().splitlines():
        if f'"{user}' not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the last line may be half written
        about = event.get("objectRef") or {}
        if not about.get("resource") or not event["user"].get("username", "").startswith(user):
            continue
        resource = "/".join(
            part for part in (about["resource"], about.get("subresource", "")) if part
        )
        code = (event.get("responseStatus") or {}).get("code", 0)
        verbs = {event["verb"], *(["create"] if (event["verb"], code) == ("patch", 201) else [])}
        decision = (event.get("annotations") or {}).get("authorization.k8s.io/decision")
        for verb in sorted(verbs):
            right = (about.get("apiGroup", ""), resource, verb)
            yield right, event["requestURI"], decision == "allow"


def granted(rules: list[Live]) -> set[Right]:
    """Every right in the rules."""
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


LEFTOVER = "chat-fk-leftover"


def _leftover(world: World, resource: Resource) -> Live:
    """A child of the service as a former version of the operator may have left it."""
    owner = {
        "apiVersion": INFERENCE_SERVICE.api_version,
        "kind": INFERENCE_SERVICE.kind,
        "name": "chat",
        "uid": (world.fis() or {})["metadata"]["uid"],
        "controller": True,
    }
    labels = {LABEL_MANAGED_BY: "fleetkeeper", LABEL_SERVICE: "chat"}
    pod: Live = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "a", "image": "a"}]},
    }
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "none"}
    parts: dict[str, Live] = {
        "Deployment": {
            "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": pod}
        },
        "Service": {"spec": {"ports": [{"port": 80}]}},
        "NetworkPolicy": {"spec": {"podSelector": {}}},
        "RoleBinding": {"roleRef": role},
        "Job": {"spec": {"template": {"spec": {**pod["spec"], "restartPolicy": "Never"}}}},
    }
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {"name": LEFTOVER, "labels": labels, "ownerReferences": [owner]},
        **parts.get(resource.kind, {}),
    }


def _leftovers(world: World) -> list[str]:
    return [name for _, name in world.children() if name == LEFTOVER]


async def _lose_sight_of(world: World, kind: Kind, name: str) -> None:
    """Without its labels a child is out of view: it is taken for absent, refused, and read by name."""
    labels = {LABEL_MANAGED_BY: None, LABEL_SERVICE: None}
    patched = await world.patch(CHILDREN[kind], name, {"metadata": {"labels": labels}})
    version = int(patched["metadata"]["resourceVersion"])

    def is_labelled() -> bool:
        meta = world.children().get((kind.value, name), {}).get("metadata", {})
        return int(meta.get("resourceVersion", 0)) > version

    await world.until(f"{kind} {name} labelled again", is_labelled)


@pytest.mark.promise("operator-rights")
@pytest.mark.timeout(300)
async def test_every_right_is_enough_and_every_right_is_used(world: World) -> None:
    """A life with a router, with that of an earlier release and without, repaired, pruned, and with pods that do not start."""
    node = {"nodeSelector": {"no": "such-node"}}
    operator = await world.operator().start().leads()
    await world.create(service(replicas=1, routing={"policy": "LeastLoaded"}))
    await world.ready()
    await operator.stop()
    await give_vllm_router(world, kinds=(Kind.SERVICE_ACCOUNT, Kind.DEPLOYMENT))
    await operator.start().leads()
    await world.until("its role", lambda: ("RoleBinding", "chat-fk-router") in world.children())
    before = world.children()["ServiceAccount", "chat-fk-router"]["metadata"]["uid"]
    await world.delete(CHILDREN[Kind.SERVICE_ACCOUNT], "chat-fk-router")

    def is_back() -> bool:
        found = world.children().get(("ServiceAccount", "chat-fk-router"))
        return found is not None and found["metadata"]["uid"] != before

    await world.until("account made again", is_back)
    await world.delete(DEPLOYMENT, "chat")  # made again, once the service is seen to exist
    await world.until("back", lambda: world.get("Deployment", "chat") is not None)
    await world.ready()
    # A router that is out of view is a new one, and takes no account.
    for kind, name in sorted(world.children(), key=lambda child: child[0] == "Deployment"):
        await _lose_sight_of(world, Kind(kind), name)
    await world.change(routing={"policy": "None"})
    await world.until("pruned", lambda: ("Deployment", "chat-fk-router") not in world.children())
    for resource in CHILDREN.values():  # what is wanted no more goes, of every kind
        await world.patch_or_create(resource, _leftover(world, resource))
    await world.until("leftovers gone", lambda: not _leftovers(world))
    await world.create(service("nowhere", placement=node))
    await world.until("nowhere reported", lambda: (world.fis("nowhere") or {}).get("status"))
    await world.delete(INFERENCE_SERVICE, "nowhere")
    await world.until("nowhere gone", lambda: not world.children("nowhere"))
    await world.quiet()

    rights = granted(operator_rules())
    own = list(asked(world.plane.audit_log, world.user))
    assert {uri for _, uri, is_granted in own if not is_granted} <= {MARKER_PATH}
    unused = rights - {right for right, _, _ in own} - BY_OTHER_TESTS.keys()
    assert unused == set(), "granted and never used"
    # The operators of all tests of this session, whatever was done to them.
    everywhere = {right for right, _, _ in asked(world.plane.audit_log, "operator-")}
    assert everywhere <= rights, "asked for what the chart does not grant"

"""Every child is written in the form in which the API server keeps it: a second apply is no write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.adapters.kubernetes.fields import owned_digest, owned_fields
from fleetkeeper.api.names import (
    ANNOTATION_TEMPLATE_HASH,
    API_VERSION,
    FIELD_MANAGER,
    KIND,
    LABEL_SERVICE,
)
from fleetkeeper.api.profiles.profile import EngineProfile
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.digest import digest_of
from fleetkeeper.reconcile.manifests.children import desired_children
from fleetkeeper.reconcile.manifests.engine import desired_engine_deployment
from fleetkeeper.reconcile.manifests.engine_pod import desired_engine_template
from fleetkeeper.reconcile.manifests.tuning import AS_SPECIFIED, EngineTuning
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.plane.crds import install_crds
from tests.support.reconcile.golden_services import CASES
from tests.support.reconcile.pod_templates import EVERY_FORM, PROFILE
from tests.support.reconcile.random_specs import allowed, random_services

NAMESPACE = "manifests-canonical"
RANDOM = 20
"""Random services beside the golden ones; of these the unit tests draw hundreds."""
KINDS = "deployments,services,serviceaccounts,rolebindings,poddisruptionbudgets,networkpolicies,configmaps,jobs"
Live = dict[tuple[str, str], dict[str, Any]]


OWNER: Manifest = {
    "apiVersion": API_VERSION,
    "kind": KIND,
    "metadata": {"name": "owner", "namespace": NAMESPACE},
    "spec": {"model": {"source": "pvc://models/tiny"}},
}
"""Without a real owner the garbage collector would remove the children at once."""


def _of_each_service(owner_uid: str) -> Iterator[tuple[str, Iterable[Manifest]]]:
    """The name of each service, and its children."""
    for number, case in enumerate(CASES.values()):
        named = replace(case.service(), name=f"golden-{number}", namespace=NAMESPACE, uid=owner_uid)
        yield named.name, (*case.children(named), case.prefetch_job(named))
    context = default_context()
    for number, service in enumerate(random_services(seed=7, count=RANDOM)):
        profile = context.catalog.resolve(("cuda", "cpu")[number % 2])
        assert allowed(service, profile)
        named = replace(service, name=f"random-{number}", namespace=NAMESPACE, uid=owner_uid)
        yield named.name, desired_children(named, profile, context, replicas=number % 4)


def _children(owner_uid: str) -> list[Manifest]:
    """The children without those that differ from an earlier one in the name of their service alone."""
    found: dict[str, Manifest] = {}
    for name, children in _of_each_service(owner_uid):
        for child in children:
            child["metadata"]["ownerReferences"][0]["name"] = "owner"
            # The hash of a template covers the name.
            form = re.sub(rf'"{ANNOTATION_TEMPLATE_HASH}": "\w+"', "", json.dumps(child))
            found.setdefault(form.replace(name, "SERVICE"), child)
    return [*found.values()]


def _apply(plane: ControlPlane, children: list[Manifest]) -> None:
    plane.kubectl(
        "apply",
        "--server-side",
        "--force-conflicts",
        f"--field-manager={FIELD_MANAGER}",
        "-f",
        "-",
        input=json.dumps({"apiVersion": "v1", "kind": "List", "items": children}),
        # Hundreds of objects, one after the other.
        timeout_s=600,
    )


def _live(plane: ControlPlane) -> Live:
    listed = json.loads(
        plane.kubectl("-n", NAMESPACE, "get", KINDS, "--show-managed-fields", "-o", "json")
    )
    return {(item["kind"], item["metadata"]["name"]): item for item in listed["items"]}


@pytest.fixture(scope="module")
def applied(control_plane: ControlPlane) -> Iterator[tuple[list[Manifest], Live]]:
    """The children of all services, applied once, and how the API server holds them."""
    install_crds(control_plane)
    control_plane.kubectl("create", "namespace", NAMESPACE)
    control_plane.kubectl("create", "-f", "-", input=json.dumps(OWNER))
    owner = json.loads(control_plane.kubectl("-n", NAMESPACE, "get", "fis", "owner", "-o", "json"))
    children = _children(owner["metadata"]["uid"])
    _apply(control_plane, children)
    yield children, _live(control_plane)
    control_plane.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def _without_replicas(value: Manifest) -> Manifest:
    written: Manifest = json.loads(json.dumps(value))
    if written["kind"] == "Deployment":
        del written["spec"]["replicas"]
    del written["metadata"]["name"], written["metadata"]["namespace"]
    return written


def test_the_digest_of_every_desired_child_is_that_of_the_live_one(
    applied: tuple[list[Manifest], Live],
) -> None:
    """Else the operator would write the same child again and again."""
    children, live = applied
    assert len(children) > 150
    wrong = [
        f"{child['kind']} {child['metadata']['name']}:\n"
        f"  desired {json.dumps(_without_replicas(child), sort_keys=True)}\n"
        f"  live    {json.dumps(owned_fields(live[child['kind'], child['metadata']['name']]), sort_keys=True)}"
        for child in children
        if digest_of(child) != owned_digest(live[child["kind"], child["metadata"]["name"]])
    ]
    assert not wrong, "\n".join([f"{len(wrong)} children differ, the first three:", *wrong[:3]])


def test_a_second_apply_changes_no_object(
    control_plane: ControlPlane, applied: tuple[list[Manifest], Live]
) -> None:
    """The API server itself sees no difference: generation and owned fields stay.

    Deployments, Jobs and budgets are written by their controllers meanwhile, so the version counts
    for the other kinds alone.
    """
    children, before = applied
    _apply(control_plane, children)
    after = _live(control_plane)
    for key, old in before.items():
        new = after[key]
        assert new["metadata"].get("generation") == old["metadata"].get("generation"), key
        if key[0] not in {"Deployment", "Job", "PodDisruptionBudget"}:
            assert new["metadata"]["resourceVersion"] == old["metadata"]["resourceVersion"], key


def test_a_pod_template_is_stored_as_it_is_wanted(
    control_plane: ControlPlane, applied: tuple[list[Manifest], Live]
) -> None:
    """With values of every form: quantities, references, empty ones, false ones, zeros."""
    (owner,) = {child["metadata"]["ownerReferences"][0]["uid"] for child in applied[0]}
    case, name = CASES["minimal-cuda"], "with-template"
    service = replace(case.service(), name=name, namespace=NAMESPACE, uid=owner)
    profile = EngineProfile.model_validate({**PROFILE, "podTemplate": EVERY_FORM})
    wanted = desired_engine_deployment(
        service, desired_engine_template(service, profile, case.context), replicas=0
    )
    wanted["metadata"]["ownerReferences"][0]["name"] = "owner"
    _apply(control_plane, [wanted])
    live = _engine(control_plane, name)
    assert digest_of(wanted) == owned_digest(live), json.dumps(
        [_without_replicas(wanted), owned_fields(live)], sort_keys=True
    )


def _engine(plane: ControlPlane, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        plane.kubectl(
            "-n", NAMESPACE, "get", "deployment", name, "--show-managed-fields", "-o", "json"
        )
    )
    return found


def _rolled_out(plane: ControlPlane, name: str, revision: str) -> None:
    path = "{.metadata.annotations.deployment\\.kubernetes\\.io/revision}"
    plane.kubectl(
        "-n", NAMESPACE, "wait", f"deployment/{name}", f"--for=jsonpath={path}={revision}"
    )


def test_a_return_to_an_old_template_uses_the_old_replica_set(
    control_plane: ControlPlane, applied: tuple[list[Manifest], Live]
) -> None:
    """What the API server filled into the template comes back with it and makes no third one."""
    (owner,) = {child["metadata"]["ownerReferences"][0]["uid"] for child in applied[0]}
    case, name = CASES["minimal-cuda"], "returning"
    service = replace(case.service(), name=name, namespace=NAMESPACE, uid=owner)
    profile = case.context.catalog.resolve("cuda")

    def desired(tuning: EngineTuning, template: Manifest | None = None) -> Manifest:
        built = template or desired_engine_template(service, profile, case.context, tuning)
        deployment = desired_engine_deployment(service, built, replicas=0)
        deployment["metadata"]["ownerReferences"][0]["name"] = "owner"
        return deployment

    _apply(control_plane, [desired(AS_SPECIFIED)])
    _rolled_out(control_plane, name, "1")
    _apply(control_plane, [desired(EngineTuning(max_sequences=8))])
    _rolled_out(control_plane, name, "2")
    selector = ("-n", NAMESPACE, "get", "replicasets", "-l", f"{LABEL_SERVICE}={name}")
    first, _ = sorted(
        json.loads(control_plane.kubectl(*selector, "-o", "json"))["items"],
        key=lambda item: item["metadata"]["annotations"]["deployment.kubernetes.io/revision"],
    )
    template = first["spec"]["template"]
    del template["metadata"]["labels"]["pod-template-hash"]
    back = desired(AS_SPECIFIED, template)
    _apply(control_plane, [back])
    _rolled_out(control_plane, name, "3")
    names = control_plane.kubectl(*selector, "-o", "name").split()
    assert len(names) == 2
    assert owned_digest(_engine(control_plane, name)) == digest_of(back)

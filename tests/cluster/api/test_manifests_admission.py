"""A namespace that enforces Pod Security *restricted* admits the pods of any spec."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.manifests.children import desired_children
from fleetkeeper_local.control_plane.access import KubectlError
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.lanes import keep_first
from tests.support.reconcile.random_specs import random_services

NAMESPACE = "manifests-restricted"
SERVICES = (30, 150)
"""Random services; the unit tests judge hundreds of them by Kubernetes' rules."""


def _pods(services: int) -> Iterator[Manifest]:
    """The pods that the Deployments of random services would make, without names of other objects.

    Classes and accounts that do not exist are refused by other admission plugins.
    """
    context = default_context()
    for number, service in enumerate(random_services(seed=11, count=services)):
        profile = context.catalog.resolve(("cuda", "cpu")[number % 2])
        children = desired_children(service, profile, context, replicas=1)
        for index, child in enumerate(c for c in children if c["kind"] == "Deployment"):
            template = child["spec"]["template"]
            left_out = {"priorityClassName", "runtimeClassName", "serviceAccountName"}
            spec = {key: item for key, item in template["spec"].items() if key not in left_out}
            yield {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    **template["metadata"],
                    "name": f"pod-{number}-{index}",
                    "namespace": NAMESPACE,
                },
                "spec": spec,
            }


@pytest.fixture(scope="module")
def restricted(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """The control plane with a namespace that refuses what is not restricted."""
    control_plane.kubectl("create", "namespace", NAMESPACE)
    control_plane.kubectl(
        "label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted"
    )
    control_plane.kubectl("-n", NAMESPACE, "wait", "--for=create", "serviceaccount/default")
    yield control_plane
    control_plane.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def _try(plane: ControlPlane, pods: list[Manifest]) -> None:
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": pods})
    plane.kubectl("create", "--dry-run=server", "-f", "-", input=listed)


@pytest.mark.promise("restricted-pods")
@pytest.mark.parametrize("services", keep_first(1, SERVICES, pytest.mark.exhaustive))
def test_pods_of_random_specs_are_admitted(restricted: ControlPlane, services: int) -> None:
    """Engines and routers alike; the API server itself is the judge."""
    pods = list(_pods(services))
    assert len(pods) > services
    _try(restricted, pods)


def test_the_namespace_really_refuses(restricted: ControlPlane) -> None:
    """The same pod with one right too many is refused, so the test above can fail."""
    pod = next(_pods(1))
    pod["spec"]["containers"][0]["securityContext"]["capabilities"]["add"] = ["SYS_ADMIN"]
    with pytest.raises(KubectlError, match="violates PodSecurity"):
        _try(restricted, [pod])

"""The console's samples from a real API server, with the rights that docs/console.md names."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator

import pytest

from fleetkeeper.console.documents import Document, fleet_document
from fleetkeeper.console.samples import Sampler, Samples
from fleetkeeper.fleet.source import FleetSource
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.guards import GUARD_S
from tests.support.operators.operator_world import service
from tests.support.plane.crds import install_crds


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A namespace with a service, of which no operator knows."""
    name = f"console-{uuid.uuid4().hex[:6]}"
    install_crds(control_plane)
    control_plane.kubectl("create", "namespace", name)
    control_plane.kubectl("-n", name, "create", "-f", "-", input=json.dumps(service()))
    yield name
    control_plane.kubectl("delete", "namespace", name, "--wait=false")


@pytest.mark.promise("console-rights")
def test_a_user_who_may_list_services_sees_them_until_the_right_is_gone(
    control_plane: ControlPlane, namespace: str
) -> None:
    user = control_plane.user_kubeconfig(f"viewer-of-{namespace}")
    source = FleetSource("fleetkeeper-system", kubeconfig=str(user))
    samples = Samples()
    sampler = Sampler(source, samples, namespace, 5.0)
    in_namespace = ("-n", namespace)
    sampler.sample()
    refused = fleet_document(samples)
    assert refused["services"] == []
    assert "403 Forbidden; check the kubeconfig" in refused["problem"]

    rights = ("--verb=list", "--resource=inferenceservices.fleetkeeper.io")
    control_plane.kubectl(*in_namespace, "create", "role", "viewer", *rights)
    binding = ("rolebinding", "viewer")
    whose = ("--role=viewer", f"--user=viewer-of-{namespace}")
    control_plane.kubectl(*in_namespace, "create", *binding, *whose)
    shown = _sampled(sampler, samples, has_problem=False)
    (row,) = shown["services"]
    assert (row["namespace"], row["name"], row["maxReplicas"]) == (namespace, "chat", 8)
    assert shown["remark"] == "no metrics: 403 Forbidden"

    control_plane.kubectl(*in_namespace, "delete", *binding)
    gone = _sampled(sampler, samples, has_problem=True)
    assert "403 Forbidden; check the kubeconfig" in gone["problem"]
    assert gone["services"] == shown["services"], "the last data stays"


def _sampled(sampler: Sampler, samples: Samples, *, has_problem: bool) -> Document:
    """The document as soon as the API server applies a change of rights."""
    end = time.monotonic() + GUARD_S
    while True:
        sampler.sample()
        document = fleet_document(samples)
        if bool(document["problem"]) == has_problem:
            return document
        assert time.monotonic() < end, document
        time.sleep(0.1)

"""The examples for Flux and Argo CD render with the real programs, and the API server takes the result."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleetkeeper_local.control_plane.access import KubectlError
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.control_plane.programs import program_path
from tests.support.chart.helm_chart import CHART, HelmError, only, rendered
from tests.support.guards import GUARD_S
from tests.support.plane.crds import install_crds

pytestmark = pytest.mark.exhaustive  # about Flux and Argo CD, and examples for them
REPOSITORY = Path(__file__).parents[3]
GITOPS = REPOSITORY / "examples" / "gitops"
ENVIRONMENTS = ("staging", "production")
Manifest = dict[str, Any]


def kustomized(directory: Path) -> list[Manifest]:
    """Render a Kustomize directory, without a cluster and without a network."""
    done = subprocess.run(
        [str(program_path("kubectl")), "kustomize", str(directory)],
        capture_output=True,
        text=True,
        check=True,
        timeout=GUARD_S,
    )
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def documents(name: str) -> list[Manifest]:
    return [item for item in yaml.safe_load_all((GITOPS / name).read_text()) if item]


def flux_values() -> Mapping[str, Any]:
    found = only(kustomized(GITOPS / "flux" / "operator"), "HelmRelease", "fleetkeeper")
    return dict(found["spec"]["values"])


def argo_source() -> Manifest:
    found = only(documents("argocd/operator.yaml"), "Application", "fleetkeeper")
    return dict(found["spec"]["source"])


def argo_values() -> Mapping[str, Any]:
    return dict(argo_source()["helm"]["valuesObject"])


@pytest.fixture(scope="module")
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    install_crds(control_plane)
    name = f"gitops-{secrets.token_hex(3)}"
    control_plane.kubectl("create", "namespace", name)
    yield name
    control_plane.kubectl("delete", "namespace", name, "--wait=false")


def dry_run(plane: ControlPlane, namespace: str, objects: list[Manifest], *flags: str) -> str:
    """Send objects as to be applied, moved to a namespace that exists."""
    for item in objects:
        item["metadata"]["namespace"] = namespace
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    strict = ("--dry-run=server", "--validate=strict")
    return plane.kubectl("apply", *flags, *strict, "-f", "-", input=listed)


@pytest.mark.parametrize("flags", [("--server-side",), ()], ids=["as Flux", "as Argo CD"])
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_the_api_server_takes_the_services_of_an_environment(
    control_plane: ControlPlane, namespace: str, environment: str, flags: tuple[str, ...]
) -> None:
    objects = kustomized(GITOPS / "services" / environment)
    assert [item["kind"] for item in objects] == ["InferenceService"]
    assert "(server dry run)" in dry_run(control_plane, namespace, objects, *flags)


def test_the_api_server_refuses_a_misspelled_field_of_an_overlay(
    control_plane: ControlPlane, namespace: str
) -> None:
    """The dry run checks: kustomize itself passes any field on."""
    (chat,) = kustomized(GITOPS / "services" / "staging")
    chat["spec"]["scaling"]["maxReplica"] = 3
    with pytest.raises(KubectlError, match="maxReplica"):
        dry_run(control_plane, namespace, [chat], "--server-side")


def test_environments_differ_in_what_their_overlays_say() -> None:
    staging, production = (kustomized(GITOPS / "services" / name)[0] for name in ENVIRONMENTS)
    assert staging["metadata"] == {"name": "chat", "namespace": "team-a-staging"}
    assert production["metadata"] == {"name": "chat", "namespace": "team-a"}
    assert staging["spec"].pop("scaling") == {"minReplicas": 1, "maxReplicas": 2}
    assert production["spec"].pop("scaling") == {"minReplicas": 2, "maxReplicas": 8}
    assert production["spec"].pop("routing")["replicas"] == 2
    assert production["spec"].pop("rollout") == {"onFailure": "Hold"}
    assert staging["spec"] == production["spec"]
    assert "replicas" not in staging["spec"], "the autoscaler decides"


@pytest.mark.parametrize("values", [flux_values, argo_values])
def test_the_chart_renders_with_the_values_of_a_tool(
    values: Callable[[], Mapping[str, Any]],
) -> None:
    """Helm checks them against the chart's schema; every image comes from the reader's registry."""
    objects = rendered(values())
    (container,) = only(objects, "Deployment", "fleetkeeper")["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["image"] == "registry.example.com/fleetkeeper/fleetkeeper:0.1.0"
    settings = json.dumps(objects)
    assert "registry.example.com/fleetkeeper/fleetkeeper-router:0.1.0" in settings
    assert "registry.example.com/fleetkeeper/fleetkeeper-engine:0.1.0" in settings
    assert "http://prometheus.monitoring:9090" in settings
    assert only(objects, "CustomResourceDefinition", "inferenceservices.fleetkeeper.io")


def test_the_schema_of_the_chart_refuses_a_misspelled_value() -> None:
    """Rendering checks: it is no proof otherwise."""
    with pytest.raises(HelmError, match="imagee"):
        rendered({**flux_values(), "imagee": {}})


def test_both_tools_take_the_present_version_of_the_chart() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    source = only(kustomized(GITOPS / "flux" / "operator"), "OCIRepository", "fleetkeeper")
    assert source["spec"]["ref"] == {"tag": version}
    assert source["spec"]["url"].endswith("/charts/fleetkeeper")
    assert argo_source()["targetRevision"] == version


def test_every_path_that_a_tool_syncs_is_one_that_kustomize_renders() -> None:
    (services,) = documents("argocd/services.yaml")
    paths = [item["spec"]["path"] for item in documents("flux/sync.yaml")]
    paths.append(services["spec"]["source"]["path"])
    assert len(paths) == 3
    assert all(kustomized(REPOSITORY / path) for path in paths)
    (chat,) = kustomized(REPOSITORY / paths[-1])
    assert chat["metadata"]["namespace"] == services["spec"]["destination"]["namespace"]

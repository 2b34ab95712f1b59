"""The examples are what they teach: taken by `fleetkeeper check` and by a real API server."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fleetkeeper_local.control_plane.access import KubectlError
from fleetkeeper_local.control_plane.control_plane import ControlPlane

REPOSITORY = Path(__file__).parents[3]
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.yaml"))
STREAMED = REPOSITORY / "examples" / "object-storage"
FLEETKEEPER = str(Path(sys.executable).with_name("fleetkeeper"))
WANTED = {
    "tiny",
    "8b-one-gpu",
    "70b-tensor-parallel-4",
    "lora-adapters",
    "mixed-tiers",
    "devices-by-claims",
    "model-image",
    "scaled-by-hpa",
    "behind-the-gateway",
    "simulated",
}


@pytest.fixture(scope="module")
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A namespace on an API server that knows the resource; names fit, for HPA and claims."""
    control_plane.kubectl("apply", "--server-side", "-f", str(REPOSITORY / "crds"))
    control_plane.kubectl(
        "wait", "--for=condition=Established", "crd/inferenceservices.fleetkeeper.io"
    )
    name = f"examples-{secrets.token_hex(3)}"
    control_plane.kubectl("create", "namespace", name)
    yield name
    control_plane.kubectl("delete", "namespace", name, "--wait=false")


def _apply(plane: ControlPlane, namespace: str, text: str) -> str:
    return plane.kubectl(
        *("-n", namespace, "apply", "--server-side", "--dry-run=server", "--validate=strict"),
        *("-f", "-"),
        input=text,
    )


def test_there_is_an_example_for_each_way_to_serve() -> None:
    """None is forgotten."""
    assert {file.stem for file in EXAMPLES} == WANTED


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_check_finds_an_example_good_and_says_what_it_needs(file: Path) -> None:
    """Without a cluster, by the command that a user runs first."""
    done = subprocess.run(
        [FLEETKEEPER, "check", "-f", str(file)],
        env={key: value for key, value in os.environ.items() if "FLEETKEEPER" not in key},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert ": OK" in done.stdout
    assert "memory cap   80%" in done.stdout


@pytest.mark.parametrize("file", [*EXAMPLES, STREAMED / "service.yaml"], ids=lambda file: file.stem)
def test_the_api_server_takes_an_example_as_it_is(
    control_plane: ControlPlane, namespace: str, file: Path
) -> None:
    """Strictly: no unknown or doubled field, no rule of the schema broken."""
    said = _apply(control_plane, namespace, file.read_text())
    documents = [item for item in yaml.safe_load_all(file.read_text()) if item]
    assert said.count("serverside-applied (server dry run)") == len(documents)


def test_the_api_server_refuses_an_example_with_a_mistake(
    control_plane: ControlPlane, namespace: str
) -> None:
    """The dry run checks: it reports a misspelled field and a broken rule."""
    text = (REPOSITORY / "examples" / "tiny.yaml").read_text()
    with pytest.raises(KubectlError, match="maxReplica"):
        _apply(control_plane, namespace, text.replace("maxReplicas", "maxReplica"))
    with pytest.raises(KubectlError, match="minReplicas"):
        _apply(control_plane, namespace, text.replace("minReplicas: 1", "minReplicas: 7"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_teaches(file: Path) -> None:
    """It begins by saying what it is, and comments on what it sets."""
    lines = file.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert sum("#" in line for line in lines) >= 8

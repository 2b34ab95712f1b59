"""The examples are what they teach: taken by `fleetkeeper check` and by a real API server."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fleetkeeper_local.control_plane.access import KubectlError
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.command import run_command
from tests.support.plane.crds import install_crds

REPOSITORY = Path(__file__).parents[3]
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.yaml"))
STREAMED = REPOSITORY / "examples" / "object-storage"
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
    "asleep",
    "simulated",
}


@pytest.fixture(scope="module")
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A namespace on an API server that knows the resource; names fit, for HPA and claims."""
    install_crds(control_plane)
    name = f"examples-{secrets.token_hex(3)}"
    control_plane.kubectl("create", "namespace", name)
    yield name
    control_plane.kubectl("delete", "namespace", name, "--wait=false")


def _apply(plane: ControlPlane, namespace: str, *files: str, text: str | None = None) -> str:
    return plane.kubectl(
        *("-n", namespace, "apply", "--server-side", "--dry-run=server", "--validate=strict"),
        *(f"--filename={file}" for file in files or ("-",)),
        input=text,
    )


def test_there_is_an_example_for_each_way_to_serve() -> None:
    """None is forgotten."""
    assert {file.stem for file in EXAMPLES} == WANTED


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_check_finds_an_example_good_and_says_what_it_needs(file: Path) -> None:
    """Without a cluster, by the command that a user runs first."""
    done = run_command("check", "-f", str(file))
    assert done.code == 0, done.err
    assert ": OK" in done.out
    assert "memory cap   80%" in done.out


def test_the_api_server_takes_the_examples_as_they_are(
    control_plane: ControlPlane, namespace: str
) -> None:
    """Strictly: no unknown or doubled field, no rule of the schema broken."""
    files = [*EXAMPLES, STREAMED / "service.yaml"]
    said = _apply(control_plane, namespace, *map(str, files))
    documents = [item for file in files for item in yaml.safe_load_all(file.read_text()) if item]
    assert said.count("serverside-applied (server dry run)") == len(documents)


def test_the_api_server_refuses_an_example_with_a_mistake(
    control_plane: ControlPlane, namespace: str
) -> None:
    """The dry run checks: it reports a misspelled field and a broken rule."""
    text = (REPOSITORY / "examples" / "tiny.yaml").read_text()
    with pytest.raises(KubectlError, match="maxReplica"):
        _apply(control_plane, namespace, text=text.replace("maxReplicas", "maxReplica"))
    with pytest.raises(KubectlError, match="minReplicas"):
        _apply(control_plane, namespace, text=text.replace("minReplicas: 1", "minReplicas: 7"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_teaches(file: Path) -> None:
    """It begins by saying what it is, and comments on what it sets."""
    lines = file.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert sum("#" in line for line in lines) >= 8

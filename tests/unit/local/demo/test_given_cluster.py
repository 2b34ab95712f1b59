"""The demo on a cluster of the user: what it builds, which programs it uses, and what it removes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fleetkeeper_local.common.paths import REPOSITORY
from fleetkeeper_local.demo import cluster
from fleetkeeper_local.demo.__main__ import app
from fleetkeeper_local.demo.stage import GivenStage

pytestmark = pytest.mark.exhaustive

KUBECONFIG = {
    "current-context": "a",
    "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
    "clusters": [{"name": "a", "cluster": {"server": "http://127.0.0.1:9"}}],
    "users": [{"name": "a", "user": {}}],
}


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's kubeconfig, in DEMO_KUBECONFIG."""
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(KUBECONFIG))
    monkeypatch.setenv("DEMO_KUBECONFIG", str(path))
    monkeypatch.delenv("DEMO_VALUES", raising=False)
    return path


def program(path: Path, text: str) -> Path:
    """Write a program of the shell."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_down_removes_the_demo_with_the_programs_of_the_user(
    kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster and everything else in it stays."""
    record = tmp_path / "record"
    for name in ("kubectl", "helm"):
        program(tmp_path / "bin" / name, f'echo "{name} $@" >> {record}')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    done = CliRunner().invoke(app, ["down"])

    assert done.exit_code == 0, done.output
    given = f"--kubeconfig {kubeconfig} "
    assert [line.partition(given)[2] for line in record.read_text().splitlines()] == [
        "delete namespace fleetkeeper-demo --ignore-not-found",
        "uninstall fleetkeeper --namespace fleetkeeper-system --wait --ignore-not-found",
        "delete namespace fleetkeeper-system --ignore-not-found",
    ]


def test_a_program_that_the_user_lacks_is_that_of_the_local_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cluster, "program_path", lambda name: Path("/built", name))
    assert cluster.on_path("helm") == Path("/built/helm")


@pytest.mark.parametrize(
    ("found", "address"), [("service/fleetkeeper-gateway", "http://127.0.0.1:4321"), ("", "")]
)
def test_a_service_is_reached_by_a_port_forward_if_it_is_there(
    kubeconfig: Path, tmp_path: Path, found: str, address: str
) -> None:
    kubectl = program(
        tmp_path / "bin" / "kubectl",
        f"""case "$*" in
        *"-n system get service fleetkeeper-gateway --ignore-not-found"*) echo "{found}" ;;
        *"-n system port-forward service/fleetkeeper-gateway :80"*)
            echo "Forwarding from 127.0.0.1:4321 -> 8080"; exec sleep 60 ;;
        *) exit 1 ;;
        esac""",
    )
    given = cluster.Cluster(kubeconfig, lambda _name: kubectl)
    with GivenStage(given, tmp_path).reach("system", "fleetkeeper-gateway") as reached:
        assert reached == address


@pytest.mark.usefixtures("kubeconfig")
def test_up_needs_the_names_of_the_images() -> None:
    done = CliRunner().invoke(app, ["up"])
    assert done.exit_code == 1
    assert "set DEMO_VALUES too" in done.output


@pytest.mark.parametrize(
    ("variables", "builds", "options"),
    [
        ([], (True, True), ""),
        (["ENGINE=simulated"], (True, False), ' --engines "simulated"'),
        (["DEMO_KUBECONFIG=a"], (False, False), ""),
        (["DEMO_KUBECONFIG=a", "ENGINE=simulated"], (False, False), ' --engines "simulated"'),
    ],
)
def test_make_builds_for_the_demo_only_what_it_needs(
    variables: list[str], builds: tuple[bool, bool], options: str
) -> None:
    """Neither the node's programs nor the environment of vLLM are needed in another cluster."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {"DEMO_KUBECONFIG", "ENGINE"}
    }
    text = subprocess.run(
        ["make", "--dry-run", "demo", *variables],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"fleetkeeper_local.demo up{options}\n" in text
    assert ("fleetkeeper_local build" in text, "setup.py engine" in text) == builds

"""A cluster that the user has: looked at, remembered, told in plain words, and never changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.control_plane.ports import free_ports
from tests.support.guards import GUARD_S

pytestmark = pytest.mark.exhaustive


def local(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fleetkeeper_local", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=GUARD_S,
        env={**os.environ, "TERM": "dumb"},
    )


def mutations(plane: ControlPlane, agent: str) -> list[str]:
    lines = plane.audit_log.read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [
        event["requestURI"]
        for event in events
        if event["verb"] not in {"get", "list", "watch"}
        and agent in event.get("userAgent", "")
        and "selfsubjectaccessreviews" not in event["requestURI"]
    ]


def test_a_given_cluster_is_looked_at_remembered_and_left_as_it_is(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    """`up --kubeconfig`, `status`, `kubeconfig`, `load-image`, `up` and `down` in a row."""
    control_plane.ensure_nodes(1)
    home = tmp_path / "home"
    up = local("up", "--dir", home, "--kubeconfig", control_plane.kubeconfig)
    assert up.returncode == 0, up.stderr
    assert f"API         {control_plane.apiserver_url} (Kubernetes v1.36" in up.stdout
    assert "GPUs allocatable" in up.stdout
    assert "missing" not in up.stdout
    assert f"export KUBECONFIG={control_plane.kubeconfig}" in up.stderr
    status = local("status", "--dir", home)
    assert status.returncode == 0, status.stderr
    assert status.stdout == up.stdout
    assert local("kubeconfig", "--dir", home).stdout.strip() == str(control_plane.kubeconfig)
    pushed = local("load-image", "nothing.tar", "name", "--dir", home)
    assert pushed.returncode == 1
    assert "make images push REGISTRY=" in pushed.stderr
    other = local("up", "--control-plane-only", "--dir", home)
    assert other.returncode == 1
    assert f"fleetkeeper local down --dir {home}" in other.stderr
    down = local("down", "--dir", home)
    assert down.returncode == 0
    assert "unchanged" in down.stderr
    assert list(home.iterdir()) == []
    assert mutations(control_plane, "OpenAPI-Generator") == []


def test_a_user_who_may_not_install_is_told_which_rights_are_missing(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    """Reading nodes suffices to look; what the chart needs beyond it is named."""
    control_plane.ensure_nodes(1)
    poor = control_plane.user_kubeconfig("poor")
    refused = local("up", "--dir", tmp_path / "a", "--kubeconfig", poor)
    assert refused.returncode == 1
    assert "403 Forbidden" in refused.stderr
    assert "read nodes" in refused.stderr
    control_plane.kubectl("create", "clusterrole", "looks", "--verb=list", "--resource=nodes")
    control_plane.kubectl(
        "create", "clusterrolebinding", "looks", "--clusterrole=looks", "--user=poor"
    )
    try:
        seen = local("up", "--dir", tmp_path / "b", "--kubeconfig", poor)
    finally:
        control_plane.kubectl("delete", "clusterrolebinding,clusterrole", "looks")
    assert seen.returncode == 0, seen.stderr
    assert seen.stdout.count("missing  ") == 3


@pytest.mark.parametrize(
    "content",
    [None, "{", "kind: Config\n"],
)
def test_a_file_that_is_no_kubeconfig_is_named(tmp_path: Path, content: str | None) -> None:
    """Missing, half a document, and one without a context: one line, exit code 1, no record."""
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content)
    done = local("up", "--dir", tmp_path / "home", "--kubeconfig", path)
    assert done.returncode == 1
    assert "kubeconfig" in done.stderr
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "home").exists()


def test_a_cluster_that_does_not_answer_is_named(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    """The address and the cause, at once and not after retries."""
    document = yaml.safe_load(control_plane.kubeconfig.read_text())
    (port,) = free_ports(1)
    document["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(document))
    done = local("up", "--dir", tmp_path / "home", "--kubeconfig", path)
    assert done.returncode == 1
    assert f"https://127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr

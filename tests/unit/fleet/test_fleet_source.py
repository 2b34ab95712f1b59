"""`top` and `explain` without an API server: one line that says what to do, and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetkeeper.exit_codes import ExitCode
from fleetkeeper_local.control_plane.ports import free_ports
from tests.support.lanes import keep_first


@pytest.mark.parametrize(
    "command",
    keep_first(1, [["top", "--once"], ["top"], ["explain", "chat"]], pytest.mark.exhaustive),
    ids=" ".join,
)
def test_an_api_server_that_is_away_is_one_line(tmp_path: Path, command: list[str]) -> None:
    """It names the server and the kubeconfig."""
    (port,) = free_ports(1)
    server = f"https://127.0.0.1:{port}"
    path = tmp_path / "kubeconfig"
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "clusters": [{"name": "here", "cluster": {"server": server}}],
                "users": [{"name": "me", "user": {"token": "t"}}],
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            }
        )
    )
    result = subprocess.run(
        [sys.executable, "-m", "fleetkeeper", *command],
        env={**os.environ, "KUBECONFIG": str(path)},  # which the client reads once, at its import
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == ExitCode.FAILED, result.stderr
    (line,) = result.stderr.splitlines()
    assert server in line
    assert "KUBECONFIG" in line

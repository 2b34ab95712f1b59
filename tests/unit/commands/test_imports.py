"""A command starts fast: it imports its own modules, and no library that it does not use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fleetkeeper.cli import COMMANDS
from fleetkeeper.exit_codes import ExitCode

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
from fleetkeeper.cli import main
code = 0
try:
    main()
except SystemExit as end:
    code = end.code
print(json.dumps([code, sorted(sys.modules)]), file=sys.__stdout__)
"""
LIBRARIES = {
    "aiohttp",
    "kopf",
    "kubernetes",
    "matplotlib",
    "numpy",
    "openai",
    "prometheus_api_client",
    "requests",
}
HEAVY = {
    *LIBRARIES,
    "fleetkeeper_kube.client",
    "fleetkeeper.events",
    "fleetkeeper.runtime",
    "fleetkeeper.simulate",
    "fleetkeeper_local",
}
DECISIONS = {"fleetkeeper.adapters", "fleetkeeper.autoscale", "fleetkeeper.reconcile"}
ALL_ELSE = {"fleetkeeper.api", *DECISIONS}
SERVICE = """
apiVersion: fleetkeeper.io/v1alpha1
kind: InferenceService
metadata: {name: chat, namespace: team-a}
spec: {model: {source: "pvc://models/llama-3.1-8b"}}
"""


def loaded(*words: str, folder: Path, code: int = 0) -> set[str]:
    """Run a command in a process of its own; return the modules that it imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        env={**os.environ, "FLEETKEEPER_API_KEY": "fk_test"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    ended, modules = json.loads(done.stdout.splitlines()[-1])
    assert ended == code, done.stderr
    assert "fleetkeeper.cli" in modules
    return set(modules)


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        ("version", DECISIONS),
        ("crds", DECISIONS),
        ("batch --help", ALL_ELSE),
        ("batch status --help", ALL_ELSE),
        ("usage --help", {"fleetkeeper.autoscale"}),
        ("keys list --help", {"fleetkeeper.autoscale"}),
        ("render -f chat.yaml", {"fleetkeeper.adapters"}),
        ("check -f chat.yaml", {"fleetkeeper.adapters"}),
    ],
)
def test_a_light_command_imports_no_heavy_module(
    words: str, unused: set[str], tmp_path: Path
) -> None:
    (tmp_path / "chat.yaml").write_text(SERVICE)
    found = loaded(*words.split(), folder=tmp_path)
    assert found & (HEAVY | unused) == set()


def test_the_help_imports_no_heavy_library(tmp_path: Path) -> None:
    """It has a sentence of each command, so it imports all of their modules."""
    found = loaded("--help", folder=tmp_path)
    modules = {place.partition(":")[0] for place in COMMANDS.values()}
    assert modules <= found
    assert found & LIBRARIES == set()


def test_a_batch_needs_its_client_alone(tmp_path: Path) -> None:
    """The client imports aiohttp where it is installed."""
    words = ("batch", "status", "--url", "http://127.0.0.1:9")
    found = loaded(*words, folder=tmp_path, code=ExitCode.FAILED)
    assert "openai" in found
    assert found & ((HEAVY | ALL_ELSE) - {"aiohttp", "openai"}) == set()


def test_the_names_of_heavy_modules_are_right() -> None:
    missing = [name for name in HEAVY | ALL_ELSE if find_spec(name) is None]
    assert missing == []

"""The environment with vLLM, the tiny model and a free port, for tests that start engines."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from fleetkeeper_local.control_plane.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / os.environ.get("FLEETKEEPER_TEST_ENGINE", ".venv-engine")
"""The environment under test. `make test-engine-previous` names the one with the previous vLLM."""
PYTHON = ENVIRONMENT / "bin" / "python"
STOCK_PYTHON = ENVIRONMENT / "base" / "bin" / "python"
"""The environment with vLLM and nothing of ours: what a stock vLLM image looks like."""


def free_port() -> int:
    """A TCP port that nobody listens on now, and that no outgoing connection gets."""
    return free_ports(1)[0]


def make_tiny_model(directory: Path, layers: int = 4) -> Path:
    """The tiny model, made once in a directory; with more layers its steps take longer."""
    if not (directory / "tokenizer_config.json").exists():
        script = ROOT / "scripts" / "tiny_model.py"
        subprocess.run([STOCK_PYTHON, script, directory, f"--layers={layers}"], check=True)
    return directory

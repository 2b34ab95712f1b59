"""`fleetkeeper` inside the test process: starting Python and importing the program costs more than most commands."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from kubernetes import config
from kubernetes.config import kube_config
from typer.testing import CliRunner

from fleetkeeper.cli import app


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


def run_command(*arguments: str, kubeconfig: Path | None = None) -> Ran:
    """Run `fleetkeeper` without the settings of this process; raise what the command does not handle."""
    environment = {key: None for key in os.environ if "FLEETKEEPER" in key}
    access = {} if kubeconfig is None else {"KUBECONFIG": str(kubeconfig)}
    # The library reads KUBECONFIG once, when it is imported.
    name, path = "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig)
    with patch.object(config, name, path), patch.object(kube_config, name, path):
        done = CliRunner().invoke(app, arguments, env={**environment, **access})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Ran(done.exit_code, done.stdout, done.stderr)

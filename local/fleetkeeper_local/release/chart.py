"""The packaged chart: written with digests, pushed to and read from a registry by Helm."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.shell import attempt
from fleetkeeper_local.control_plane.programs import program_path
from fleetkeeper_local.release import references
from fleetkeeper_local.release.checks import CHART

TIMEOUT_S = 300.0


def package(root: Path, values: str, target: Path, scratch: Path) -> Path:
    """Package the checkout's chart with these values; return the archive in `target`."""
    draft = scratch / CHART.name
    shutil.copytree(root / CHART, draft)
    (draft / "values.yaml").write_text(values)
    shutil.copy(root / "LICENSE", draft)
    _helm("lint", "--quiet", "--strict", str(draft))
    _helm("package", str(draft), f"--destination={target}")
    (archive,) = target.glob(f"{CHART.name}-*.tgz")
    return archive


def push(archive: Path, charts: str) -> str:
    """Push the archive to `HOST/PATH/charts`; return the digest that the registry gave it."""
    done = _helm("push", str(archive), f"oci://{charts}", *_transport(charts))
    found = re.search(r"^Digest: (sha256:[0-9a-f]{64})$", done, re.MULTILINE)
    if found is None:
        raise LocalError(f"helm push printed no digest: {done.strip()}")
    return found[1]


def published_values(charts: str, version: str) -> dict[str, Any]:
    """Return the values of the chart that was released as this version.

    Raises:
        LocalError: the registry does not have it; the text is Helm's.
    """
    name = f"oci://{charts}/{CHART.name}"
    text = _helm("show", "values", name, f"--version={version}", *_transport(charts))
    values: dict[str, Any] = yaml.safe_load(text)
    return values


def _transport(charts: str) -> list[str]:
    return ["--plain-http"] if references.plain_http(charts) else []


def _helm(*arguments: str) -> str:
    done = attempt(program_path("helm"), *arguments, timeout_s=TIMEOUT_S)
    if done.returncode:
        raise LocalError(
            f"`helm {' '.join(arguments)}` failed with exit code {done.returncode}: "
            f"{(done.stderr or done.stdout).strip()}"
        )
    return done.stdout + done.stderr if arguments[0] == "push" else done.stdout

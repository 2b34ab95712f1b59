"""Renders the chart with the real Helm."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fleetkeeper_local.control_plane.programs import program_path

CHART = Path(__file__).parents[3] / "charts" / "fleetkeeper"
RELEASE = "fleetkeeper"
NAMESPACE = "fleetkeeper-system"


class HelmError(RuntimeError):
    """Helm refused; the message is its own."""


def helm(*arguments: str, values: Mapping[str, Any] | None = None) -> str:
    """Runs Helm with values given on standard input (JSON is YAML).

    Raises:
        HelmError: it ended with a status other than 0.
    """
    takes_values = arguments[0] in {"template", "lint", "install", "upgrade"}
    done = subprocess.run(
        [str(program_path("helm")), *arguments, *(["--values", "-"] if takes_values else [])],
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    if done.returncode:
        raise HelmError(done.stderr.strip() or done.stdout.strip())
    return done.stdout


def template(
    values: Mapping[str, Any] | None = None, *, release: str = RELEASE, namespace: str = NAMESPACE
) -> str:
    """The chart as Helm renders it, hooks included."""
    place = (f"--namespace={namespace}", "--kube-version=1.36.3")
    return helm("template", release, str(CHART), *place, values=values)


def rendered(
    values: Mapping[str, Any] | None = None, *, release: str = RELEASE, namespace: str = NAMESPACE
) -> list[dict[str, Any]]:
    """Every object of the chart, which the caller may change; Helm runs once for the same values."""
    return copy.deepcopy(_rendered(json.dumps(values or {}), release, namespace))


@cache
def _rendered(values: str, release: str, namespace: str) -> list[dict[str, Any]]:
    text = template(json.loads(values), release=release, namespace=namespace)
    # The loader in C: the one in Python takes longer than Helm.
    return [item for item in yaml.load_all(text, yaml.CSafeLoader) if item]


def only(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The object of that kind and name."""
    (found,) = (o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name))
    return found

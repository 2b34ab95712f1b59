"""KEDA's operator and metrics server, built from its Go module when first needed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.paths import cache_dir
from fleetkeeper_local.common.report import say

PINS = Path(__file__).resolve().parent / "keda"
MODULE = "github.com/kedacore/keda/v2"
OPERATOR, METRICS_SERVER = "operator", "adapter"
"""The names of the two commands in KEDA's module."""


def keda_home() -> Path:
    """Return the directory of both programs in the cache, named by the pinned versions."""
    pins = b"".join((PINS / name).read_bytes() for name in ("go.mod", "go.sum"))
    return cache_dir() / "programs" / f"keda-{hashlib.sha256(pins).hexdigest()[:16]}"


def ensure_keda() -> Path:
    """Build both programs if they are not in the cache; return their directory.

    Raises:
        LocalError: the module cannot be had, or the build failed.
    """
    home = keda_home()
    if home.exists():
        return home
    sources = module_directory()
    home.parent.mkdir(parents=True, exist_ok=True)
    say("building KEDA (a quarter of an hour the first time)")
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=".build-") as scratch:
        draft = Path(scratch) / "whole"
        draft.mkdir()
        argv = ["go", "build", "-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags=-s -w"]
        commands = [f"./cmd/{name}" for name in (OPERATOR, METRICS_SERVER)]
        _go([*argv, "-o", f"{draft}/", *commands], sources)
        draft.replace(home)
    return home


def module_directory() -> Path:
    """Return the directory of KEDA's sources, with its CRDs.

    Raises:
        LocalError: the module cannot be had.
    """
    found = json.loads(_go(["go", "mod", "download", "-json", MODULE], PINS))
    return Path(found["Dir"])


def _go(argv: list[str], folder: Path) -> str:
    done = subprocess.run(
        argv,
        cwd=folder,
        env={**os.environ, "CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise LocalError(f"`{' '.join(argv)}` in {folder} failed:\n{done.stderr[-2000:]}")
    return done.stdout

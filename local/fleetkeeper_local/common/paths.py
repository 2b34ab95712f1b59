"""Paths of the local cluster."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
REPOSITORY = PACKAGE.parent.parent
NODE_SOURCES = PACKAGE.parent / "node"


def cache_dir() -> Path:
    """Return the directory of what outlives a checkout (programs, images), as scripts/setup.py."""
    given = os.environ.get("FLEETKEEPER_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fleetkeeper"


def data_dir() -> Path:
    """Return the default data directory; the local cluster writes everything below it."""
    given = os.environ.get("FLEETKEEPER_LOCAL_DIR")
    if given:
        return Path(given)
    share = os.environ.get("XDG_DATA_HOME", Path.home() / ".local" / "share")
    return Path(share) / "fleetkeeper-local"

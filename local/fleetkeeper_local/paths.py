"""Where the local cluster keeps things."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
REPOSITORY = PACKAGE.parent.parent
NODE_SOURCES = PACKAGE.parent / "node"
MANIFESTS = PACKAGE / "manifests"


def cache_dir() -> Path:
    """What may outlive a checkout: built programs, images. The same folder as scripts/setup.py's."""
    given = os.environ.get("FLEETKEEPER_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fleetkeeper"


def data_dir() -> Path:
    """The default folder of the local cluster: everything it writes lies below."""
    given = os.environ.get("FLEETKEEPER_LOCAL_DIR")
    if given:
        return Path(given)
    share = os.environ.get("XDG_DATA_HOME", Path.home() / ".local" / "share")
    return Path(share) / "fleetkeeper-local"

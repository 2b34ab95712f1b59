"""Measurements of the last start, kept beside shared memory: a restarted container plans with them.

A file with a few numbers in the run directory (an emptyDir in a pod: it outlives the container, not
the pod). It is advisory: if the file is missing or damaged, the general figures apply.
"""

from __future__ import annotations

import json
from pathlib import Path

FILE = "measured.json"


def read_measured(directory: Path, key: str) -> int | None:
    """Return the bytes that the last start with this `key` needed beyond its plan; None if unknown."""
    try:
        value = json.loads((directory / FILE).read_text())
    except (OSError, ValueError):
        return None
    known = isinstance(value, dict) and value.get("key") == key
    amount = value.get("bytes") if known else None
    return amount if isinstance(amount, int) and 0 <= amount < 1 << 50 else None


def write_measured(directory: Path, key: str, amount_bytes: int) -> None:
    """Save a measurement.

    Raises:
        OSError: if the directory cannot be written.
    """
    made = directory / f".{FILE}"
    made.write_text(json.dumps({"key": key, "bytes": amount_bytes}))
    made.replace(directory / FILE)

"""What the last start measured, kept beside the page: a restarted container plans with it.

A file of a few numbers in the run directory (an emptyDir in a pod: it outlives the container, not
the pod). It is advice: a missing or damaged file means the general figures.
"""

from __future__ import annotations

import json
from pathlib import Path

FILE = "measured.json"


def read_measured(directory: Path, key: str) -> int | None:
    """Bytes that the last start with the same `key` needed beyond its plan; None when unknown."""
    try:
        value = json.loads((directory / FILE).read_text())
    except (OSError, ValueError):
        return None
    known = isinstance(value, dict) and value.get("key") == key
    amount = value.get("bytes") if known else None
    return amount if isinstance(amount, int) and 0 <= amount < 1 << 50 else None


def write_measured(directory: Path, key: str, amount_bytes: int) -> None:
    """Keeps a measurement.

    Raises:
        OSError: when the directory cannot be written.
    """
    made = directory / f".{FILE}"
    made.write_text(json.dumps({"key": key, "bytes": amount_bytes}))
    made.replace(directory / FILE)

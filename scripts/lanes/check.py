"""Check promises, quarantine and recorded durations: a part of `make check`."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

from lanes import promises, quarantine, slices
from lanes.marks import ROOT


def problems(root: Path) -> list[str]:
    """Return a line for each thing that is wrong."""
    entries = quarantine.read_quarantine(root)
    return [
        *quarantine.problems(root, entries, datetime.now(UTC).date()),
        *promises.problems(root, entries),
        *slices.problems(root, slices.read_durations(root)),
    ]


def main() -> None:
    """Print what is wrong; exit with 1 if there is anything."""
    try:
        found = problems(ROOT)
    except ValueError as error:
        found = [str(error)]
    for problem in found:
        print(f"check: {problem}")
    if found:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""The lanes of the tests: CI runs what `make test` runs."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def _pytest_arguments(line: str) -> list[str]:
    words = shlex.split(line.partition("-m pytest ")[2])
    return [word for word in words if not word.startswith("--durations")]


def test_ci_runs_what_make_test_runs() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "test"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},  # without what a `make` around this test was given
        capture_output=True,
        text=True,
        check=True,
    )
    (made,) = (line for line in done.stdout.splitlines() if "-m pytest" in line)
    *_, last = (ROOT / ".ci" / "run").read_text().splitlines()
    assert last.startswith("exec "), "nothing is printed after pytest's closing line"
    assert _pytest_arguments(last) == _pytest_arguments(made)

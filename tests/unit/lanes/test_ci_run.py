"""CI runs what `make test` runs, and a slice of the long lane; pytest's closing line is its last."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SELECTION = ["-m", "not exhaustive"]


def _made(*arguments: str) -> str:
    done = subprocess.run(
        ["make", "--silent", *arguments],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},  # without what a `make` around this test was given
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def _command(*variables: str) -> list[str]:
    return shlex.split(_made("test-command", *variables))


def test_the_command_of_ci_is_that_of_make_test() -> None:
    (line,) = (line for line in _made("--dry-run", "test").splitlines() if "-m pytest" in line)
    assert shlex.split(line) == _command()


def test_a_slice_replaces_the_selection_and_nothing_else() -> None:
    usual = _command()
    at = next(place for place in range(len(usual)) if usual[place : place + 2] == SELECTION)
    assert _command("SLICE=auto") == [*usual[:at], "--slice=auto", *usual[at + 2 :]]


def test_ci_executes_that_command_last_and_repeats_no_part_of_it() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    *_, last = script.splitlines()
    assert last.startswith('eval "exec $tests'), "nothing is printed after pytest's closing line"
    assert "test-command SLICE=auto" in script
    assert "-m pytest" not in script

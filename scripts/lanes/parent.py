"""Tests that failed, run again on the first parent: is the failure one of this change?"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAX_REPEATS: Final = 5
"""With more failures than this, the change is the likely cause, and nothing is run again."""
PREPARED: Final = {
    "unit": ("setup",),
    "gateway": ("setup",),
    "router": ("setup",),
    "simulated": ("setup",),
    "cluster": ("setup", "programs"),
    "fault": ("setup", "programs"),
    "engine": ("setup", "setup-engine"),
}
"""The targets of the Makefile that tests of a folder need; those of other folders need all."""
ALL_TARGETS: Final = ("setup", "setup-engine", "programs")
OUTCOMES: Final = {
    0: "passes on the parent",
    1: "fails on the parent too",
    4: "does not exist on the parent",
    5: "is not run on the parent",
}
"""By pytest's exit code."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A failed test of the slice, and whether it blocks the change."""

    test: str
    blocks: bool
    why: str
    output: str = ""
    """The output of pytest on the parent."""


class NoParentError(Exception):
    """The first parent cannot be checked out."""


def judge(root: Path, tests: Sequence[str], say: Callable[[str], None]) -> list[Verdict]:
    """Return a verdict for each test, from a run on the first parent on this machine.

    A test does not block if it fails there too. It blocks if that cannot be known.
    """
    if len(tests) > MAX_REPEATS:
        why = f"{len(tests)} tests of the slice failed; at most {MAX_REPEATS} are run again on the parent"
        return [Verdict(test, True, why) for test in tests]
    try:
        with _parent(root) as (checkout, commit):
            say(f"run again on the first parent, {commit}: {', '.join(tests)}")
            _prepare(checkout, tests)
            return [_verdict(checkout, test) for test in tests]
    except NoParentError as error:
        return [Verdict(test, True, str(error)) for test in tests]


@contextmanager
def _parent(root: Path) -> Iterator[tuple[Path, str]]:
    """Check out the first parent in a folder of its own; raise NoParentError if there is none."""
    commit = _run(root, "git", "rev-parse", "--short=12", "--verify", "--quiet", "HEAD^1")
    if commit.returncode:
        shallow = _run(root, "git", "rev-parse", "--is-shallow-repository").stdout.strip() == "true"
        raise NoParentError(
            "this clone is shallow and has no parent commit; clone with at least two commits"
            if shallow
            else "the commit that is checked out has no parent"
        )
    name = commit.stdout.strip()
    with tempfile.TemporaryDirectory(prefix="fleetkeeper-parent-") as folder:
        checkout = Path(folder) / "checkout"
        added = _run(root, "git", "worktree", "add", "--detach", str(checkout), name)
        if added.returncode:
            raise NoParentError(f"the parent {name} cannot be checked out: {added.stderr.strip()}")
        try:
            yield checkout, name
        finally:
            _run(root, "git", "worktree", "remove", "--force", str(checkout))


def _prepare(checkout: Path, tests: Sequence[str]) -> None:
    folders = {test.split("/")[1] for test in tests}
    needed = {target for folder in folders for target in PREPARED.get(folder, ALL_TARGETS)}
    for target in (target for target in ALL_TARGETS if target in needed):
        made = _run(checkout, "make", "--no-print-directory", target)
        if made.returncode:
            last = (made.stdout + made.stderr).strip().splitlines()[-1:]
            raise NoParentError(f"`make {target}` fails on the parent: {''.join(last)}")


def _verdict(checkout: Path, test: str) -> Verdict:
    done = _run(checkout, ".venv/bin/python", "-m", "pytest", "-p", "no:cacheprovider", test)
    why = OUTCOMES.get(
        done.returncode, f"cannot be run on the parent (exit code {done.returncode})"
    )
    return Verdict(test, done.returncode != 1, why, done.stdout + done.stderr)


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command without the settings of the pytest and the make around this one."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(
            ("PYTEST_", "MAKE", "MFLAGS", "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX")
        )
    }
    return subprocess.run(
        command,
        cwd=folder,
        env=kept,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

"""Runs of pytest with slices and quarantine, in a repository of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from lanes import parent
from lanes.marks import ROOT
from lanes.parent import MAX_REPEATS, judge

pytestmark = pytest.mark.slow

CONFTEST = """
from lanes import plugin

def pytest_addoption(parser):
    plugin.add_options(parser)

def pytest_configure(config):
    config.pluginmanager.register(plugin.Lanes(config), "lanes")
"""
SETTINGS = """
[tool.pytest.ini_options]
markers = ["exhaustive: long"]
# Without the plugins that these tests do not need: each run would import them.
addopts = ["--import-mode=importlib", "--strict-markers", "-p", "no:hypothesispytest", "-p", "no:anyio", "-p", "no:asyncio"]
"""
MAKEFILE = """
setup:
\t@mkdir -p .venv/bin
\t@printf '#!/bin/sh\\nexec "%s" "$$@"\\n' '{python}' > .venv/bin/python
\t@chmod +x .venv/bin/python
"""
TESTS = """
import pytest

@pytest.mark.exhaustive
def test_broken_for_long():
    assert 1 == 2

@pytest.mark.exhaustive
def test_that_holds():
    assert 1 == 1

def test_usual():
    assert 1 == 1

def test_flaky():
    assert 3 == 4
"""
QUARANTINE = '- {{test: "tests/unit/test_long.py::test_flaky", reason: known, date: {today}}}\n'
FILE = "tests/unit/test_long.py"


def _git(folder: Path, *arguments: str) -> None:
    who = [
        "-c",
        "user.name=test",
        "-c",
        "user.email=test@example.com",
        "-c",
        "commit.gpgsign=false",
    ]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def _commit(folder: Path, **replaced: str) -> None:
    file = folder / FILE
    text = file.read_text()
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    _git(folder, "add", ".")
    _git(folder, "commit", "--allow-empty", "-m", "a commit")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit, of which one exhaustive test fails."""
    folder = tmp_path / "repository"
    (folder / "tests/unit").mkdir(parents=True)
    for name, text in {
        "pyproject.toml": SETTINGS,
        "Makefile": MAKEFILE.format(python=sys.executable),
        "tests/conftest.py": CONFTEST,
        "tests/quarantine.yaml": QUARANTINE.format(today=datetime.now(UTC).date()),
        FILE: TESTS,
        ".gitignore": "__pycache__/\n.venv/\n/out/\n",
    }.items():
        (folder / name).write_text(text)
    _git(folder, "init", "--initial-branch=main")
    _commit(folder)
    return folder


def _run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Return pytest's exit code, its output and its last line."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, "tests"],
        cwd=folder,
        env=clean | {"PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, done.stdout.strip().splitlines()[-1]


def _counts(line: str) -> dict[str, int]:
    """Return what pytest's closing line counts."""
    found = re.findall(r"(\d+) ([a-z ]+?)(?:,| in )", line)
    return {kind: int(count) for count, kind in found if kind != "deselected"}


@pytest.fixture(autouse=True)
def plugin_of_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on the parent find it too."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "scripts"))


@pytest.mark.exhaustive
def test_a_failure_of_the_parent_too_does_not_block(repository: Path) -> None:
    """With workers, whose reports are those of tests in a slice too."""
    _commit(repository)
    code, output, last = _run(repository, "--slice=auto", "-n2", "--processor-bound=100")
    assert code == 0, output
    assert _counts(last) == {"passed": 2, "not this change": 1}
    assert "slice 1 of 1 (2 first-parent commits) of the long lane" in output
    assert "1 passed, 1 failed" in output
    assert "test_broken_for_long: not this change" in output
    assert "test_flaky: since" in output
    assert "bound 100" in output
    (note,) = (repository / "out/not-this-change").iterdir()
    assert note.read_text().count("assert 1 == 2") >= 2
    listed = subprocess.run(
        ["git", "worktree", "list"], cwd=repository, capture_output=True, text=True, check=True
    )
    assert len(listed.stdout.splitlines()) == 1


def test_a_failure_that_the_parent_has_not_blocks(repository: Path) -> None:
    new = (
        "def test_that_is_new():\n    assert 5 == 6\n\n@pytest.mark.exhaustive\ndef test_that_holds"
    )
    _commit(
        repository,
        **{
            "def test_that_holds": new,
            "assert 1 == 1\n\ndef test_usual": "assert 1 == 0\n\ndef test_usual",
        },
    )
    code, output, last = _run(repository, "--slice=1")
    assert code == 1
    assert _counts(last) == {"failed": 2, "passed": 1, "not this change": 1}
    assert "test_that_holds: blocks: passes on the parent" in output
    assert "test_that_is_new: blocks: does not exist on the parent" in output
    assert "test_broken_for_long: not this change" in output


def test_a_failure_outside_of_the_slice_blocks_and_is_not_repeated(repository: Path) -> None:
    _commit(
        repository,
        **{"def test_usual():\n    assert 1 == 1": "def test_usual():\n    assert 1 == 0"},
    )
    code, output, last = _run(repository, "--slice=1")
    assert code == 1
    assert _counts(last) == {"failed": 1, "passed": 1, "not this change": 1}
    assert "test_usual: blocks" not in output


def test_a_shallow_clone_blocks_and_says_why(repository: Path, tmp_path: Path) -> None:
    _commit(repository)
    clone = tmp_path / "clone"
    _git(tmp_path, "clone", "--depth=1", repository.as_uri(), str(clone))
    code, output, last = _run(clone, "--slice=auto")
    assert code == 1
    assert _counts(last) == {"failed": 1, "passed": 2}
    assert "by the hash of" in output
    assert "test_broken_for_long: blocks: this clone is shallow" in output


def test_without_a_slice_all_run_and_nothing_is_repeated(repository: Path) -> None:
    _commit(repository)
    code, output, last = _run(repository, "--with-quarantined", "--record-durations")
    assert code == 1
    assert _counts(last) == {"failed": 2, "passed": 2}
    assert "on the first parent" not in output
    assert f"{FILE}::test_that_holds" in (repository / "tests/durations.json").read_text()
    assert "test_broken_for_long" not in (repository / "tests/durations.json").read_text()


@pytest.mark.parametrize("arguments", [("--slice=2",), ("--slice=first", "-n1")])
def test_a_slice_that_does_not_exist_is_refused(
    repository: Path, arguments: tuple[str, ...]
) -> None:
    code, output, _ = _run(repository, *arguments)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "give auto, or a number from 1 to 1" in output


# -- verdicts without a run of this side -------------------------------------------------------------


def test_many_failures_block_without_a_run_on_the_parent(repository: Path) -> None:
    _commit(repository)
    tests = [f"{FILE}::test_{number}" for number in range(MAX_REPEATS + 1)]
    verdicts = judge(repository, tests, pytest.fail)
    assert [verdict.test for verdict in verdicts] == tests
    assert all(verdict.blocks and f"at most {MAX_REPEATS}" in verdict.why for verdict in verdicts)


def test_the_first_commit_has_no_parent_and_blocks(repository: Path) -> None:
    (verdict,) = judge(repository, [f"{FILE}::test_broken_for_long"], pytest.fail)
    assert verdict.blocks
    assert "has no parent" in verdict.why


def test_a_parent_that_cannot_be_set_up_blocks(repository: Path) -> None:
    (repository / "Makefile").write_text("setup:\n\t@echo no network >&2; exit 3\n")
    _commit(repository)
    _commit(repository)
    (verdict,) = judge(repository, [f"{FILE}::test_broken_for_long"], lambda _: None)
    assert verdict.blocks
    assert "`make setup` fails on the parent" in verdict.why


def test_folders_of_tests_have_what_they_need_on_the_parent() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))}
    assert parent.PREPARED.keys() <= folders
    assert folders - parent.PREPARED.keys() == {"e2e"}
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in parent.ALL_TARGETS)

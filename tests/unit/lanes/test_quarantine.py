"""The quarantine is short, small and names tests that exist."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

from lanes import quarantine
from lanes.quarantine import MAX_DAYS, MAX_ENTRIES, Entry

COMMITTED = datetime(2026, 3, 10, 12, tzinfo=UTC)
TODAY = COMMITTED.date()
NODE_ID = "tests/unit/test_some.py::test_it"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A commit of 10 March 2026 with one test."""
    file = tmp_path / "tests/unit/test_some.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "def test_it():\n    pass\n\n\nclass TestAll:\n    def test_in(self):\n        pass\n"
    )
    dates = {"GIT_COMMITTER_DATE": COMMITTED.isoformat(), "GIT_AUTHOR_DATE": COMMITTED.isoformat()}
    who = [
        "-c",
        "user.name=test",
        "-c",
        "user.email=test@example.com",
        "-c",
        "commit.gpgsign=false",
    ]
    for arguments in (["init"], [*who, "commit", "--allow-empty", "-m", "a commit"]):
        subprocess.run(
            ["git", *arguments],
            cwd=tmp_path,
            env=os.environ | dates,
            check=True,
            capture_output=True,
        )
    return tmp_path


def _problems(root: Path, *entries: Entry, today: date = TODAY) -> list[str]:
    return list(quarantine.problems(root, entries, today))


def test_an_entry_is_overdue_after_seven_days_of_commits_and_not_of_the_clock(root: Path) -> None:
    """A checkout that passed once passes for ever."""
    last = Entry(NODE_ID, "flaky", TODAY - timedelta(days=MAX_DAYS))
    assert _problems(root, last, today=TODAY + timedelta(days=3000)) == []
    (problem,) = _problems(root, Entry(NODE_ID, "flaky", last.since - timedelta(days=1)))
    assert f"more than {MAX_DAYS} days" in problem


def test_a_date_in_the_future_is_refused(root: Path) -> None:
    (problem,) = _problems(root, Entry(NODE_ID, "flaky", TODAY + timedelta(days=1)))
    assert "future" in problem


def test_more_than_five_are_refused(root: Path) -> None:
    entries = [Entry(f"{NODE_ID}[{number}]", "flaky", TODAY) for number in range(MAX_ENTRIES + 1)]
    assert _problems(root, *entries[:-1]) == []
    (problem,) = _problems(root, *entries)
    assert f"{MAX_ENTRIES} at most" in problem


@pytest.mark.parametrize(
    "test",
    ["tests/unit/test_some.py::test_renamed", "tests/unit/test_gone.py::test_it", "tests/unit"],
)
def test_a_test_that_does_not_exist_is_named(root: Path, test: str) -> None:
    (problem,) = _problems(root, Entry(test, "flaky", TODAY))
    assert test in problem


def test_a_test_of_a_class_exists(root: Path) -> None:
    assert _problems(root, Entry("tests/unit/test_some.py::TestAll::test_in", "flaky", TODAY)) == []


def test_outside_of_git_entries_are_refused_and_an_empty_file_is_not(tmp_path: Path) -> None:
    assert _problems(tmp_path) == []
    with pytest.raises(ValueError, match="commit"):
        _problems(tmp_path, Entry(NODE_ID, "flaky", TODAY))


def test_an_entry_covers_its_parameters() -> None:
    whole, one = Entry(NODE_ID, "flaky", TODAY), Entry(f"{NODE_ID}[a]", "flaky", TODAY)
    assert [whole.covers(f"{NODE_ID}{of}") for of in ("", "[a]", "[b]", "_too")] == [1, 1, 1, 0]
    assert [one.covers(f"{NODE_ID}{of}") for of in ("", "[a]", "[b]", "_too")] == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- {test: a, reason: b}", "fields"),
        ("- {test: a, reason: b, date: 2026-03-10, until: 2026-04-10}", "fields"),
        ("- {test: a, reason: b, date: soon}", "date of a"),
        ("- {test: a, reason: '', date: 2026-03-10}", "reason of a"),
        ("- a", "fields"),
    ],
)
def test_a_malformed_entry_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / quarantine.FILE).write_text(text)
    with pytest.raises(ValueError, match=says):
        quarantine.read_quarantine(tmp_path)


def test_an_entry_is_read(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / quarantine.FILE).write_text("- {test: a, reason: b, date: 2026-03-10}")
    assert quarantine.read_quarantine(tmp_path) == [Entry("a", "b", date(2026, 3, 10))]

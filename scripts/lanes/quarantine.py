"""The quarantine: tests that fail without a fault of the change under test, for a few days."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Final

import yaml

from lanes.marks import read_tests

FILE: Final = "tests/quarantine.yaml"
MAX_ENTRIES: Final = 5
MAX_DAYS: Final = 7


@dataclass(frozen=True, slots=True)
class Entry:
    """A test in quarantine."""

    test: str
    """Its node ID; without parameters, all of them."""
    reason: str
    since: date

    @property
    def function(self) -> str:
        """Return the node ID without parameters."""
        return self.test.partition("[")[0]

    def covers(self, nodeid: str) -> bool:
        """Return whether pytest's node ID is this test, or a parameter of it."""
        return nodeid == self.test or nodeid.partition("[")[0] == self.test


def read_quarantine(root: Path) -> list[Entry]:
    """Return the entries of tests/quarantine.yaml; raise ValueError if one is malformed."""
    file = root / FILE
    return (
        [_entry(given) for given in yaml.safe_load(file.read_text()) or []] if file.exists() else []
    )


def _entry(given: object) -> Entry:
    fields = {"test": str, "reason": str, "date": date}
    if not isinstance(given, dict) or given.keys() != fields.keys():
        raise ValueError(f"{FILE}: an entry has the fields test, reason and date: {given}")
    for name, kind in fields.items():
        if not isinstance(given[name], kind) or not given[name]:
            raise ValueError(
                f"{FILE}: {name} of {given['test']} is no {kind.__name__}: {given[name]!r}"
            )
    return Entry(given["test"], given["reason"], given["date"])


def problems(root: Path, entries: Sequence[Entry], today: date) -> Iterator[str]:
    """Yield what is wrong with the quarantine.

    An entry is overdue by the date of the commit that is checked out, so that a checkout that passed
    once passes for ever. A date after `today`, by the clock, would delay that.
    """
    if len(entries) > MAX_ENTRIES:
        yield f"{FILE}: {len(entries)} tests are in quarantine, {MAX_ENTRIES} at most; correct one first"
    for entry in entries:
        file = root / entry.test.partition("::")[0]
        tests = read_tests(root, [file]) if file.is_file() else []
        if entry.function not in {test.nodeid for test in tests}:
            yield f"{FILE}: there is no test {entry.test}"
        if entry.since > today:
            yield f"{FILE}: the date of {entry.test} is in the future"
    if entries:
        due = commit_date(root) - timedelta(days=MAX_DAYS)
        for entry in entries:
            if entry.since < due:
                yield f"{FILE}: {entry.test} is in quarantine for more than {MAX_DAYS} days; correct or delete the test"


def commit_date(root: Path) -> date:
    """Return the day, in UTC, on which the commit that is checked out was made."""
    shown = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=root, capture_output=True, text=True, check=False
    )
    if shown.returncode:
        raise ValueError(
            f"{FILE} has entries, and their age is that of a commit: {shown.stderr.strip()}"
        )
    return datetime.fromtimestamp(int(shown.stdout), UTC).date()

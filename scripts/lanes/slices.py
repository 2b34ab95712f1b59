"""Slices of the long lane: tests with the mark `exhaustive`, packed by their recorded durations."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from lanes.marks import read_tests

FILE: Final = "tests/durations.json"
SLICE_S: Final = 720.0
"""A slice takes at most so long if its tests run one after another."""
UNKNOWN_S: Final = {"unit": 5.0, "gateway": 30.0, "cluster": 60.0, "engine": 90.0, "e2e": 120.0}
"""Counted for a test without a recorded duration, by folder."""
TEST_ALL_ONLY: Final = frozenset(
    {
        "tests/cluster/operator/test_crash.py::test_a_crash_at_any_write_leaves_no_trace[LeastLoaded-every_point]",
        "tests/cluster/operator/test_crash.py::test_a_crash_at_any_write_leaves_no_trace[None-every_point]",
        "tests/gateway/batch/test_campaign.py::test_10_000_lines_have_one_result_each_whatever_is_killed",
    }
)
"""Tests that take longer than a slice and cannot be divided: `make test-all` alone runs them."""


def read_durations(root: Path) -> dict[str, float]:
    """Return the recorded seconds of exhaustive tests by node ID."""
    file = root / FILE
    recorded: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    return recorded


def merged_durations(
    root: Path, before: Mapping[str, float], measured: Mapping[str, float]
) -> dict[str, float]:
    """Return what to record after a run, sorted: without the tests whose functions are gone."""
    both = {**before, **{test: round(took_s, 1) for test, took_s in measured.items()}}
    return {test: both[test] for test in sorted(existing(root, both))}


def existing(root: Path, tests: Iterable[str]) -> set[str]:
    """Return those of the tests whose functions exist; parameters are not checked."""
    given = set(tests)
    files = sorted({root / _file(test) for test in given})
    found = {test.nodeid for test in read_tests(root, [file for file in files if file.is_file()])}
    return {test for test in given if test.partition("[")[0] in found}


def write_durations(root: Path, measured: Mapping[str, float]) -> None:
    """Write the recorded durations."""
    merged = merged_durations(root, read_durations(root), measured)
    (root / FILE).write_text(json.dumps(merged, indent=0) + "\n")


def problems(root: Path, durations: Mapping[str, float]) -> Iterator[str]:
    """Yield the recorded tests that fit into no slice, and names of tests that are gone."""
    for test, took_s in durations.items():
        if took_s > SLICE_S and test not in TEST_ALL_ONLY:
            yield (
                f"{FILE}: {test} takes {took_s:.0f} s, a slice {SLICE_S:.0f} s at most; "
                "divide it, or add it to TEST_ALL_ONLY in scripts/lanes/slices.py"
            )
    for test in sorted(TEST_ALL_ONLY - existing(root, TEST_ALL_ONLY)):
        yield f"scripts/lanes/slices.py: there is no test {test}; correct TEST_ALL_ONLY"


def packed(tests: Iterable[str], durations: Mapping[str, float]) -> list[frozenset[str]]:
    """Return the slices: first fit, the longest first.

    Tests of a file stay together unless the file alone is longer than a slice. A test that is longer
    than a slice is in none. The result depends on the tests and durations alone, not on their order.
    """
    slices: list[tuple[float, set[str]]] = []
    for took_s, unit in sorted(_units(sorted(tests), durations), key=lambda it: (-it[0], it[1])):
        for place, (taken_s, held) in enumerate(slices):
            if taken_s + took_s <= SLICE_S:
                slices[place] = (taken_s + took_s, held | set(unit))
                break
        else:
            slices.append((took_s, set(unit)))
    return [frozenset(held) for _, held in slices]


def expected_s(test: str, durations: Mapping[str, float]) -> float:
    """Return the recorded seconds of a test, or those of its folder."""
    folder = test.split("/")[1]
    return durations.get(test, UNKNOWN_S.get(folder, max(UNKNOWN_S.values())))


def _units(
    tests: Sequence[str], durations: Mapping[str, float]
) -> Iterator[tuple[float, tuple[str, ...]]]:
    """Yield seconds and tests of what stays together: a file, or a part of one."""
    files: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        if test not in TEST_ALL_ONLY and expected_s(test, durations) <= SLICE_S:
            files[_file(test)].append(test)
    for held in files.values():
        unit: list[str] = []
        taken_s = 0.0
        for test in held:
            took_s = expected_s(test, durations)
            if unit and taken_s + took_s > SLICE_S:
                yield taken_s, tuple(unit)
                unit, taken_s = [], 0.0
            unit.append(test)
            taken_s += took_s
        yield taken_s, tuple(unit)


def _file(test: str) -> str:
    return test.partition("::")[0]


def slice_number(root: Path, count: int) -> tuple[int, str]:
    """Return the slice of the commit that is checked out, from 1 to `count`, and what it follows from.

    Consecutive commits of the main branch get consecutive slices. A shallow clone does not know how
    many commits there are, so its slice follows from the commit's hash.
    """
    if git(root, "rev-parse", "--is-shallow-repository") == "true":
        head = git(root, "rev-parse", "HEAD")
        return int(head[:8], 16) % count + 1, f"by the hash of {head[:12]} (shallow clone)"
    commits = int(git(root, "rev-list", "--count", "--first-parent", "HEAD"))
    return commits % count + 1, f"{commits} first-parent commits"


def git(root: Path, *arguments: str) -> str:
    """Return what git prints; raise CalledProcessError if it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()

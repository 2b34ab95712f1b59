"""Slices of the long lane: packing by recorded durations, and the slice of a commit."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes import slices
from lanes.marks import ROOT
from lanes.slices import SLICE_S, UNKNOWN_S, packed

LONG = {"tests/a.py::one": 500.0, "tests/a.py::two": 200.0, "tests/b.py::one": 650.0}


def _seconds(held: frozenset[str], durations: Mapping[str, float]) -> float:
    return sum(slices.expected_s(test, durations) for test in held)


def test_tests_of_a_file_stay_together() -> None:
    small = {f"tests/c.py::{name}": 10.0 for name in "abcde"}
    assert packed({**LONG, **small}, {**LONG, **small}) == [
        frozenset({"tests/a.py::one", "tests/a.py::two"}),
        frozenset({"tests/b.py::one", *small}),
    ]


def test_a_file_that_is_longer_than_a_slice_is_divided() -> None:
    tests = {f"tests/a.py::{number}": 300.0 for number in range(5)}
    assert sorted(len(held) for held in packed(tests, tests)) == [1, 2, 2]


def test_a_test_that_is_longer_than_a_slice_is_in_none_and_is_named() -> None:
    durations = {"tests/a.py::long": SLICE_S + 1, "tests/a.py::short": 1.0}
    assert packed(durations, durations) == [frozenset({"tests/a.py::short"})]
    (problem,) = slices.problems(ROOT, durations)
    assert "tests/a.py::long" in problem


def test_a_test_without_a_duration_counts_as_its_folder_says() -> None:
    in_a_slice = int(SLICE_S // UNKNOWN_S["e2e"])
    tests = [f"tests/e2e/a.py::{number:03}" for number in range(in_a_slice + 1)]
    assert sorted(len(held) for held in packed(tests, {})) == [1, in_a_slice]


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 5), st.integers(0, 9)),
        st.floats(0.1, SLICE_S) | st.none(),
        max_size=40,
    ),
    st.randoms(use_true_random=False),
)
def test_each_test_is_in_one_slice_no_slice_is_too_long_and_order_does_not_matter(
    given_s: dict[tuple[int, int], float | None], chance: random.Random
) -> None:
    tests = {f"tests/{file}.py::{name}": took_s for (file, name), took_s in given_s.items()}
    durations = {test: took_s for test, took_s in tests.items() if took_s is not None}
    found = packed(tests, durations)
    assert sorted(test for held in found for test in held) == sorted(tests)
    assert all(_seconds(held, durations) <= SLICE_S * (1 + 1e-9) for held in found)
    shuffled = list(tests)
    chance.shuffle(shuffled)
    assert packed(shuffled, durations) == found


def test_a_test_of_make_test_all_alone_is_in_no_slice() -> None:
    others = ["tests/unit/a.py::test"]
    assert packed([*slices.TEST_ALL_ONLY, *others], {}) == [frozenset(others)]


def test_a_run_adds_what_it_measured_and_drops_tests_that_are_gone(tmp_path: Path) -> None:
    """A run may measure one slice of a file."""
    (tmp_path / "a.py").write_text("def test_new(): ...\ndef test_kept(): ...\n")
    before = {
        "a.py::test_gone": 1.0,
        "a.py::test_kept[1]": 2.0,
        "a.py::test_new": 9.0,
        "b.py::test": 3.0,
    }
    merged = slices.merged_durations(tmp_path, before, {"a.py::test_new": 1.26})
    assert list(merged.items()) == [("a.py::test_kept[1]", 2.0), ("a.py::test_new", 1.3)]


def test_a_test_of_make_test_all_alone_that_is_gone_is_named(tmp_path: Path) -> None:
    problems = list(slices.problems(tmp_path, {}))
    assert len(problems) == len(slices.TEST_ALL_ONLY)
    assert all("there is no test" in problem for problem in problems)


def test_recorded_durations_are_sorted() -> None:
    recorded = slices.read_durations(ROOT)
    assert (ROOT / slices.FILE).read_text() == json.dumps(recorded, indent=0) + "\n"
    assert list(recorded) == sorted(recorded)


# -- the slice of a commit ---------------------------------------------------------------------------


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


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    _git(folder, "init", "--initial-branch=main")
    return folder


def test_consecutive_commits_of_the_main_branch_get_each_slice_in_turn(repository: Path) -> None:
    """A merge is one commit of it, however many are merged."""
    seen = []
    for number in range(4):
        if number == 2:
            _git(repository, "checkout", "-b", "side")
            for name in ("left", "right"):
                _git(repository, "commit", "--allow-empty", "-m", name)
            _git(repository, "checkout", "main")
            _git(repository, "merge", "--no-ff", "side")
        else:
            _git(repository, "commit", "--allow-empty", "-m", str(number))
        seen.append(slices.slice_number(repository, 3)[0])
    assert seen == [2, 3, 1, 2]


def test_a_shallow_clone_gets_the_slice_of_its_hash(repository: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        _git(repository, "commit", "--allow-empty", "-m", name)
    clone = tmp_path / "clone"
    _git(tmp_path, "clone", "--depth=1", repository.as_uri(), str(clone))
    head = slices.git(clone, "rev-parse", "HEAD")
    assert slices.git(repository, "rev-parse", "HEAD") == head
    number, why = slices.slice_number(clone, 7)
    assert number == int(head[:8], 16) % 7 + 1
    assert "shallow" in why

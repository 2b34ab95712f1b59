"""The table of the control loop's load benchmark: what was missed says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fleetkeeper_local.demo.figure import Run
from fleetkeeper_local.demo.recorder import Observation
from fleetkeeper_local.load.client import Outcome
from fleetkeeper_local.load.open_loop import Sample
from fleetkeeper_local.load.schedule import Arrival

pytestmark = pytest.mark.exhaustive

START_S = 1_767_225_600.0
"""2026-01-01T00:00:00Z."""


@pytest.fixture(scope="module")
def load(part: Callable[[str], ModuleType]) -> ModuleType:
    """benchmarks/control/load.py as a module."""
    return part("load")


def _decision(minute: int, second: int, old: int, new: int) -> dict[str, str]:
    when = f"2026-01-01T00:{minute:02}:{second:02}Z"
    return {"time": when, "what": "replicas", "from": str(old), "to": str(new), "reason": "R"}


def _observations(gone: tuple[float, float], down_s: float) -> list[Observation]:
    observations = []
    for at_s in range(0, 600, 2):
        gauges: dict[Any, float] = {
            ("objective_queue_wait_seconds", ()): 0.5,
            ("signal_coverage_ratio", ()): 1.0,
            ("breaker_state", (("breaker", "source"),)): float(gone[0] + 8 < at_s < gone[1] + 9),
        }
        observations.append(Observation(START_S + at_s, gauges, 2 if 120 <= at_s < down_s else 1))
    return observations


def _rows(load: ModuleType, decisions: list[dict[str, str]], cause: str = "") -> dict[str, Any]:
    outcome = Outcome(not cause, cause, 0, 1, 1.0, 1.1, 2.0, 8)
    samples = [Sample(Arrival(0, 1.0, "x1", "batch", "s", 8, 8), outcome, 1.0, 1.0, 2.0)]
    run = Run("t", START_S, START_S + 600, [], _observations((180, 360), 500), decisions, samples)
    times = load.Times(START_S + 60, START_S + 180, START_S + 360, START_S + 400, START_S + 600)
    waits = tuple((START_S + t, 3.0 if 64 < t < 130 else 0.1) for t in range(0, 200, 2))
    return {row.what: row for row in load.judged(run, times, waits, waits)}


GOOD = [_decision(1, 15, 1, 2), _decision(8, 20, 2, 1)]


def test_a_good_run_keeps_everything(load: ModuleType) -> None:
    """Every figure is counted from the moment that the row names."""
    rows = _rows(load, GOOD)
    assert [row.what for row in rows.values() if not row.kept] == []
    measured = {what.split(",")[0]: row.measured for what, row in rows.items()}
    assert measured["scale-up"] == "9 s"
    assert measured["queue wait back within its objective"] == "10 s"
    assert measured["the breaker reports that Prometheus is down"] == "10 s"
    assert measured["the breaker reports that Prometheus is back"] == "10 s"
    assert measured["load removed: first replica removed after"] == "100 s"


@pytest.mark.parametrize(
    ("decisions", "cause", "missed"),
    [
        ([_decision(1, 40, 1, 2), GOOD[1]], "", "scale-up"),
        ([GOOD[0], _decision(4, 0, 2, 1), GOOD[1]], "", "replicas removed"),
        ([GOOD[0]], "", "load removed: first replica"),
        ([GOOD[0], _decision(6, 50, 2, 1)], "", "load removed: first replica"),
        (GOOD, "truncated", "failed requests"),
    ],
)
def test_what_was_missed_says_so(
    load: ModuleType, decisions: list[dict[str, str]], cause: str, missed: str
) -> None:
    """Too late, too early, or failed."""
    rows = _rows(load, decisions, cause)
    assert next(row for what, row in rows.items() if what.startswith(missed)).kept is False


def test_the_page_marks_what_was_missed(load: ModuleType) -> None:
    """In the table that is published."""
    rows = list(_rows(load, [GOOD[0]]).values())
    run = Run("t", START_S, START_S + 600, [], [], [], [])
    text = load.written(rows, run, 9.4, Path("docs/img/control.png"))
    assert text.count("**missed**") == 1
    assert "](../../docs/img/control.png)" in text

"""The demo's figure and its lines: what was looked at is what is drawn."""

from __future__ import annotations

from math import isnan, nan
from pathlib import Path

import pytest

from fleetkeeper_local.demo.figure import (
    BREAKERS,
    FAULT,
    LOAD,
    Run,
    Span,
    draw,
    gapped,
    spread,
    steps_of,
)
from fleetkeeper_local.demo.recorder import Observation, points_of, ready_of
from fleetkeeper_local.load.client import Outcome
from fleetkeeper_local.load.open_loop import Sample
from fleetkeeper_local.load.schedule import Arrival

pytestmark = pytest.mark.exhaustive

START_S = 1_000_000_000.0


def _observation(at_s: float, *, leading: bool = True) -> Observation:
    gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {
        ("signal_queue_wait_seconds", ()): at_s / 7 + 0.1,
        ("signal_coverage_ratio", ()): float(at_s < 50),
        ("decision_limit_sequences", ()): 11.0,
        ("decision_replicas", (("kind", "allocated"),)): 2.0,
    }
    for name in BREAKERS:
        gauges["breaker_state", (("breaker", name),)] = 1.0
    return Observation(START_S + at_s, gauges if leading else {}, 1)


def _sample(at_s: float) -> Sample:
    outcome = Outcome(True, "", 200, 1, at_s, at_s + 0.1, at_s + 0.5, 8)
    return Sample(Arrival(0, at_s, "x1", "batch", "s", 8, 8), outcome, at_s, at_s, at_s + 0.5)


def test_a_gauge_is_known_only_while_somebody_leads() -> None:
    """Its times count from the start; observations before the start and without a leader are left out."""
    observations = [
        _observation(-2.0),
        _observation(0.0),
        _observation(2.0, leading=False),
        _observation(4.0),
    ]
    points = points_of(observations, START_S, "decision_replicas", kind="allocated")
    assert points == ((0.0, 2.0), (4.0, 2.0))
    assert points_of(observations, START_S, "decision_replicas", kind="live") == ()
    assert ready_of(observations, START_S) == ((0.0, 1.0), (2.0, 1.0), (4.0, 1.0))


def test_no_line_is_drawn_across_what_was_not_known() -> None:
    """While nobody led there is nothing, and nothing is shown."""
    points = gapped([(0.0, 1.0), (2.0, 1.0), (30.0, 2.0), (32.0, 2.0)], 6.0)
    assert [at_s for at_s, _ in points] == pytest.approx([0.0, 2.0, 2.0, 30.0, 32.0], abs=0.01)
    assert [isnan(value) for _, value in points] == [False, False, True, False, False]


def test_a_signal_is_drawn_only_while_it_is_known() -> None:
    """Without a replica whose signals can be used the gauges are 0, and that 0 was not measured."""
    run = Run(
        "A run", START_S, START_S + 60.0, [], [_observation(48.0), _observation(52.0)], [], []
    )
    assert [at_s for at_s, _ in run.signal("signal_queue_wait_seconds")] == [48.0]
    assert [at_s for at_s, _ in run.points("decision_limit_sequences")] == [48.0, 52.0]


def test_requests_become_a_rate() -> None:
    """In whole bins; what came after the end is in none."""
    assert spread([0.0, 1.0, 4.9, 5.0, 11.0], 10.0, 5.0) == ((2.5, 0.6), (7.5, 0.2))


def test_states_become_stretches() -> None:
    """One bar for as long as a breaker is in one state, none where it is not known."""
    points = ((0.0, 0.0), (2.0, 0.0), (4.0, 1.0), (6.0, nan), (20.0, 0.5))
    assert steps_of(points, 22.0) == [(0.0, 4.0, 0.0), (4.0, 6.0, 1.0), (20.0, 22.0, 0.5)]


def test_the_figure_is_written_whatever_there_was_to_see(tmp_path: Path) -> None:
    """With all lines and marks, and with none."""
    spans = [
        Span(START_S, START_S + 60, LOAD, "x1: 3/s"),
        Span(START_S + 9, START_S + 20, FAULT, "frozen"),
    ]
    decisions = [
        {"time": "2001-09-09T01:46:45Z", "what": "replicas", "from": "1", "to": "2"},
        {"time": "2001-09-09T01:46:50Z", "what": "limits", "from": "9/512", "to": "11/512"},
        {"time": "2001-09-09T01:46:50Z", "what": "breaker", "to": "Tier batch"},
    ]
    observations = [_observation(2.0 * n, leading=not 9 < n < 15) for n in range(30)]
    samples = [_sample(float(n)) for n in range(55)]
    end_s = START_S + 60.0
    draw(
        Run("A run", START_S, end_s, spans, observations, decisions, samples),
        tmp_path / "out" / "full.png",
    )
    draw(Run("A run", START_S, end_s, [], [], [], []), tmp_path / "empty.png")
    assert (tmp_path / "out" / "full.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "full.png").stat().st_size > (tmp_path / "empty.png").stat().st_size

"""The comparison of a node with the simulator: the trace, attainments, differences, and when a run is void."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from fleetkeeper.simulate.loads.trace_file import parse_trace
from fleetkeeper_local.load.client import Outcome
from fleetkeeper_local.load.open_loop import Sample
from fleetkeeper_local.load.schedule import Arrival

pytestmark = pytest.mark.exhaustive
STEADY = ((0.0, 2.0), (60.0, 2.0))
Part = Callable[[str], ModuleType]


def measured(part: Part, **changes: Any) -> Any:
    """A run of 20 s in which half of the realtime requests waited longer than their objective."""
    node = part("against_node")
    wait, step, late = node.HISTOGRAMS
    counts = {
        f"{wait} {tier}": {node.WAIT_EDGE_S: within, math.inf: 10.0}
        for tier, within in (("realtime", 5.0), ("standard", 10.0), ("batch", 10.0))
    }
    counts[step] = {node.STEP_EDGE_S: 99.0, math.inf: 100.0}
    counts[late] = {0.001: 90.0, 0.01: 98.0, 0.02: 99.0, math.inf: 100.0}
    run = node.Measured(
        seconds=20.0,
        seed=7,
        wanted=STEADY,
        ready=STEADY,
        counts=counts,
        answers=0.9,
        refused=0.01,
        failed={"batch http_429": 2},
        starts_s=[4.0, 6.0, 20.0],
        busy_ratio=0.3,
        client_late_s=0.004,
        machine="a machine",
    )
    return replace(run, **changes)


def test_both_sides_play_the_same_requests(part: Part) -> None:
    sides = part("both_sides")
    assert sum(phase.seconds for phase in sides.phases_of(900.0)) == pytest.approx(900.0)
    arrivals = sides.planned(900.0, 7)
    rows = parse_trace("t", sides.trace_text(arrivals).encode(), 1e6).rows
    assert [row[0] for row in rows] == [arrival.at_s for arrival in arrivals]
    assert [row[2:] for row in rows] == [(a.prompt_tokens, a.output_tokens) for a in arrivals]
    assert arrivals == sides.planned(900.0, 7)
    assert max(arrival.at_s for arrival in arrivals) < 900.0


def test_the_simulator_plays_the_file(part: Part, tmp_path: Path) -> None:
    """A later start of pods leaves more requests waiting."""
    sides = part("both_sides")
    file = tmp_path / "trace.csv"
    file.write_text(sides.trace_text(sides.planned(180.0, 7)))
    side = sides.simulated(file, 180.0, 5.0, 1)
    assert side == sides.simulated(file, 180.0, 5.0, 1)
    assert side.wanted[0] == (0.0, 2.0)
    assert max(value for _, value in side.ready) > 2.0
    assert 0.5 < side.attained["queue wait"] < 1.0
    assert side.attained["batch time"] > 0.99
    assert sides.simulated(file, 180.0, 40.0, 1).attained["answers"] < side.attained["answers"]


def test_attainments_are_shares_of_all_tiers(part: Part) -> None:
    side = part("against_node").side_of(measured(part))
    assert side.attained == {
        "queue wait": 25 / 30,
        "queue wait, realtime": 0.5,
        "queue wait, standard": 1.0,
        "queue wait, batch": 1.0,
        "batch time": 0.99,
        "answers": 0.9,
    }


@pytest.mark.parametrize(
    ("sent_s", "ended_s", "ok", "good"),
    [(0.0, 5.0, True, True), (1.6, 6.0, True, False), (0.0, 9.0, True, False), (0.0, 5.0, False, False)],
)  # fmt: skip
def test_an_answer_is_good_within_both_targets(
    part: Part, sent_s: float, ended_s: float, ok: bool, good: bool
) -> None:
    """TTFT of 0.5 s from the send, which may be late; 101 tokens."""
    outcome = Outcome(ok, "", 200, 1, 100.0, 100.5, 100.0 + ended_s - sent_s, 101)
    arrival = Arrival(0, 0.0, "", "standard", "", 10, 101)
    assert part("both_sides").is_good(Sample(arrival, outcome, 0.0, sent_s, ended_s)) is good


def test_replicas_differ_over_time(part: Part) -> None:
    sides = part("both_sides")
    other = ((0.0, 2.0), (5.0, 3.0), (15.0, 5.0), (18.0, 2.0))
    found = sides.apart(STEADY, other, 20.0)
    assert (found.within_one, found.most) == (pytest.approx(17 / 20), 3.0)
    assert found.mean == pytest.approx((10 * 1 + 3 * 3) / 20)


def test_quantiles_of_a_histogram_are_edges(part: Part) -> None:
    sides = part("both_sides")
    counts = {0.001: 98.0, 0.02: 99.0, math.inf: 100.0}
    assert [sides.edge_of(counts, ratio) for ratio in (0.5, 0.99, 1.0)] == [0.001, 0.02, math.inf]
    assert math.isnan(sides.edge_of({}, 0.5))


@pytest.mark.parametrize(
    ("late_s", "busy_ratio", "count"),
    [(0.02, 0.49, 0), (0.05, 0.49, 1), (0.02, 0.5, 1), (math.inf, 0.9, 2), (math.nan, 0.1, 1)],
)
def test_a_run_on_a_busy_machine_is_void(
    part: Part, late_s: float, busy_ratio: float, count: int
) -> None:
    assert len(part("both_sides").voids(late_s, busy_ratio)) == count


def test_the_page_says_void_or_what_was_missed(part: Part) -> None:
    node = part("against_node")
    run = measured(part)
    side = node.side_of(run)
    text = node.render(run, [side, side], 6.0)
    assert "The run is valid" in text
    assert "| queue wait, realtime | 50.0% | 50.0% (50.0% to 50.0%) | +0.0 | met |" in text
    assert "| desired | 100% (100% to 100%) | 0.00 | 0 | met |" in text
    other = replace(side, wanted=((0.0, 4.0),), attained={**side.attained, "answers": 0.95})
    text = node.render(run, [other], 6.0)
    assert "| desired | 0% (0% to 0%) | 2.00 | 2 | **missed** |" in text
    assert "| answers | 90.0% | 95.0% (95.0% to 95.0%) | -5.0 | **missed** |" in text
    text = node.render(replace(run, busy_ratio=0.7), [side], 6.0)
    assert "**Void: 70% of the machine's processor in use" in text
    assert "The run is valid" not in text


def test_a_run_is_restored_from_its_file_and_drawn(part: Part, tmp_path: Path) -> None:
    node = part("against_node")
    run = measured(part)
    again = node.restored(json.loads(json.dumps(asdict(run))))
    assert again.counts == run.counts
    assert node.side_of(again).attained == node.side_of(run).attained
    side = node.side_of(run)
    node.draw(again, [side], part("both_sides").planned(20.0, 7), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_time_that_waits_for_a_disk_is_not_in_use(part: Part) -> None:
    before = psutil.cpu_times()
    after = before._replace(user=before.user + 20, idle=before.idle + 50, iowait=before.iowait + 30)
    assert part("against_node").busy_ratio(before, after) == pytest.approx(0.2)


def test_the_times_of_a_step_count_from_it(part: Part) -> None:
    """Replicas that were there before are no answer to the step."""
    step = part("step")
    wanted = ((0.0, 1.0), (100.0, 2.0), (step.STEADY_S + 12.0, 3.0), (step.STEADY_S + 30.0, 4.0))
    ready = ((0.0, 1.0), (104.0, 2.0), (step.STEADY_S + 18.0, 3.0), (step.STEADY_S + 40.0, 4.0))
    row = step.row_of(measured(part, wanted=wanted, ready=ready))
    assert row[:5] == ["7", "2", "12 s", "18 s", "4"]
    assert row[6:] == ["2 batch http_429", "90.0%", "30%"]
    assert step.row_of(measured(part, wanted=wanted[:2], ready=ready[:2]))[2:4] == ["never"] * 2
    assert "void" in step.row_of(measured(part, busy_ratio=0.6))[-1]

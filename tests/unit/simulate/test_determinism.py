"""A scenario and its seed decide the whole outcome of a simulation, in any process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.simulate.autoscalers import ControlLoop
from fleetkeeper.simulate.closed_loop import Fault, Scenario, run
from fleetkeeper.simulate.cluster import ColdStart
from fleetkeeper.simulate.loads.arrivals import Mix, poisson
from fleetkeeper.simulate.outcome import Outcome

ROOT = Path(__file__).resolve().parents[3]
MODULE = "tests.unit.simulate.test_determinism"
FIGURES = (
    "arrivals", "unfinished", "generated", "seconds", "replica_hours", "gpu_hours",
    "wait_attainment", "batch_attainment", "preemptions",
)  # fmt: skip
"""The fields of an outcome besides tiers, ticks, and CPU seconds, which differ from run to run."""


def outcome_of(seed: int) -> Outcome:
    """Play five minutes with a step of load, random cold starts and a crash."""
    scenario = Scenario(
        300.0,
        poisson(lambda t: 60.0 if t > 60 else 5.0, 60.0, Mix(800.0, 150.0, (0.2, 0.5, 0.3))),
        lambda: ControlLoop(ControlSettings(max_replicas=6)),
        replicas=1,
        cold_start=ColdStart(30.0, 0.3, 0.1),
        crashes=(Fault(100.0, 1),),
        seed=seed,
        tail_s=60.0,
    )
    outcome, _ = run(scenario)
    return outcome


def figures_of(outcome: Outcome) -> dict[str, str]:
    """Return what a report could show, as text: unknown values (NaN) are then equal to themselves."""
    figures = {name: repr(getattr(outcome, name)) for name in FIGURES}
    for number, tier in enumerate(outcome.tiers):
        figures[f"tier {number}"] = repr(tier)
    figures["ticks"] = repr([replace(tick, decision=None) for tick in outcome.ticks])
    puts = [tick.decision.puts for tick in outcome.ticks if tick.decision is not None]
    figures["puts"] = repr(puts)
    return figures


def digest(seed: int) -> str:
    """Return a digest of the figures."""
    return sha256(repr(figures_of(outcome_of(seed))).encode()).hexdigest()


@pytest.fixture(scope="module")
def played() -> Outcome:
    """The outcome of one run with seed 1."""
    return outcome_of(1)


@pytest.fixture(scope="module")
def first(played: Outcome) -> dict[str, str]:
    """The figures of that run."""
    return figures_of(played)


def test_the_same_seed_gives_the_same_figures(first: dict[str, str]) -> None:
    """All of them, to the last bit."""
    again = figures_of(outcome_of(1))
    assert {name for name in first if first[name] != again[name]} == set()


def test_another_seed_gives_other_figures(first: dict[str, str]) -> None:
    """Other arrivals, tokens, cold starts and times of every tier; a length is no matter of chance."""
    other = figures_of(outcome_of(2))
    same = {name for name in first if first[name] == other[name]}
    assert same <= {"seconds", "unfinished", "preemptions"}


def test_the_compared_run_scales_sheds_and_loses_requests(played: Outcome) -> None:
    """So that the figures that the other tests compare depend on decisions and on faults."""
    assert played.most_replicas > 1
    assert played.total_refused > 0
    assert played.total_lost > 0


@pytest.mark.exhaustive
def test_another_process_gives_the_same_figures(first: dict[str, str]) -> None:
    """Another seed of hashes orders sets in another way, and nothing depends on it."""
    expected = sha256(repr(first).encode()).hexdigest()
    code = f"from {MODULE} import digest; print(digest(1))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert found.stdout.strip() == expected

"""Several services under one GPU budget, beside an HPA each on an equal share of it.

    python benchmarks/evaluation/shared_budget.py [--seeds 1,2,3] [--cases NAMES]

Prints a table: medians over the seeds. `missed` counts the requests that were refused, lost, late or
unfinished. Each service has chat on a 70B model (4 GPUs a replica). Case names are separated by semicolons.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from scenes import CHAT, H100_70B, HOUR, START_70B, modulated

from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.common.budget import Budget
from fleetkeeper.simulate.autoscalers import Autoscaler, ControlLoop, Hpa, concurrency
from fleetkeeper.simulate.closed_loop import Load, Scenario, run_together
from fleetkeeper.simulate.loads.arrivals import untiered

GPUS: Final = 4
STOCK: Final = replace(H100_70B, queue_limits=None, max_tokens=512)
"""Engines beside the HPAs: 512 tokens a step are better for them than the 8,192 of the start."""
HPA_TARGETS: Final = (20, 30, 40)
"""Concurrency of a replica that the HPAs hold. The table has the best one, judged by what it missed."""


@dataclass(frozen=True, slots=True)
class Case:
    """Services whose load is high in turns."""

    services: int
    low: float
    high: float
    """Requests a second."""
    phase_s: float
    """Time for which the load of a service is high."""
    replicas: int
    """Replicas that the budget allows all services together."""
    hours: float = 4.0
    burst_s: float = 0.0
    """If set: within its phase, the load is high for this long in each `burst_every_s`."""
    burst_every_s: float = 900.0
    is_wave: bool = False
    """Whether the load swings between `low` and `high` instead; a wave has two phases."""

    def rate(self, number: int, now: float) -> float:
        """Return the requests a second of a service."""
        if self.is_wave:
            turn = now / (2 * self.phase_s) + number / self.services
            return self.low + (self.high - self.low) * (0.5 + 0.5 * math.sin(2 * math.pi * turn))
        if int(now / self.phase_s) % self.services != number:
            return self.low
        is_pause = self.burst_s and now % self.burst_every_s >= self.burst_s
        return self.low if is_pause else self.high

    def load(self, number: int) -> Load:
        """Return the load of a service."""
        return modulated(lambda _: (partial(self.rate, number), self.high), CHAT)


CASES: Final = {
    "two, an hour each": Case(2, 3, 22, HOUR, 8),
    "two, half an hour each": Case(2, 3, 22, HOUR / 2, 8),
    "two, half an hour each, tight": Case(2, 3, 18, HOUR / 2, 6),
    "two in waves of two hours": Case(2, 2, 24, HOUR, 8, is_wave=True),
    "two in waves of one hour": Case(2, 2, 24, HOUR / 2, 8, is_wave=True),
    "two, bursts of 3 min in turns": Case(2, 2, 16, HOUR, 6, burst_s=180),
    "two, bursts of 3 min at once": Case(1, 2, 14, HOUR, 6, burst_s=180),
    "five, half an hour each": Case(5, 2, 18, HOUR / 2, 10, hours=5),
}
TOGETHER: Final = {"two, bursts of 3 min at once": 2}
"""Services with the same load at the same time."""


class Job(NamedTuple):
    """A run."""

    case: str
    seed: int
    hpa: int = 0
    """Target of the HPAs; 0 for Fleetkeeper."""


class Row(NamedTuple):
    """What came of a run."""

    job: Job
    requests: int
    missed: int
    gpu_hours: float
    reversals: int


def play(job: Job) -> Row:
    """Play one run."""
    case = CASES[job.case]
    count = TOGETHER.get(job.case, case.services)
    scenarios = [_scenario(case, number, count, job) for number in range(count)]
    outcomes = [outcome for outcome, _ in run_together(scenarios, Budget(case.replicas * GPUS))]
    good = sum(tier.good for outcome in outcomes for tier in outcome.tiers)
    requests = sum(outcome.arrivals for outcome in outcomes)
    hours = sum(outcome.gpu_hours for outcome in outcomes)
    return Row(
        job, requests, requests - good, hours, sum(outcome.reversals() for outcome in outcomes)
    )


def _scenario(case: Case, number: int, count: int, job: Job) -> Scenario:
    settings = ControlSettings(max_replicas=case.replicas)

    def autoscaler() -> Autoscaler:
        if job.hpa:
            return Hpa(concurrency, job.hpa, 1, case.replicas // count)
        return ControlLoop(settings, gpus=GPUS, key=("default", f"service-{number}"))

    load = case.load(number % case.services)
    return Scenario(
        case.hours * HOUR,
        untiered(load) if job.hpa else load,
        autoscaler,
        STOCK if job.hpa else H100_70B,
        gpus=GPUS,
        cold_start=START_70B,
        seed=100 * job.seed + number,
    )


def table(rows: list[Row]) -> str:
    """Return the table of medians."""
    text = [
        "| case | missed | best HPAs | GPU-hours | HPAs | reversals |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case in dict.fromkeys(row.job.case for row in rows):

        def of(hpa: int, value: Callable[[Row], float], case: str = case) -> float:
            return median(value(row) for row in rows if row.job[::2] == (case, hpa))

        def missed(row: Row) -> float:
            return row.missed / row.requests

        best = min(HPA_TARGETS, key=lambda target: of(target, missed))
        cells = [f"{of(hpa, missed):.1%}" for hpa in (0, best)]
        cells += [f"{of(hpa, lambda row: row.gpu_hours):.1f}" for hpa in (0, best)]
        cells.append(f"{of(0, lambda row: row.reversals):.0f}")
        text.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(text)


def main() -> None:
    """Play all runs on all cores, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--cases", default=";".join(CASES))
    words = parser.parse_args()
    seeds = [int(seed) for seed in words.seeds.split(",")]
    jobs = [Job(*row) for row in product(words.cases.split(";"), seeds, (0, *HPA_TARGETS))]
    rows = []
    with multiprocessing.Pool() as pool:
        for number, row in enumerate(pool.imap_unordered(play, jobs), 1):
            rows.append(row)
            print(f"\r{number}/{len(jobs)} runs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(table(sorted(rows)))


if __name__ == "__main__":
    main()

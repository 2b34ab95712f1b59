"""Several services under one GPU budget, beside an HPA each on an equal share of it.

    python benchmarks/evaluation/shared_budget.py [--seeds N] [--cases NAMES]

Prints a table: medians over the seeds. `missed` counts the requests that were refused, lost, late or
unfinished. Each service has chat on a 70B model (4 GPUs a replica). Case names are separated by semicolons.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from scenes import CHAT, H100_70B, HOUR, START_70B, modulated

from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.common.budget import Budget
from fleetkeeper.simulate.arguments import FLEETKEEPER, parse_alternatives
from fleetkeeper.simulate.closed_loop import Load
from fleetkeeper.simulate.comparison import Case as Compared
from fleetkeeper.simulate.comparison import Setting, compare_together
from fleetkeeper.simulate.report.report import Total, total_of
from fleetkeeper.simulate.service_model import ServiceModel

GPUS: Final = 4
HPA: Final = "hpa-concurrency:{}@512"
"""512 tokens a step are better for stock engines than the 8,192 of the start."""
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
    """A case and its autoscaler."""

    case: str
    hpa: int = 0
    """Target of the HPAs; 0 for Fleetkeeper."""


class Row(NamedTuple):
    """What came of a job."""

    job: Job
    total: Total
    reversals: float

    @property
    def missed(self) -> float:
        """The share of missed requests."""
        return self.total.missed / self.total.requests


def play(job: Job, seeds: int) -> Row:
    """Play one job, with every seed."""
    case = CASES[job.case]
    count = TOGETHER.get(job.case, case.services)
    gpus = case.replicas * GPUS
    model = ServiceModel(
        ControlSettings(max_replicas=case.replicas), H100_70B, START_70B, GPUS, 2, 300.0
    )
    played = FLEETKEEPER
    if job.hpa:
        (played,) = parse_alternatives(HPA.format(job.hpa))
    services = [
        (
            [Compared(model, played)],
            Setting(
                case.load(number % case.services),
                case.hours * HOUR,
                seeds=seeds,
                service=("default", f"service-{number}"),
                number=number,
                share=gpus // count,
            ),
        )
        for number in range(count)
    ]
    results = [result for (result,) in compare_together(services, Budget(gpus))]
    reversals = sum(result.figures["replica_reversals"].median for result in results)
    return Row(job, total_of(results), reversals)


def table(rows: Iterable[Row]) -> str:
    """Return the table of medians."""
    text = [
        "| case | missed | best HPAs | GPU-hours | HPAs | reversals |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case, of_case in groupby(sorted(rows), lambda row: row.job.case):
        ours, *hpas = of_case
        best = min(hpas, key=lambda row: row.missed)
        missed = " | ".join(f"{row.missed:.1%}" for row in (ours, best))
        hours = " | ".join(f"{row.total.gpu_hours:.1f}" for row in (ours, best))
        text.append(f"| {case} | {missed} | {hours} | {ours.reversals:.0f} |")
    return "\n".join(text)


def main() -> None:
    """Play all jobs on all cores, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", default=";".join(CASES))
    words = parser.parse_args()
    jobs = [Job(*row) for row in product(words.cases.split(";"), (0, *HPA_TARGETS))]
    rows = []
    with multiprocessing.Pool() as pool:
        for row in pool.imap_unordered(partial(play, seeds=words.seeds), jobs):
            rows.append(row)
            print(f"\r{len(rows)}/{len(jobs)} jobs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(table(rows))


if __name__ == "__main__":
    main()

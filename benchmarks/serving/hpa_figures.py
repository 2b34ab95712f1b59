"""Figures of one run of a scaler under a step of load: pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from results_page import markdown_table

from fleetkeeper_local.demo.recorder import Points
from fleetkeeper_local.load.open_loop import Sample
from fleetkeeper_local.load.summary import SHED_CAUSE, quantile

HELD_S = 10.0
"""Queue wait is within its objective again once it stays there for this long."""


@dataclass(frozen=True, slots=True)
class Watch:
    """The engine pods at one time of the wall clock: those that exist, and those that are ready."""

    at_s: float
    pods: int
    ready: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. Times are seconds after the step; None: not within the run."""

    order_s: float | None
    ready_s: float | None
    broken_s: float | None
    restored_s: float | None
    missed_s: float
    pod_seconds: float
    requests: int
    failed: int
    refused: int
    p95_s: float | None


def first_at(
    watches: Sequence[Watch], since_s: float, *, pods: int = 0, ready: int = 0
) -> float | None:
    """Return when so many pods existed and were ready, in seconds after `since_s`."""
    return next(
        (
            watch.at_s - since_s
            for watch in watches
            if watch.at_s >= since_s and watch.pods >= pods and watch.ready >= ready
        ),
        None,
    )


def pod_seconds(watches: Sequence[Watch], begin_s: float, end_s: float) -> float:
    """Return the time that pods existed between two times, from samples of their number."""
    total = 0.0
    for watch, after in zip(watches, [*watches[1:], None], strict=True):
        until_s = end_s if after is None else after.at_s
        total += watch.pods * max(0.0, min(until_s, end_s) - max(watch.at_s, begin_s))
    return total


def restored_at(
    waits: Points, objective_s: float, since_s: float
) -> tuple[float | None, float | None]:
    """Return when the mean wait first exceeded the objective, and when it was within it for good.

    Both in seconds after `since_s`. "For good" is: from then to the end of the record, which must
    cover at least HELD_S.
    """
    later = [(at_s - since_s, wait_s) for at_s, wait_s in waits if at_s >= since_s]
    above = [at_s for at_s, wait_s in later if wait_s > objective_s]
    if not above:
        return None, None
    after = [at_s for at_s, _ in later if at_s > above[-1]]
    held = bool(after) and after[-1] - after[0] >= HELD_S
    return above[0], after[0] if held else None


def missed_seconds(waits: Points, objective_s: float, begin_s: float, end_s: float) -> float:
    """Return the seconds in which the mean wait was above the objective."""
    rows = [(at_s, wait_s) for at_s, wait_s in waits if begin_s <= at_s <= end_s]
    ends = [at_s for at_s, _ in rows[1:]] + [end_s]
    return sum(
        until_s - at_s
        for (at_s, wait_s), until_s in zip(rows, ends, strict=True)
        if wait_s > objective_s
    )


def outcome_of(
    watches: Sequence[Watch],
    waits: Points,
    samples: Sequence[Sample],
    *,
    objective_s: float,
    step_s: float,
    end_s: float,
) -> Outcome:
    """Return the figures of a run. `samples`: the requests of the step."""
    broken_s, restored_s = restored_at(waits, objective_s, step_s)
    causes = Counter(sample.outcome.cause for sample in samples if not sample.outcome.ok)
    refused = causes.pop(SHED_CAUSE, 0)
    return Outcome(
        order_s=first_at(watches, step_s, pods=2),
        ready_s=first_at(watches, step_s, ready=2),
        broken_s=broken_s,
        restored_s=restored_s,
        missed_s=missed_seconds(waits, objective_s, step_s, end_s),
        pod_seconds=pod_seconds(watches, step_s, end_s),
        requests=len(samples),
        failed=sum(causes.values()),
        refused=refused,
        p95_s=quantile([sample.latency_s for sample in samples if sample.outcome.ok], 0.95),
    )


def outcome_table(runs: dict[str, list[Outcome]]) -> str:
    """Return one row for each scaler: medians over its runs."""
    headings = [
        "scaler",
        "runs",
        "first order",
        "second replica ready",
        "queue wait above objective",
    ]
    headings += ["within objective again", "seconds above", "pod-seconds"]
    headings += ["requests", "failed", "refused (429)", "P95"]
    rows = []
    for name, found in runs.items():
        times = {
            key: _median([asdict(run)[key] for run in found])
            for key in ("order_s", "ready_s", "broken_s", "restored_s", "missed_s", "pod_seconds")
        }
        counts = [
            f"{median([asdict(run)[key] for run in found]):.0f}"
            for key in ("requests", "failed", "refused")
        ]
        p95 = _median([run.p95_s for run in found], ".1f")
        rows.append([name, str(len(found)), *times.values(), *counts, p95])
    return markdown_table(headings, rows)


def _median(values: Sequence[float | None], form: str = ".0f") -> str:
    """Return the median in seconds; "never" if most runs have none."""
    known = [float("inf") if value is None else value for value in values]
    middle = median(known)
    return "never" if middle == float("inf") else f"{middle:{form}} s"

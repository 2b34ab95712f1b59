"""The table of batches, as texts: one row for each alternative and batch, for the terminal and the page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from fleetkeeper.simulate.batch_figures import BatchEnd, BatchFigures
from fleetkeeper.simulate.comparison import Result
from fleetkeeper.simulate.report import duration_text, value_text

TITLES: Final = {
    "BATCH": "tokens, window and start",
    "FINISHED AT": "time since the start of the run, median",
    "DEADLINE": "met by every seed, or missed by so much in the worst one",
    "REPLICAS ADDED": "replicas that were added for the deadlines of all batches, median",
    "GPU HOURS": "with the batches, median",
    "GPU HOURS WITHOUT": "of the same run without batches, median",
}
"""The titles of the columns after the alternative, and what they mean."""


def batch_rows(results: Sequence[Result]) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yield the number and the name of each alternative with the cells of each of its batches."""
    for number, result in enumerate(results):
        if result.batch is not None:
            for cells in _rows(result.batch):
                yield number, result.name, cells


def _rows(figures: BatchFigures) -> Iterator[tuple[str, ...]]:
    runs = figures.runs
    cost = (
        _median([run.added for run in runs], "whole"),
        _median([run.gpu_hours for run in runs], "number"),
        _median([run.gpu_hours_without for run in runs], "number"),
    )
    for batch, ends in figures.ends():
        finished = [end.finished_s for end in ends if not math.isnan(end.finished_s)]
        at = duration_text(median(finished)) if len(finished) == len(ends) else "not finished"
        yield batch.text, at, deadline_text(ends), *cost


def _median(values: Sequence[float], form: str) -> str:
    return value_text(median(values), form)


def deadline_text(ends: Sequence[BatchEnd]) -> str:
    """Return `met`, or by how much the worst seed missed the deadline; `-` if that is unknown."""
    late = [end for end in ends if end.late_s > 0]
    if late:
        worst = max(late, key=lambda end: end.late_s)
        more = "more than " if worst.left else ""
        return f"missed by {more}{duration_text(worst.late_s)}"
    return "met" if all(end.late_s <= 0 and not end.left for end in ends) else "-"

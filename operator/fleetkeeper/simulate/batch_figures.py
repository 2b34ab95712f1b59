"""The figures of batches in a comparison: the end and the cost of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fleetkeeper.simulate.arguments import Batch
from fleetkeeper.simulate.batch_client import BatchWork
from fleetkeeper.simulate.closed_loop import EPOCH_S
from fleetkeeper.simulate.outcome import Outcome


class BatchEnd(NamedTuple):
    """The end of a batch in one run."""

    finished_s: float
    """Time of the end; NaN if lines were left at the end of the run."""
    late_s: float
    """Seconds past the deadline (negative: early). Unfinished batches count to the end of the run;
    NaN if it ended before the deadline."""
    left: float
    """Tokens without a result."""


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One run with batches."""

    ends: tuple[BatchEnd, ...]
    added: float
    """Replicas added for the deadlines (NaN: Fleetkeeper did not decide)."""
    gpu_hours: float
    gpu_hours_without: float
    """GPU hours of a run with the same seed and no batches."""


def batch_run(outcome: Outcome, without: Outcome, added: float) -> BatchRun:
    """Return the figures of a run with batches, and of the same run without."""
    ends = tuple(batch_end(work, outcome.seconds) for work in outcome.works)
    return BatchRun(ends, added, outcome.gpu_hours, without.gpu_hours)


def batch_end(work: BatchWork, seconds: float) -> BatchEnd:
    """Return the end of a batch in a run of so many seconds."""
    deadline_s = work.batch.deadline_s
    if work.finished is not None:
        finished_s = work.finished - EPOCH_S
        return BatchEnd(finished_s, finished_s - deadline_s, 0.0)
    late_s = seconds - deadline_s
    return BatchEnd(math.nan, late_s if late_s >= 0 else math.nan, float(work.left))


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """The runs of a case with batches, one for each seed."""

    batches: tuple[Batch, ...]
    runs: tuple[BatchRun, ...]

    def ends(self) -> Iterator[tuple[Batch, Sequence[BatchEnd]]]:
        """Yield each batch with its ends, one for each seed."""
        for number, batch in enumerate(self.batches):
            yield batch, [run.ends[number] for run in self.runs]

    def as_json(self) -> dict[str, Any]:
        """Return the figures of each seed; null for what is unknown."""
        return {
            "batches": [
                {
                    "text": batch.text,
                    "tokens": batch.tokens,
                    "start_s": batch.start_s,
                    "deadline_s": batch.deadline_s,
                    "met": [end.late_s <= 0 for end in ends],
                    "finished_s": [_known(end.finished_s) for end in ends],
                    "late_s": [_known(end.late_s) for end in ends],
                    "left_tokens": [end.left for end in ends],
                }
                for batch, ends in self.ends()
            ],
            "added_replicas": [_known(run.added) for run in self.runs],
            "gpu_hours": [round(run.gpu_hours, 6) for run in self.runs],
            "gpu_hours_without": [round(run.gpu_hours_without, 6) for run in self.runs],
        }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)

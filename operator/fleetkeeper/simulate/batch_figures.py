"""What a comparison shows of batches: when each ended, and what it cost."""

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
    """The end of a batch in one run. `finished_s`: NaN if lines were left at the end of the run.

    `late_s`: from the deadline to the last result, negative in time; of a batch that was not finished to
    the end of the run, NaN if that was before the deadline. `left`: tokens without a result.
    """

    finished_s: float
    late_s: float
    left: float


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One run with batches. `added`: replicas added for their deadlines (NaN: not decided by Fleetkeeper).

    `gpu_hours_without`: of a run with the same seed and no batches.
    """

    ends: tuple[BatchEnd, ...]
    added: float
    gpu_hours: float
    gpu_hours_without: float


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

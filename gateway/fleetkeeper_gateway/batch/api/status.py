"""The status of a batch, derived from its objects. Pure.

The status is not stored. It follows from the record, the validation of the input file, the cancellation
request, the end, and the progress of the lines:

    the end is written       its status
    the file has mistakes    failed: no line runs, also if the batch is cancelled
    cancelled                cancelling
    not yet validated        validating
    all lines have a result, or the completion window has ended    finalizing
    otherwise                in_progress
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fleetkeeper_gateway.batch.model import BatchRecord, Counts, Final, Status, Validated

ENDED = frozenset({Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED})


@dataclass(frozen=True, slots=True)
class Facts:
    """The stored state of a batch at one time."""

    record: BatchRecord
    validated: Validated | None = None
    cancelled_at: int | None = None
    """Unix seconds of the cancellation request."""
    final: Final | None = None
    counts: Counts | None = None
    """Progress; None while no line can have a result, and after the end."""


def status_of(facts: Facts, now: float) -> Status:
    """Return the status at a time in Unix seconds."""
    validated, counts = facts.validated, facts.counts
    if facts.final is not None:
        return facts.final.status
    if validated is not None and validated.mistakes:
        return Status.FAILED
    if facts.cancelled_at is not None:
        return Status.CANCELLING
    if validated is None:
        return Status.VALIDATING
    is_done = counts is not None and counts.completed + counts.failed >= validated.lines
    return Status.FINALIZING if is_done or now >= facts.record.expires else Status.IN_PROGRESS


def batch_document(facts: Facts, now: float) -> dict[str, Any]:
    """Return a batch in the format of OpenAI's API, at a time in Unix seconds."""
    record, validated, final = facts.record, facts.validated, facts.final
    status = status_of(facts, now)
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": (validated.model or None) if validated is not None else None,
        "errors": _errors(facts),
        "input_file_id": record.input_file,
        "completion_window": record.completion_window,
        "status": status.value,
        "output_file_id": final.output_file if final is not None else None,
        "error_file_id": final.error_file if final is not None else None,
        "created_at": record.created,
        "expires_at": record.expires,
        **_times(facts, status, now),
        "request_counts": asdict(_counts(facts)),
        "metadata": dict(record.metadata) or None,
    }


def _times(facts: Facts, status: Status, now: float) -> dict[str, int | None]:
    """Return the times at which a batch entered its states; None for states that it did not enter.

    The time of the last result is not stored. So `finalizing_at` of a completed batch is its end, and a
    batch that is being finalized within its window has no `finalizing_at` yet.
    """
    validated, expires = facts.validated, facts.record.expires
    end = facts.final.at if facts.final is not None else None
    valid = validated if validated is not None and not validated.mistakes else None
    # The time at which mistakes were found is the same before and after the end is written.
    failed = validated.at if validated is not None and validated.mistakes else end
    finalizing = end if status is Status.COMPLETED else None
    if status is Status.EXPIRED or (status is Status.FINALIZING and now >= expires):
        finalizing = expires
    return {
        "in_progress_at": valid.at if valid is not None else None,
        "finalizing_at": finalizing,
        "completed_at": end if status is Status.COMPLETED else None,
        "failed_at": failed if status is Status.FAILED else None,
        "expired_at": end if status is Status.EXPIRED else None,
        "cancelling_at": facts.cancelled_at if status is not Status.FAILED else None,
        "cancelled_at": end if status is Status.CANCELLED else None,
    }


def _counts(facts: Facts) -> Counts:
    """Return the counts of lines. Without progress, no line is done."""
    if facts.final is not None:
        return facts.final.counts
    validated = facts.validated
    if validated is None or validated.mistakes:
        return Counts()
    return facts.counts if facts.counts is not None else Counts(total=validated.lines)


def _errors(facts: Facts) -> dict[str, Any] | None:
    mistakes = [
        mistake for found in (facts.validated, facts.final) if found for mistake in found.mistakes
    ]
    return {"object": "list", "data": list(map(asdict, mistakes))} if mistakes else None

"""The status of a batch in every situation, and what its document says then."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_gateway.batch.api.status import ENDED, Facts, batch_document, status_of
from fleetkeeper_gateway.batch.model import (
    BatchRecord,
    Counts,
    Final,
    Mistake,
    Status,
    Validated,
)

CREATED, VALIDATED, CANCELLED, EXPIRES, ENDED_AT = 1000, 1010, 1500, 2000, 3000
RECORD = BatchRecord("batch_1", "one", "file-1", "/v1/embeddings", "24h", CREATED, EXPIRES)
GOOD = Validated(10, "m", 500, VALIDATED)
BAD = Validated(10, "", 0, VALIDATED, (Mistake("invalid_utf8", "It is not UTF-8.", 3),))
SOME, ALL = Counts(10, 6, 1), Counts(10, 9, 1)
TIMES = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def ended(status: Status, counts: Counts = ALL) -> Final:
    return Final(status, ENDED_AT, counts, "file-out", "file-err")


CASES: list[tuple[str, Facts, float, Status, dict[str, int], Counts]] = [
    ("new", Facts(RECORD), 1001, Status.VALIDATING, {}, Counts()),
    ("never validated", Facts(RECORD), EXPIRES, Status.VALIDATING, {}, Counts()),
    (
        "cancelled before it was validated",
        Facts(RECORD, None, CANCELLED),
        1600,
        Status.CANCELLING,
        {"cancelling_at": CANCELLED},
        Counts(),
    ),
    (
        "runs",
        Facts(RECORD, GOOD, counts=SOME),
        1600,
        Status.IN_PROGRESS,
        {"in_progress_at": VALIDATED},
        SOME,
    ),
    (
        "runs, and the queue does not answer",
        Facts(RECORD, GOOD),
        1600,
        Status.IN_PROGRESS,
        {"in_progress_at": VALIDATED},
        Counts(10),
    ),
    (
        "has mistakes",
        Facts(RECORD, BAD),
        1600,
        Status.FAILED,
        {"failed_at": VALIDATED},
        Counts(),
    ),
    (
        "has mistakes, and was cancelled",
        Facts(RECORD, BAD, CANCELLED),
        1600,
        Status.FAILED,
        {"failed_at": VALIDATED},
        Counts(),
    ),
    (
        "has mistakes, and its end is kept",
        Facts(RECORD, BAD, None, ended(Status.FAILED, Counts())),
        4000,
        Status.FAILED,
        {"failed_at": VALIDATED},
        Counts(),
    ),
    (
        "failed without a mistake",
        Facts(RECORD, None, None, ended(Status.FAILED, Counts())),
        4000,
        Status.FAILED,
        {"failed_at": ENDED_AT},
        Counts(),
    ),
    (
        "all lines are done",
        Facts(RECORD, GOOD, counts=ALL),
        1600,
        Status.FINALIZING,
        {"in_progress_at": VALIDATED},
        ALL,
    ),
    (
        "the window has ended",
        Facts(RECORD, GOOD, counts=SOME),
        EXPIRES,
        Status.FINALIZING,
        {"in_progress_at": VALIDATED, "finalizing_at": EXPIRES},
        SOME,
    ),
    (
        "cancelled",
        Facts(RECORD, GOOD, CANCELLED, counts=SOME),
        1600,
        Status.CANCELLING,
        {"in_progress_at": VALIDATED, "cancelling_at": CANCELLED},
        SOME,
    ),
    (
        "cancelled, and the window has ended",
        Facts(RECORD, GOOD, CANCELLED, counts=SOME),
        EXPIRES,
        Status.CANCELLING,
        {"in_progress_at": VALIDATED, "cancelling_at": CANCELLED},
        SOME,
    ),
    (
        "completed",
        Facts(RECORD, GOOD, None, ended(Status.COMPLETED)),
        4000,
        Status.COMPLETED,
        {"in_progress_at": VALIDATED, "finalizing_at": ENDED_AT, "completed_at": ENDED_AT},
        ALL,
    ),
    (
        "expired",
        Facts(RECORD, GOOD, None, ended(Status.EXPIRED, SOME)),
        4000,
        Status.EXPIRED,
        {"in_progress_at": VALIDATED, "finalizing_at": EXPIRES, "expired_at": ENDED_AT},
        SOME,
    ),
    (
        "has ended after it was cancelled",
        Facts(RECORD, GOOD, CANCELLED, ended(Status.CANCELLED, SOME)),
        4000,
        Status.CANCELLED,
        {
            "in_progress_at": VALIDATED,
            "cancelling_at": CANCELLED,
            "cancelled_at": ENDED_AT,
        },
        SOME,
    ),
    (
        "was cancelled too late",
        Facts(RECORD, GOOD, CANCELLED, ended(Status.COMPLETED)),
        4000,
        Status.COMPLETED,
        {
            "in_progress_at": VALIDATED,
            "finalizing_at": ENDED_AT,
            "completed_at": ENDED_AT,
            "cancelling_at": CANCELLED,
        },
        ALL,
    ),
]


@pytest.mark.parametrize(
    ("facts", "now", "status", "times", "counts"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_status_times_and_counts_follow_from_what_is_kept(
    facts: Facts, now: float, status: Status, times: dict[str, int], counts: Counts
) -> None:
    shown = batch_document(facts, now)
    assert status_of(facts, now) is status
    assert shown["status"] == status.value
    assert {name: shown[name] for name in TIMES if shown[name] is not None} == times
    assert shown["request_counts"] == {
        "total": counts.total,
        "completed": counts.completed,
        "failed": counts.failed,
    }
    assert (shown["created_at"], shown["expires_at"]) == (CREATED, EXPIRES)
    files = (shown["output_file_id"], shown["error_file_id"])
    assert files == (("file-out", "file-err") if facts.final else (None, None))


def test_mistakes_are_shown_as_a_list() -> None:
    shown = batch_document(Facts(RECORD, BAD), 1600)
    assert shown["errors"] == {
        "object": "list",
        "data": [{"code": "invalid_utf8", "message": "It is not UTF-8.", "line": 3, "param": None}],
    }
    assert shown["model"] is None
    assert batch_document(Facts(RECORD, GOOD), 1600)["errors"] is None


facts_of_a_batch = st.builds(
    Facts,
    st.just(RECORD),
    st.sampled_from([None, GOOD, BAD]),
    st.sampled_from([None, CANCELLED]),
    st.sampled_from([None, *(ended(status) for status in sorted(ENDED))]),
    st.sampled_from([None, SOME, ALL]),
)


@given(facts_of_a_batch, st.integers(CREATED, 5000))
def test_a_status_has_the_time_at_which_it_began_and_an_ended_batch_does_not_change(
    facts: Facts, now: int
) -> None:
    shown: dict[str, Any] = batch_document(facts, now)
    status = Status(shown["status"])
    if status in ENDED:
        assert shown[f"{status.value}_at"] is not None
        assert batch_document(facts, now + 10_000) == shown
    for other in ENDED - {status}:
        assert shown[f"{other.value}_at"] is None

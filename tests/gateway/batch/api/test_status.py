"""The status of a batch in every situation, and what its document says then."""

from __future__ import annotations

from dataclasses import asdict
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


def case(what: str, now: int, status: Status, counts: Counts, facts: Facts, **times: int) -> Any:
    """Return a case. `times` are those that are shown, without `_at`."""
    shown = {f"{name}_at": at for name, at in times.items()}
    return pytest.param(facts, now, status, shown, counts, id=what)


NONE = Counts()
RUNS = {"in_progress": VALIDATED}
ENDS = {**RUNS, "finalizing": ENDED_AT, "completed": ENDED_AT}
COMPLETED, CANCELLING, EXPIRED = Status.COMPLETED, Status.CANCELLING, Status.EXPIRED
FAILED, FINALIZING = Status.FAILED, Status.FINALIZING
FAILED_END = ended(FAILED, NONE)


@pytest.mark.parametrize(
    ("facts", "now", "status", "times", "counts"),
    [
        case("new", 1001, Status.VALIDATING, NONE, Facts(RECORD)),
        case("never validated", EXPIRES, Status.VALIDATING, NONE, Facts(RECORD)),
        case("cancelled first", 1600, CANCELLING, NONE, Facts(RECORD, None, 1500), cancelling=1500),
        case("runs", 1600, Status.IN_PROGRESS, SOME, Facts(RECORD, GOOD, counts=SOME), **RUNS),
        case("no progress", 1600, Status.IN_PROGRESS, Counts(10), Facts(RECORD, GOOD), **RUNS),
        case("mistakes", 1600, FAILED, NONE, Facts(RECORD, BAD), failed=VALIDATED),
        case("both", 1600, FAILED, NONE, Facts(RECORD, BAD, CANCELLED), failed=VALIDATED),
        case(
            "mistakes, and its end is kept",
            4000,
            FAILED,
            NONE,
            Facts(RECORD, BAD, None, FAILED_END),
            failed=VALIDATED,
        ),
        case(
            "failed without a mistake",
            4000,
            FAILED,
            NONE,
            Facts(RECORD, None, None, FAILED_END),
            failed=ENDED_AT,
        ),
        case("all are done", 1600, FINALIZING, ALL, Facts(RECORD, GOOD, counts=ALL), **RUNS),
        case(
            "the window has ended",
            EXPIRES,
            FINALIZING,
            SOME,
            Facts(RECORD, GOOD, counts=SOME),
            **RUNS,
            finalizing=EXPIRES,
        ),
        *(
            case(
                f"cancelled, at {now}",
                now,
                CANCELLING,
                SOME,
                Facts(RECORD, GOOD, CANCELLED, counts=SOME),
                **RUNS,
                cancelling=CANCELLED,
            )
            for now in (1600, EXPIRES)
        ),
        case("done", 4000, COMPLETED, ALL, Facts(RECORD, GOOD, None, ended(COMPLETED)), **ENDS),
        case(
            "expired",
            4000,
            EXPIRED,
            SOME,
            Facts(RECORD, GOOD, None, ended(EXPIRED, SOME)),
            **RUNS,
            finalizing=EXPIRES,
            expired=ENDED_AT,
        ),
        case(
            "has ended after it was cancelled",
            4000,
            Status.CANCELLED,
            SOME,
            Facts(RECORD, GOOD, CANCELLED, ended(Status.CANCELLED, SOME)),
            **RUNS,
            cancelling=CANCELLED,
            cancelled=ENDED_AT,
        ),
        case(
            "was cancelled too late",
            4000,
            COMPLETED,
            ALL,
            Facts(RECORD, GOOD, CANCELLED, ended(COMPLETED)),
            **ENDS,
            cancelling=CANCELLED,
        ),
    ],
)
def test_status_times_and_counts_follow_from_what_is_kept(
    facts: Facts, now: float, status: Status, times: dict[str, int], counts: Counts
) -> None:
    shown = batch_document(facts, now)
    assert status_of(facts, now) is status
    assert shown["status"] == status.value
    assert {name: shown[name] for name in TIMES if shown[name] is not None} == times
    assert shown["request_counts"] == asdict(counts)
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
    lost = Final(FAILED, CREATED, NONE, mistakes=(Mistake("batch_failed", "It is damaged."),))
    shown = batch_document(Facts(RECORD, GOOD, final=lost), 1600)
    assert [one["code"] for one in shown["errors"]["data"]] == ["batch_failed"]


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

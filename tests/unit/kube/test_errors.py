"""What a response other than 2xx says."""

from __future__ import annotations

import pytest

from fleetkeeper_kube.errors import ApiError, parse_failure


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>502 Bad Gateway</html>",
        b"[]",
        b'"x"',
        b'{"kind":"Pod"}',
        b"\xff\xfe" * 9,
        b"[" * 100_000,
    ],
)
def test_an_answer_of_something_else_is_survived(body: bytes) -> None:
    error = parse_failure(502, body)
    assert (error.status, error.reason) == (502, "NotKubernetes")
    assert error.is_transient


def test_what_may_be_tried_again_is_told_apart() -> None:
    assert all(ApiError(code, "", "").is_transient for code in (0, 408, 429, 500, 503, 504))
    assert not any(ApiError(code, "", "").is_transient for code in (400, 401, 403, 404, 409, 422))
    assert ApiError(410, "Expired", "").is_expired
    assert ApiError(409, "Conflict", "").is_stale
    assert ApiError(404, "NotFound", "").is_absent


@pytest.mark.parametrize(
    ("header", "seconds"), [("7", 7.0), (None, None), ("Wed, 21 Oct", None), ("٣", None)]
)
def test_retry_after_is_read_in_seconds(header: str | None, seconds: float | None) -> None:
    assert parse_failure(429, b"", header).retry_after_s == seconds


def test_a_message_of_any_length_is_cut() -> None:
    assert len(parse_failure(500, b"x" * 10**6).message) == 1000

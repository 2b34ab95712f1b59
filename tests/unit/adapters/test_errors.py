"""What a refused request means."""

from __future__ import annotations

import json

import pytest

from fleetkeeper.adapters.kubernetes.errors import ApiError, parse_failure, problem_of
from fleetkeeper.reconcile.types import WriteProblem


def status(code: int, reason: str, message: str, *causes: str) -> ApiError:
    body = {
        "kind": "Status",
        "code": code,
        "reason": reason,
        "message": message,
        "details": {"causes": [{"reason": cause} for cause in causes]},
    }
    return parse_failure(code, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (status(409, "Conflict", "the object has been modified"), WriteProblem.CONFLICT),
        (
            status(403, "Forbidden", 'pods "x" is forbidden: exceeded quota: gpus, requested: 1'),
            WriteProblem.QUOTA,
        ),
        (
            status(
                403, "Forbidden", 'pods "x" is forbidden: violates PodSecurity "restricted:latest"'
            ),
            WriteProblem.ADMISSION,
        ),
        (
            status(403, "Forbidden", 'admission webhook "p.example" denied the request: no'),
            WriteProblem.ADMISSION,
        ),
        (
            status(
                422, "Invalid", "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no"
            ),
            WriteProblem.ADMISSION,
        ),
        (
            status(500, "InternalError", 'failed calling webhook "p.example": no route to host'),
            WriteProblem.ADMISSION,
        ),
        (status(403, "Forbidden", 'User "operator" cannot patch services'), WriteProblem.FORBIDDEN),
        (
            status(403, "Forbidden", "it is being terminated", "NamespaceTerminating"),
            WriteProblem.NAMESPACE_TERMINATING,
        ),
        (
            status(404, "NotFound", 'namespaces "a" not found'),
            WriteProblem.NAMESPACE_TERMINATING,
        ),
        (status(422, "Invalid", "spec.ports: required"), WriteProblem.INVALID),
        (status(429, "TooManyRequests", "later"), WriteProblem.UNAVAILABLE),
        (status(503, "ServiceUnavailable", "later"), WriteProblem.UNAVAILABLE),
        (ApiError(0, "Timeout", "no answer"), WriteProblem.UNAVAILABLE),
    ],
)
def test_every_refusal_has_a_problem(error: ApiError, problem: WriteProblem) -> None:
    assert problem_of(error) is problem


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>502 Bad Gateway</html>", b"[]", b'"x"', b'{"kind":"Pod"}', b"\xff\xfe" * 9],
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


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), (None, None), ("Wed, 21 Oct", None)])
def test_retry_after_is_read_in_seconds(header: str | None, seconds: float | None) -> None:
    assert parse_failure(429, b"", header).retry_after_s == seconds


def test_a_message_of_any_length_is_cut() -> None:
    assert len(parse_failure(500, b"x" * 10**6).message) == 1000

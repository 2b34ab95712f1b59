"""What a refused request means."""

from __future__ import annotations

import json

import pytest

from fleetkeeper.adapters.kubernetes.refusals import problem_of
from fleetkeeper.reconcile.types import WriteProblem
from fleetkeeper_kube.errors import ApiError, parse_failure


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

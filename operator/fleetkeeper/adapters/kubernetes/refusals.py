"""Maps failed writes to the planner's problems."""

from __future__ import annotations

from fleetkeeper.reconcile.types import WriteProblem
from fleetkeeper_kube.errors import ApiError

_BY_STATUS = {
    400: WriteProblem.INVALID,
    401: WriteProblem.FORBIDDEN,
    403: WriteProblem.FORBIDDEN,
    404: WriteProblem.INVALID,
    405: WriteProblem.INVALID,
    409: WriteProblem.CONFLICT,
    413: WriteProblem.INVALID,
    415: WriteProblem.INVALID,
    422: WriteProblem.INVALID,
}


def problem_of(error: ApiError) -> WriteProblem:
    """Map a failed write to the planner's `WriteProblem`."""
    if _is_namespace_ending(error):
        return WriteProblem.NAMESPACE_TERMINATING
    if "exceeded quota" in error.message:
        return WriteProblem.QUOTA
    if error.is_from_admission:
        return WriteProblem.ADMISSION
    return _BY_STATUS.get(error.status, WriteProblem.UNAVAILABLE)


def _is_namespace_ending(error: ApiError) -> bool:
    """Return whether the namespace terminates or is gone; then a write gets 404 for the namespace."""
    gone = error.status == 404 and error.message.startswith("namespaces ")
    return gone or "NamespaceTerminating" in error.causes

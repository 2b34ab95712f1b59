"""Classification of failed requests to the API server."""

from __future__ import annotations

import json
import re
from typing import Any

from fleetkeeper.reconcile.types import WriteProblem

MESSAGE_LIMIT = 1000
"""Characters kept of the server's message: a response may have any size, or be a proxy's HTML."""


class ApiError(Exception):
    """A request that the API server, or something in front of it, did not fulfill.

    `status` is the HTTP status, or 0 if no response came; then a write may have been applied.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        causes: tuple[str, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{status or 'no response'} {reason}: {message}".strip())
        self.status = status
        self.reason = reason
        self.message = message
        self.causes = causes
        self.retry_after_s = retry_after_s

    @property
    def is_absent(self) -> bool:
        """Whether the object does not exist."""
        return self.status == 404

    @property
    def is_denial(self) -> bool:
        """Whether the server denied access (401 or 403)."""
        return self.status in {401, 403}

    @property
    def is_stale(self) -> bool:
        """Whether a precondition failed: the object changed, or is a different one now."""
        return self.status == 409

    @property
    def is_expired(self) -> bool:
        """Whether a resourceVersion or a continue token has expired, so that a new list is needed."""
        return self.status == 410

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later without any change."""
        return self.status in {0, 408, 425, 429} or self.status >= 500


class BrokenAnswer(ApiError):
    """A response that was cut off or is not JSON. A write may have been applied."""

    def __init__(self, message: str) -> None:
        super().__init__(0, "BrokenAnswer", message)


def parse_failure(status: int, body: bytes, retry_after: str | None = None) -> ApiError:
    """Return the error for a response other than 2xx. The body may be anything."""
    try:
        kubernetes_status: Any = json.loads(body)
    except ValueError:
        kubernetes_status = None
    if not isinstance(kubernetes_status, dict) or kubernetes_status.get("kind") != "Status":
        text = body[:MESSAGE_LIMIT].decode(errors="replace")
        return ApiError(status, "NotKubernetes", text, retry_after_s=_seconds(retry_after))
    return failure_of(kubernetes_status, status=status, retry_after=retry_after)


def failure_of(
    kubernetes_status: dict[str, Any], *, status: int = 0, retry_after: str | None = None
) -> ApiError:
    """Return the error for a Status object, also for one in a watch."""
    details = (
        kubernetes_status.get("details")
        if isinstance(kubernetes_status.get("details"), dict)
        else {}
    )
    found = details.get("causes") if isinstance(details, dict) else None
    causes = tuple(str(cause.get("reason", "")) for cause in found or () if isinstance(cause, dict))
    code = kubernetes_status.get("code")
    return ApiError(
        status or (code if isinstance(code, int) else 0),
        str(kubernetes_status.get("reason") or "Unknown"),
        str(kubernetes_status.get("message") or "")[:MESSAGE_LIMIT],
        causes=causes,
        retry_after_s=_seconds(retry_after),
    )


def _seconds(retry_after: str | None) -> float | None:
    """Return Retry-After in seconds; the API server does not use the form with a date."""
    return float(retry_after) if retry_after and re.fullmatch(r"\d{1,6}", retry_after) else None


def problem_of(error: ApiError) -> WriteProblem:
    """Return why a write was refused, as one of the problems that plans know."""
    said = error.message
    if _is_namespace_ending(error):
        return WriteProblem.NAMESPACE_TERMINATING
    if "exceeded quota" in said:
        return WriteProblem.QUOTA
    if any(words in said for words in _ADMISSION):
        return WriteProblem.ADMISSION
    return _BY_STATUS.get(error.status, WriteProblem.UNAVAILABLE)


_ADMISSION = (
    "denied the request",
    "denied request",
    "violates PodSecurity",
    "failed calling webhook",
)
"""Parts of the messages of webhooks, admission policies, Pod Security and unreachable webhooks."""

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


def _is_namespace_ending(error: ApiError) -> bool:
    """Return whether the namespace terminates or is gone; then a write gets 404 for the namespace."""
    gone = error.status == 404 and error.message.startswith("namespaces ")
    return gone or "NamespaceTerminating" in error.causes

"""Classification of failed requests to the API server."""

from __future__ import annotations

import json
import re
from typing import Any, Final

MESSAGE_LIMIT: Final = 1000
"""Characters kept of the server's message: a response may have any size, or be a proxy's HTML."""
_ADMISSION: Final = (
    "denied the request",
    "denied request",
    "violates PodSecurity",
    "failed calling webhook",
)
"""Parts of the messages of webhooks, admission policies, Pod Security and unreachable webhooks."""


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
        """True if the object or the resource does not exist."""
        return self.status == 404

    @property
    def is_denial(self) -> bool:
        """True if the server denied access (401 or 403)."""
        return self.status in {401, 403}

    @property
    def is_refusal(self) -> bool:
        """True if rights or the resource are missing, so that a retry alone does not help."""
        return self.is_denial or self.is_absent

    @property
    def is_stale(self) -> bool:
        """True if a precondition failed: the object changed, or was replaced by another."""
        return self.status == 409

    @property
    def is_expired(self) -> bool:
        """True if a resourceVersion or a continue token has expired, so that a new list is needed."""
        return self.status == 410

    @property
    def is_transient(self) -> bool:
        """True if the same request may succeed later without any change."""
        return self.status in {0, 408, 425, 429} or self.status >= 500

    @property
    def is_from_admission(self) -> bool:
        """True if a webhook or an admission policy refused, which concerns one object."""
        return any(words in self.message for words in _ADMISSION)


class BrokenAnswer(ApiError):
    """A response that was cut off or is not JSON. A write may have been applied."""

    def __init__(self, message: str) -> None:
        super().__init__(0, "BrokenAnswer", message)


class NotTaken(ApiError):
    """A response that is too large, or that is JSON but cannot be decoded.

    `content` is the part that was read.
    """

    def __init__(self, reason: str, message: str, content: bytes) -> None:
        super().__init__(0, reason, message)
        self.content = content


def parse_failure(status: int, body: bytes, retry_after: str | None = None) -> ApiError:
    """Return the error for a response other than 2xx. The body may be anything."""
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("kind") != "Status":
        text = body[:MESSAGE_LIMIT].decode(errors="replace")
        return ApiError(status, "NotKubernetes", text, retry_after_s=_seconds(retry_after))
    return failure_of(found, status=status, retry_after=retry_after)


def failure_of(
    found: dict[str, Any], *, status: int = 0, retry_after: str | None = None
) -> ApiError:
    """Return the error for a Status object of a response or a watch."""
    details, code = found.get("details"), found.get("code")
    causes = details.get("causes") if isinstance(details, dict) else None
    return ApiError(
        status or (code if isinstance(code, int) else 0),
        str(found.get("reason") or "Unknown")[:MESSAGE_LIMIT],
        str(found.get("message") or "")[:MESSAGE_LIMIT],
        causes=tuple(
            str(cause.get("reason", ""))
            for cause in (causes if isinstance(causes, list) else ())
            if isinstance(cause, dict)
        ),
        retry_after_s=_seconds(retry_after),
    )


def _seconds(retry_after: str | None) -> float | None:
    """Return Retry-After in seconds; the API server does not use the form with a date."""
    return float(retry_after) if retry_after and re.fullmatch("[0-9]{1,6}", retry_after) else None

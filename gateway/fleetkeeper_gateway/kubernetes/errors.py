"""Failures of reads from the API server."""

from __future__ import annotations

import json
from typing import Any

MESSAGE_LIMIT = 500
"""Characters kept of the server's message: a response may be a proxy's HTML."""


class ApiError(Exception):
    """A read that the API server, or something in front of it, did not fulfill.

    `status` is the HTTP status, or 0 if no usable response came.
    """

    def __init__(
        self, status: int, reason: str, message: str, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(f"{status or 'no response'} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s

    @property
    def is_refusal(self) -> bool:
        """Whether rights or the resource are missing, so that a retry alone does not help."""
        return self.status in {401, 403, 404}

    @property
    def is_expired(self) -> bool:
        """Whether a resourceVersion or a continue token has expired, so that a new list is needed."""
        return self.status == 410


class TooLarge(ApiError):
    """A page of a list that is larger than the client reads."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(0, "TooLarge", f"the response has more than {limit_bytes} bytes")


def parse_failure(status: int, body: bytes, retry_after: str | None = None) -> ApiError:
    """Return the error for a response other than 2xx. The body may be anything."""
    seconds = float(retry_after) if retry_after and retry_after.isdecimal() else None
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("kind") != "Status":
        text = body[:MESSAGE_LIMIT].decode(errors="replace")
        return ApiError(status, "NotKubernetes", text, retry_after_s=seconds)
    return failure_of(found, status=status, retry_after_s=seconds)


def failure_of(
    found: dict[str, Any], *, status: int = 0, retry_after_s: float | None = None
) -> ApiError:
    """Return the error for a Status object, also for one in a watch."""
    code = found.get("code")
    return ApiError(
        status or (code if isinstance(code, int) else 0),
        str(found.get("reason") or "Unknown")[:MESSAGE_LIMIT],
        str(found.get("message") or "")[:MESSAGE_LIMIT],
        retry_after_s=retry_after_s,
    )

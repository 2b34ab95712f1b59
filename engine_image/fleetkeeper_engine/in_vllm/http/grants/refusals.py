"""Answers to requests whose grant is refused, in the format of the OpenAI API."""

from __future__ import annotations

from fleetkeeper_engine.in_vllm.http.asgi import error_body
from fleetkeeper_engine.shm.layout import GrantRefusal

_MESSAGES = {
    GrantRefusal.MISSING: "This service accepts requests through its gateway alone. Send the request to the gateway.",
    GrantRefusal.INVALID: "The grant of the request is not valid.",
    GrantRefusal.EXPIRED: "The grant of the request has expired. Send the request to the gateway again.",
    GrantRefusal.USED: "The grant of the request was used before. Send the request to the gateway again.",
}


class GrantRefusedError(Exception):
    """A grant is refused. `why` says more about an invalid one."""

    def __init__(self, reason: GrantRefusal, why: str = "") -> None:
        super().__init__(f"{_MESSAGES[reason]} {why}".strip())
        self.reason = reason

    @property
    def body(self) -> bytes:
        """Return the body of the answer."""
        return error_body(str(self), "invalid_request_error", f"grant_{self.reason.label}")


GRANTS_FULL = error_body(
    "This replica cannot remember more grants. Try again soon.", "rate_limit_error", "grants_full"
)

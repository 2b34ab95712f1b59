"""Responses that the middleware sends itself, in the format of the OpenAI API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from fleetkeeper_contract.bodies.refused import RefusedBodyError
from fleetkeeper_contract.headers import TIER_HEADER
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.http.admission.tickets import Refusal
from fleetkeeper_engine.in_vllm.http.asgi import (
    Headers,
    Message,
    Send,
    answer,
    error_body,
    first_headers,
)
from fleetkeeper_engine.in_vllm.http.latencies import StreamTimer, is_stream
from fleetkeeper_engine.shm.layout import Outcome

CLOSE: Headers = [(b"connection", b"close")]
_AGAIN: Headers = [(b"retry-after", b"1")]
DRAINED = error_body(
    "This replica is shutting down. Send the request again; another replica will take it.",
    "server_error",
    "draining",
)
_EVENTS = b"text/event-stream"
_ABORT_EVENT = b"data: " + DRAINED + b"\n\ndata: [DONE]\n\n"


class Reply:
    """A response that is forwarded, with its progress.

    Calls `before_end` before its last frame, with True if the response was timed. `timer` times the
    frames if the response is a stream; None if its route has no tokens.
    """

    def __init__(
        self, send: Send, before_end: Callable[[bool], None], timer: StreamTimer | None = None
    ) -> None:
        self._send = send
        self._before_end = before_end
        self._timer = timer
        self._timed: StreamTimer | None = None
        self._start: Message | None = None
        self._ended = False

    def send(self, message: Message) -> Awaitable[None]:
        """Forward a message from vLLM. Not a coroutine of its own: a stream calls this with each token."""
        if not message.get("more_body", False):
            self._begins_or_ends(message)
        elif self._timed is not None:
            self._timed.frame(message["body"])
        return self._send(message)

    def _begins_or_ends(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            if self._timer is not None and is_stream(message):
                self._timed = self._timer
        elif message["type"] == "http.response.body":
            self._ended = True
            self._before_end(self._timed is not None)

    async def abort(self) -> None:
        """End the response at a whole frame: a clean 503, or an error as the last event."""
        if self._ended:
            return
        if self._start is None:
            await answer(self._send, 503, DRAINED, CLOSE)
        elif first_headers(self._start).get(b"content-type", b"").startswith(_EVENTS):
            await self._send(
                {"type": "http.response.body", "body": _ABORT_EVENT, "more_body": False}
            )


UNAUTHORIZED = error_body(
    "The API key is missing or wrong.", "invalid_request_error", "invalid_api_key"
)

# Its sequences would continue after the response, unseen by queue, limits and drain. The result is
# kept in the memory of one replica, which the request that fetches it is unlikely to reach.
NO_BACKGROUND = error_body(
    "background is not supported: a response is generated while its request is open. "
    "Send it with background false, and with tier batch if it can wait.",
    "invalid_request_error",
    "background_not_supported",
)


def unknown_path(path: str) -> bytes:
    """Return the body for a path that is not served."""
    return error_body(
        f"Path {path[:200]!r} is not served.", "invalid_request_error", "unknown_path"
    )


SHED: Final = (b"x-envoy-ratelimited", b"true")
"""Keeps the router from sending the request to another replica: all admit the same share of a tier."""


def unknown_tier(name: bytes) -> bytes:
    """Return the body for a header with an unknown tier."""
    labels = ", ".join(tier.label for tier in Tier)
    return error_body(
        f"{TIER_HEADER} is {str(name[:64], 'latin-1')!r}; it must be one of {labels}.",
        "invalid_request_error",
        "unknown_tier",
    )


def refused_body(refusal: Refusal) -> bytes:
    """Return the body for a request that admission refused."""
    tier, again = refusal.tier.label, f"Try again in {refusal.retry_after_s} s."
    if refusal.outcome is Outcome.TIER_CLOSED:
        message = f"The {tier} tier is closed on this replica. {again}"
    else:
        message = f"The {tier} queue of this replica is full ({refusal.limit} requests). {again}"
    return error_body(
        message, "rate_limit_error", refusal.outcome.label, tier=tier, limit=refusal.limit
    )


async def refuse_body(send: Send, error: RefusedBodyError) -> None:
    """Refuse a request because of its body. The rest of the body is not read."""
    busy = error.status == 429
    kind = "rate_limit_error" if busy else "invalid_request_error"
    body = error_body(str(error), kind, error.code, param=error.param)
    await answer(send, error.status, body, CLOSE + _AGAIN if busy else CLOSE)

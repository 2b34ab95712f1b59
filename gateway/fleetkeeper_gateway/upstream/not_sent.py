"""Responses that say that no engine took the request."""

from __future__ import annotations

import json
from typing import Final

MAX_BYTES: Final = 4096
"""A longer body is no such response."""
_NO_REPLICA = "no_replica"
"""Code of the 503 of our router, if no replica is ready or can be reached."""
_NO_WORKER = b"No available workers"
"""How vllm-router 0.1.17 begins its 503 as text, if no worker is healthy (measured)."""
_DRAINING = "draining"
"""Code of the 503 of our middleware, in a replica that shuts down."""


def is_refusal(status: int, body: bytes) -> bool:
    """Return whether a response says that the request was not taken and may be sent again."""
    if status != 503 or len(body) > MAX_BYTES:
        return False
    if body.startswith(_NO_WORKER):
        return True
    try:
        error = json.loads(body)["error"]
        return bool(error["code"] in {_DRAINING, _NO_REPLICA})
    except (ValueError, TypeError, KeyError, IndexError):
        return False

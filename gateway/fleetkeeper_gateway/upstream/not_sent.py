"""Detects responses which state that no engine accepted the request."""

from __future__ import annotations

import json
from typing import Final

MAX_BYTES: Final = 4096
"""Maximum bytes of such a response's body."""
_NO_REPLICA = "no_replica"
"""Error code of our router's 503 while no replica is ready or reachable."""
_NO_WORKER = b"No available workers"
"""First bytes of the 503 of vllm-router 0.1.17 while no worker is healthy (measured)."""
_DRAINING = "draining"
"""Error code of our middleware's 503 in a replica that shuts down."""


def is_refusal(status: int, body: bytes) -> bool:
    """Return whether a response states that the request was not accepted and may be sent again."""
    if status != 503 or len(body) > MAX_BYTES:
        return False
    if body.startswith(_NO_WORKER):
        return True
    try:
        error = json.loads(body)["error"]
        return bool(error["code"] in {_DRAINING, _NO_REPLICA})
    except (ValueError, TypeError, KeyError, IndexError):
        return False

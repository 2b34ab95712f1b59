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
SHED: Final = "shed"
"""Reason of a request that a replica shed."""
_SHED_CODES = frozenset({"queue_full", "tier_closed"})
"""Error codes of our middleware's 429 for a request that the replica has no place for."""


def is_refusal(status: int, body: bytes) -> bool:
    """Return whether a response states that the request was not accepted and may be sent again."""
    if status != 503 or len(body) > MAX_BYTES:
        return False
    return body.startswith(_NO_WORKER) or _code_of(body) in {_DRAINING, _NO_REPLICA}


def is_shed(status: int, body: bytes) -> bool:
    """Return whether a response states that the replica has no place for the request now."""
    return status == 429 and len(body) <= MAX_BYTES and _code_of(body) in _SHED_CODES


def _code_of(body: bytes) -> str:
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, TypeError, KeyError, IndexError):
        return ""
    return code if isinstance(code, str) else ""

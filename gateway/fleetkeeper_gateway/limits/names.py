"""Redis keys of the limits of one client key in one tier."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

PREFIX = "fleetkeeper:limits:"


@dataclass(frozen=True, slots=True)
class Names:
    """Redis keys by script. The braces keep them in one slot of a Redis cluster."""

    admit: tuple[bytes, ...]
    """Requests of this window and of the previous window, tokens, held, due, slots."""
    release: tuple[bytes, ...]
    """Tokens, held, due, slots."""
    settle: tuple[bytes, ...]
    """Tokens, held, due."""
    renew: tuple[bytes, ...]
    """Slots."""


@lru_cache(maxsize=32768)
def names_of(key_id: str, tier: str) -> Names:
    """Return the Redis keys of one client key and tier."""
    base = f"{PREFIX}{{{key_id}/{tier}}}:"
    requests, before, tokens, held, due, slots = (
        f"{base}{part}".encode()
        for part in ("requests", "requests-before", "tokens", "held", "due", "slots")
    )
    return Names(
        admit=(requests, before, tokens, held, due, slots),
        release=(tokens, held, due, slots),
        settle=(tokens, held, due),
        renew=(slots,),
    )

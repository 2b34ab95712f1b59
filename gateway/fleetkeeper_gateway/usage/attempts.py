"""The attempts of the last hours, so that no attempt counts twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

MAX_ATTEMPTS = 1_000_000
"""Maximum attempts in memory, of about 100 bytes each. A router resends an attempt within seconds."""


class Attempts:
    """A bounded set that drops its oldest members. It stores digests: 64 bits suffice to distinguish a million."""

    def __init__(self, limit: int = MAX_ATTEMPTS) -> None:
        self._limit = limit
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, attempt: str) -> bool:
        """Return whether an attempt was added."""
        return _digest(attempt) in self._known

    def add(self, attempts: Iterable[str]) -> None:
        """Add attempts."""
        for attempt in attempts:
            self._known[_digest(attempt)] = None
        while len(self._known) > self._limit:
            self._known.popitem(last=False)


def _digest(attempt: str) -> bytes:
    return blake2b(attempt.encode(errors="replace"), digest_size=8).digest()

"""Bounds on connections before their clients present a key: their number, and the bytes of unfinished heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

MAX_UNKNOWN: Final = 4096
"""Maximum connections on which no key was accepted yet. An idle connection takes 9 KiB."""
MAX_HEAD_BYTES: Final = 16 * 1024**2
"""Maximum bytes of all incomplete heads."""


class Closable(Protocol):
    """A connection that the budget may close."""

    def abort(self) -> None:
        """Close the connection at once."""


class ConnectionBudget:
    """The connections of a server without an accepted key. The oldest is closed to make room for the next.

    A client that sends its head in one piece is counted only while its head is read. So a flood of endless
    heads closes its own connections.
    """

    def __init__(
        self,
        *,
        max_unknown: int = MAX_UNKNOWN,
        max_head_bytes: int = MAX_HEAD_BYTES,
        closed: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """Take the bounds, and a callback that gets the reason when a connection is closed."""
        self._max_unknown = max_unknown
        self._max_head_bytes = max_head_bytes
        self._closed = closed
        # Both are in order of arrival.
        self._unknown: dict[Closable, None] = {}
        self._heads: dict[Closable, int] = {}
        self.head_bytes = 0

    @property
    def unknown(self) -> int:
        """Return the number of connections on which no key was accepted yet."""
        return len(self._unknown)

    def opened(self, connection: Closable) -> None:
        """Count a new connection."""
        self._unknown[connection] = None
        if len(self._unknown) > self._max_unknown:
            self._close(next(iter(self._unknown)), "unknown")

    def accepted(self, connection: Closable) -> None:
        """Stop counting a connection: its client has a key, whose limits apply from now on."""
        self._unknown.pop(connection, None)

    def head(self, connection: Closable, size: int) -> None:
        """Set the bytes of an incomplete head; 0 once it is complete."""
        self.head_bytes += size - self._heads.get(connection, 0)
        if size:
            self._heads[connection] = size
        else:
            self._heads.pop(connection, None)
        while self.head_bytes > self._max_head_bytes:
            self._close(next(iter(self._heads)), "heads")

    def forget(self, connection: Closable) -> None:
        """Stop counting a connection that ended."""
        self._unknown.pop(connection, None)
        self.head(connection, 0)

    def _close(self, connection: Closable, reason: str) -> None:
        self._unknown.pop(connection, None)
        self.head_bytes -= self._heads.pop(connection, 0)
        self._closed(reason)
        connection.abort()

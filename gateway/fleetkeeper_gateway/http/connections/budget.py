"""What connections may take before their clients have shown a key: their number, and unfinished heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

MAX_UNKNOWN: Final = 4096
"""Connections on which no key was accepted yet. An idle one takes 9 KiB."""
MAX_HEAD_BYTES: Final = 16 * 1024**2
"""Bytes of all heads that have begun and not ended."""


class Closable(Protocol):
    """A connection."""

    def abort(self) -> None:
        """Cut the client off at once."""


class ConnectionBudget:
    """The connections of a server. The oldest is closed to make room for the next one.

    A client that sends its head in one piece is not here for longer than its head takes to read, so a flood
    of heads without end closes its own connections.
    """

    def __init__(
        self,
        *,
        max_unknown: int = MAX_UNKNOWN,
        max_head_bytes: int = MAX_HEAD_BYTES,
        closed: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """Take the bounds, and what is called with a reason when a connection is closed."""
        self._max_unknown = max_unknown
        self._max_head_bytes = max_head_bytes
        self._closed = closed
        # Both are in the order in which they came.
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
        """Count a connection no more: its client has a key, and the limits of the key hold."""
        self._unknown.pop(connection, None)

    def head(self, connection: Closable, size: int) -> None:
        """Count the bytes of a head that has not ended; 0 once it has."""
        self.head_bytes += size - self._heads.get(connection, 0)
        if size:
            self._heads[connection] = size
        else:
            self._heads.pop(connection, None)
        while self.head_bytes > self._max_head_bytes:
            self._close(next(iter(self._heads)), "heads")

    def forget(self, connection: Closable) -> None:
        """Count a connection no more: it has ended."""
        self._unknown.pop(connection, None)
        self.head(connection, 0)

    def _close(self, connection: Closable, reason: str) -> None:
        self._unknown.pop(connection, None)
        self.head_bytes -= self._heads.pop(connection, 0)
        self._closed(reason)
        connection.abort()

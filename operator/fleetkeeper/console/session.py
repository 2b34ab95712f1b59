"""Access to the page, only for the browser that opened the link first."""

from __future__ import annotations

import hmac
import secrets

COOKIE = "fleetkeeper_console"
RANDOM_BYTES = 24


class Session:
    """The one session of a console: a path that cannot be guessed, a token that opens it once, a cookie.

    The prefix keeps the cookie from other programs on loopback, because cookies know paths but no
    ports. The token is in the link that the user opens, the cookie is not: a link in a history or
    a log opens nothing after its first use.
    """

    def __init__(self) -> None:
        self.prefix = f"/{secrets.token_urlsafe(RANDOM_BYTES)}"
        self._token: str | None = secrets.token_urlsafe(RANDOM_BYTES)
        self._cookie = secrets.token_urlsafe(RANDOM_BYTES)

    @property
    def link(self) -> str:
        """The path and query to open, valid once. Empty after its use."""
        return f"{self.prefix}/open?token={self._token}" if self._token else ""

    def spend(self, token: str) -> str | None:
        """Return the value of the cookie for the right token, and never again; otherwise None."""
        if self._token is None or not _same(token, self._token):
            return None
        self._token = None
        return self._cookie

    def knows(self, cookie: str | None) -> bool:
        """Return True if this is the cookie that the link gave."""
        return cookie is not None and _same(cookie, self._cookie)


def _same(given: str, expected: str) -> bool:
    """Compare in constant time; bytes, because text with other characters raises TypeError."""
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())

"""One line of JSON on standard output for each use and change of a key.

All other logs go to standard error, so that the two can be separated. Lines contain no content of
requests and no secret. Texts that a client chose, such as the model, are truncated. Requests without a
known key are counted by address and second. Otherwise any client could push the lines of others out of
a log of bounded size.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Final, TextIO

import structlog

EVENT: Final = "audit"
"""Value of `event` in every line."""
TEXT_LIMIT: Final = 256
"""Maximum characters of a text that a client chose."""
MAX_ADDRESSES: Final = 100
"""Maximum addresses of clients without a key that get a line of their own in a second."""
PERIOD_S: Final = 1.0
_UNAUTHORIZED: Final = 401


class StructuredAuditLog:
    """The `AuditLog` of a process."""

    def __init__(self, stream: TextIO) -> None:
        self._log: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
            structlog.PrintLogger(stream),
            processors=[
                structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
                structlog.processors.JSONRenderer(sort_keys=True),
            ],
            wrapper_class=structlog.make_filtering_bound_logger("info"),
            # Its own: other code may configure structlog, and its context is not ours.
            context_class=dict,
        )
        self._unknown: Counter[tuple[str | None, str]] = Counter()
        """Requests without a key in this period that are not logged yet, by address and outcome."""
        self._timer: asyncio.TimerHandle | None = None

    def request(
        self,
        *,
        key_id: str | None,
        request_id: str,
        service: str | None,
        model: str | None,
        tier: str | None,
        outcome: str,
        status: int,
        client: str,
    ) -> None:
        """Record the use of a key, or count a request without one."""
        if key_id is None and status == _UNAUTHORIZED and not self._is_first(client, outcome):
            return
        self._log.info(
            EVENT,
            action="request",
            key=_cut(key_id),
            request=_cut(request_id),
            service=_cut(service),
            model=_cut(model),
            tier=_cut(tier),
            outcome=_cut(outcome),
            status=status,
            client=_cut(client),
        )

    def _is_first(self, client: str, outcome: str) -> bool:
        """Return whether a request without a key is the first of its address in this period, and count it."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self.flush)
        is_first = (client, outcome) not in self._unknown
        if is_first and len(self._unknown) < MAX_ADDRESSES:
            self._unknown[client, outcome] = 0
            return True
        self._unknown[None if is_first else client, outcome] += 1
        return False

    def flush(self) -> None:
        """Write the counted requests, and begin the next period."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        counted, self._unknown = self._unknown, Counter()
        for (client, outcome), count in counted.items():
            if count:
                self._log.info(
                    EVENT,
                    action="request",
                    key=None,
                    outcome=outcome,
                    status=_UNAUTHORIZED,
                    client=_cut(client),
                    count=count,
                )

    def change(self, *, key_id: str, change: str, actor: str | None) -> None:
        """Record a change of a key: created, changed, rotated, revoked, expired."""
        self._log.info(EVENT, action=change, key=_cut(key_id), actor=_cut(actor))


def create_audit_log(stream: TextIO | None = None) -> StructuredAuditLog:
    """Return the audit log on standard output, or another stream."""
    return StructuredAuditLog(stream or sys.stdout)


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 1] + "…"

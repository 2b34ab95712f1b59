"""One line of JSON on standard output for each use and change of a key.

All other logs go to standard error, so that the two can be kept apart. Lines have no content of
requests and no secret. What a client chose, such as the model, is cut.
"""

from __future__ import annotations

import sys
from typing import Final, TextIO

import structlog

EVENT: Final = "audit"
"""Value of `event` in every line."""
TEXT_LIMIT: Final = 256
"""Characters kept of a text that a client may choose."""


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
        """Record the use of a key."""
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

    def change(self, *, key_id: str, change: str, actor: str | None) -> None:
        """Record a change of a key: created, changed, rotated, revoked, expired."""
        self._log.info(EVENT, action=change, key=_cut(key_id), actor=_cut(actor))


def create_audit_log(stream: TextIO | None = None) -> StructuredAuditLog:
    """Return the audit log on standard output, or another stream."""
    return StructuredAuditLog(stream or sys.stdout)


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 1] + "…"

"""The documents of the API, and the errors of requests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
Document = dict[str, Any]


class ApiError(Exception):
    """A request that failed. The message says what, where, and what to do.

    Attributes:
        status: of the answer; 0 if none came.
        transient: whether the same request may succeed a little later.
    """

    def __init__(self, message: str, *, status: int = 0, transient: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.transient = transient


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines of a batch."""

    total: int
    completed: int
    failed: int

    @property
    def done(self) -> int:
        """Return the lines that have a result."""
        return self.completed + self.failed


def counts_of(batch: Document) -> Counts:
    """Return the lines of a batch; zeros while they are not known."""
    found = batch.get("request_counts") or {}
    return Counts(*(int(found.get(name) or 0) for name in ("total", "completed", "failed")))

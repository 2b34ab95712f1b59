"""Containment of defects in Fleetkeeper itself.

A defect is an unexpected exception in a step for one service. It affects that service only: it is
logged and counted, the service's status shows it, and all other services continue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import structlog
from prometheus_client import Counter

from fleetkeeper.adapters.kubernetes.lease import LeaseLost
from fleetkeeper.reconcile.types import Defect
from fleetkeeper.runtime.queue import Key

log = structlog.get_logger(__name__)

KEPT_S: Final = 600.0
"""A status shows a defect for this long after it last occurred: two full resyncs by default."""


@dataclass(slots=True)
class _Occurrence:
    """A failed step: its first error, when it last failed, and when each error was logged."""

    error: str
    last: float
    logged: dict[str, float] = field(default_factory=dict)


class Defects:
    """The recent defects by service and step.

    `changed` is called with a service whose defect is new or different from the one before.
    """

    def __init__(
        self, counter: Counter, *, monotonic: Callable[[], float], changed: Callable[[Key], None]
    ) -> None:
        self._counter = counter
        self._monotonic = monotonic
        self._changed = changed
        self._known: dict[Key | None, dict[str, _Occurrence]] = {}

    def contained(self, where: str, key: Key | None = None) -> Contained:
        """Return a context manager that suppresses an exception of its step and records it.

        `where` names the step in the metric, the log and the status. `key` is the service that the
        step is for; None if it is not for a single service.
        """
        return Contained(self, where, key)

    def note(self, where: str, key: Key | None, problem: Exception) -> None:
        """Count, log and remember a defect. Each error is logged once per `KEPT_S`, not every tick."""
        now, error = self._monotonic(), type(problem).__name__
        shown = self.of(key) if key is not None else None
        self._counter.labels(where).inc()
        known = self._known.setdefault(key, {}).setdefault(where, _Occurrence(error, now))
        known.last = now
        if now - known.logged.get(error, float("-inf")) >= KEPT_S:
            known.logged[error] = now
            log.error("defect", where=where, service=str(key) if key else None, exc_info=problem)
        if key is not None and self.of(key) != shown:
            self._changed(key)

    def of(self, key: Key) -> Defect | None:
        """Return the defect that the status of the service shows: the oldest that still counts.

        So the status does not change each time that a defect changes, or comes and goes.
        """
        found = self._current(key)
        where = next(iter(found), None)
        return Defect(where, found[where].error) if where is not None else None

    def left_s(self, key: Key) -> float | None:
        """Return the seconds until the status must be checked again; None if there is no defect."""
        found = self._current(key)
        if not found:
            return None
        return max(0.0, max(item.last for item in found.values()) + KEPT_S - self._monotonic())

    def forget(self, key: Key) -> None:
        """Forget a deleted service."""
        self._known.pop(key, None)

    def _current(self, key: Key) -> dict[str, _Occurrence]:
        steps = self._known.get(key)
        if not steps:
            return {}
        oldest = self._monotonic() - KEPT_S
        current = {where: item for where, item in steps.items() if item.last > oldest}
        if current:
            self._known[key] = current
        else:
            del self._known[key]
        return current


class Contained:
    """The context of one step. After it, `failed` says whether the step raised."""

    __slots__ = ("_defects", "_key", "_where", "failed")

    def __init__(self, defects: Defects, where: str, key: Key | None) -> None:
        self._defects = defects
        self._where = where
        self._key = key
        self.failed = False

    def __enter__(self) -> Self:
        """Begin the step."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Contain every `Exception`, as `except Exception` would.

        This is the only place of the runtime that does so. A list of exception types is never complete, and a
        missing type would stop the whole fleet. Two exceptions are not defects and pass through: the
        loss of the lease, which ends the process, and cancellation, which is not an `Exception`.
        """
        if not isinstance(problem, Exception) or _is_lease_lost(problem):
            return False
        self.failed = True
        self._defects.note(self._where, self._key, problem)
        return True


def _is_lease_lost(problem: Exception) -> bool:
    if isinstance(problem, ExceptionGroup):
        return problem.subgroup(LeaseLost) is not None
    return isinstance(problem, LeaseLost)

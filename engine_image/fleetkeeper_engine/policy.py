"""Rules of admission that may change while an engine runs, shared by pid 1 and the middleware. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules of admission in force."""

    queue_limits: tuple[int, int, int]
    """Requests that may wait, by tier in the page's order."""
    batch_share_ratio: float
    """Of the sequences, the most that batch may hold while others wait."""
    batch_floor_ratio: float
    """Of the sequences, what batch may hold always."""
    queue_wait_objective_s: float

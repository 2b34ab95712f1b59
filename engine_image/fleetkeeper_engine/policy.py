"""Admission policy, shared by pid 1 and the middleware. It may change while an engine runs. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules of admission in force."""

    queue_limits: tuple[int, int, int]
    """Maximum number of waiting requests, by tier in the order of shared memory."""
    batch_share_ratio: float
    """The most of the sequences that batch may hold while others wait."""
    batch_floor_ratio: float
    """The share of the sequences that batch may always hold."""
    queue_wait_objective_s: float

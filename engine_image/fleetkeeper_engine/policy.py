"""Admission policy, shared by pid 1 and the middleware. It may change while an engine runs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from fleetkeeper_engine.shm.layout import SupervisorBlock


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


def policy_in(block: SupervisorBlock | None) -> Policy | None:
    """Return the policy that the supervisor has set; None if there is none yet."""
    if block is None or block.queue_wait_objective_s <= 0.0:
        return None
    realtime, standard, batch = block.queue_limits
    return Policy(
        queue_limits=(realtime, standard, batch),
        batch_share_ratio=block.batch_share_ratio,
        batch_floor_ratio=block.batch_floor_ratio,
        queue_wait_objective_s=block.queue_wait_objective_s,
    )

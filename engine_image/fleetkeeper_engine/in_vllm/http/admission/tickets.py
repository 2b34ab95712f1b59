"""Requests as admission knows them: in the queue, inside vLLM, or refused."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.http.admission.rules import DrainRate
from fleetkeeper_engine.in_vllm.priority import ReleaseReason
from fleetkeeper_engine.shm.layout import Outcome


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that was let into the queue."""

    tier: Tier
    sequences: int
    """The sequences it asks for; after its release, the sequences it is charged."""
    arrival_us: int
    priority: int | None = None
    """Set when it is released."""
    reason: ReleaseReason = ReleaseReason.ORDINARY
    """The reason of its release."""
    done: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was not let in."""

    outcome: Outcome
    tier: Tier
    limit: int
    """The tier's queue limit."""
    retry_after_s: int


@dataclass(slots=True)
class TierState:
    """The requests of one tier in the queue and inside vLLM. Others may read it."""

    queue: OrderedDict[int, Ticket] = field(default_factory=OrderedDict)
    """By arrival, the oldest first."""
    waiting_sequences: int = 0
    held: int = 0
    """Sequences inside vLLM."""
    priority_held: int = 0
    """Sequences inside vLLM that were released ahead of ordinary ones."""
    released: int = 0
    """Requests inside vLLM."""
    credit: float = 0.0
    rate: DrainRate = field(default_factory=DrainRate)

    @property
    def head(self) -> Ticket | None:
        """Return the oldest waiting request."""
        return next(iter(self.queue.values()), None)

    @property
    def oldest_arrival(self) -> float:
        """Return the arrival of the oldest waiting request in seconds; 0 if none waits."""
        return next(iter(self.queue)) / 1e6 if self.queue else 0.0

"""Replicas that the deadlines of a backlog require, beside the demand of the other tiers.

n = ceil(others + required / batch - 0.1)        all but n in replicas

others: the demand of realtime and standard over what one replica carries. required: the rate of the
backlog times a margin. batch: the tokens/s of one replica at its limits.

- The share of tier batch does not enter: it binds only while other requests wait, and in a fleet of this
  size they do not. The floor does: batch has it even then.
- A replica that starts after a deadline cannot help. So no more than the whole backlog in one cold start
  is required, however near or past the deadline.
- Work above the required rate lowers it, so replicas that were added are removed before the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleetkeeper.autoscale.constants import (
    BATCH_DOWN_FACTOR,
    BATCH_UP_FACTOR,
    DEMAND_TICKS,
    MAX_REPLICAS_NEEDED,
    ROUNDING,
    TICK_S,
)
from fleetkeeper.autoscale.signals.backlog import Backlog
from fleetkeeper.autoscale.state import TickState
from fleetkeeper_contract import rfc3339

BATCH_DEADLINE = "BatchDeadline"
"""Reason of replicas that only the deadline of a backlog requires."""


@dataclass(frozen=True, slots=True)
class DeadlineNeed:
    """The replicas that a backlog requires."""

    backlog: Backlog
    up: int
    """Replicas that meet its deadlines."""
    down: int
    """Replicas below which the backlog allows no scale-down."""
    least: int
    """`up` without a margin."""
    given_per_s: float
    """Tokens/s that the ready replicas can give to tier batch."""
    adds: bool = True
    """True if replicas may be added for it."""

    def misses(self, max_replicas: int) -> bool:
        """Return whether even so many replicas miss a deadline."""
        return self.least > max_replicas

    def detail(self, max_replicas: int) -> str:
        """Return the figures that decided."""
        due = rfc3339.format(self.backlog.deadline)
        what = f"batches of {self.backlog.tokens:,.0f} tokens, the first due by {due}, need"
        if self.misses(max_replicas):
            return f"{what} more than maxReplicas ({max_replicas}): a deadline will be missed"
        return f"{what} {min(self.up, max_replicas)} replicas together with the other tiers"


def deadline_need(state: TickState, carried_per_s: float, now: float) -> DeadlineNeed | None:
    """Return what the known backlog requires; None without one, or if it is not known what a replica does.

    `carried_per_s`: the requests/s of a replica within the objectives. Nothing is added before the demand of
    the others is known, because the first means of it are chance; unless a deadline is too near to wait for that.
    """
    backlog, estimate = state.backlog, state.estimate
    given_per_s = _tokens_per_s(state, carried_per_s)
    if backlog is None or not state.signals.known or carried_per_s <= 0 or given_per_s <= 0:
        return None
    floor = state.settings.batch_floor_ratio
    others = estimate.demand.per_s / carried_per_s
    in_time_per_s = min(
        backlog.tokens_per_s, backlog.tokens / max(1.0, estimate.cold_start.seconds)
    )

    def needed(factor: float) -> int:
        return _replicas(others, factor * in_time_per_s / given_per_s, floor)

    ready = estimate.supply.ready
    is_near = backlog.deadline - now < 2 * DEMAND_TICKS * TICK_S
    return DeadlineNeed(
        backlog,
        up=needed(BATCH_UP_FACTOR),
        down=needed(BATCH_DOWN_FACTOR),
        least=needed(1.0),
        given_per_s=given_per_s * max(ready - others, floor * ready),
        adds=not state.keeps_safe_limits and (is_near or estimate.demand.seen >= DEMAND_TICKS),
    )


def _tokens_per_s(state: TickState, carried_per_s: float) -> float:
    """Return the tokens/s of one replica; 0 if unknown. Without a model, by the requests that it carries."""
    targets = state.estimate.targets
    if targets is not None:
        return targets.batch_tokens_per_s
    return carried_per_s * (state.signals.prompt_tokens + state.signals.generation_tokens)


def _replicas(others: float, batch: float, floor: float) -> int:
    """Return the replicas for these loads, which are in replicas. `floor`: the floor of tier batch.

    Example: 1.5 for the others and 0.7 for batch: 2.2 - 0.1, so 3.
    """
    if batch <= 0.0:
        return 0
    by_floor = max(others, batch / floor) if floor > 0 else math.inf
    needed = min(others + batch, by_floor, MAX_REPLICAS_NEEDED)
    return max(1, math.ceil(needed - ROUNDING))

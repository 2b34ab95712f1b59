"""The canary: with three pods or more a raise goes to one pod first, and is reverted if it does harm.

Lower limits protect and go to all pods at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleetkeeper.autoscale.constants import (
    CANARY_PODS,
    CANARY_POINTS,
    CANARY_REST_S,
    CANARY_S,
    CANARY_WINDOWS,
    MIN_STEPS,
)
from fleetkeeper.autoscale.rules.batch.decide import direction
from fleetkeeper.autoscale.rules.batch.values import BatchMemory
from fleetkeeper.autoscale.signals.windows import PodWindow, Window
from fleetkeeper.autoscale.types import Limits


@dataclass(frozen=True, slots=True)
class Canary:
    """A pod that tries `limits` since `since`, before all pods get them."""

    pod: str
    limits: Limits
    since: float


def needs_canary(before: Limits | None, after: Limits, ready_pods: int) -> bool:
    """Return whether a change goes to one pod first: a raise, with three pods or more."""
    if before is None or before == after or ready_pods < CANARY_PODS:
        return False
    return direction(before, after) > 0


def _counts(windows: Sequence[PodWindow]) -> tuple[float, float]:
    return sum(w.steps for w in windows), sum(w.within for w in windows)


def judge_canary(canary: Canary, windows: Sequence[Window], now: float) -> bool | None:
    """Return whether all pods get the canary's limits (True) or the raise is reverted (False).

    None: not judged yet. With too few steps for a minute, it is reverted. Example: 92% of the canary's steps
    were within the objective, 98% of the others': 6 points lower, so it is reverted.
    """
    judged = [window for window in windows if window.start >= canary.since]
    own = [
        w for window in judged for w in window.pods if w.pod == canary.pod and w.steps >= MIN_STEPS
    ]
    others = [w for window in judged for w in window.pods if w.pod != canary.pod]
    steps, within = _counts(own)
    peer_steps, peer_within = _counts(others)
    if len(own) >= CANARY_WINDOWS and peer_steps >= MIN_STEPS:
        return within / steps >= peer_within / peer_steps - CANARY_POINTS
    return False if now - canary.since >= CANARY_S else None


def concluded(memory: BatchMemory, canary: Canary, now: float, *, is_good: bool) -> BatchMemory:
    """Return the batch memory after a verdict: the canary's limits for all pods, or no raises for a while."""
    if is_good:
        return replace(memory, limits=canary.limits, changed=now, raised=now)
    return replace(memory, changed=now, rest_until=now + CANARY_REST_S, before_raise=None)

"""A raise goes to one pod first when there are three or more; it is taken back if that pod suffers.

Tightenings protect and go to all pods at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleetkeeper.plan.control.batch import BatchMemory, direction
from fleetkeeper.plan.control.constants import (
    CANARY_PODS,
    CANARY_POINTS,
    CANARY_REST_S,
    CANARY_S,
    CANARY_WINDOWS,
    MIN_STEPS,
)
from fleetkeeper.plan.control.values import Decision, Limits, act, hold
from fleetkeeper.plan.control.windows import PodWindow, Window


@dataclass(frozen=True, slots=True)
class Canary:
    """One pod that tries `limits` since `since`, before all pods get them."""

    pod: str
    limits: Limits
    since: float
    reason: str = ""


def needs_canary(before: Limits | None, after: Limits, ready_pods: int) -> bool:
    """Whether a change is tried on one pod: a raise, with three pods or more."""
    if before is None or before == after or ready_pods < CANARY_PODS:
        return False
    return direction(before, after) > 0


def _counts(windows: Sequence[PodWindow]) -> tuple[float, float]:
    return sum(w.steps for w in windows), sum(w.within for w in windows)


def judge_canary(canary: Canary, windows: Sequence[Window], now: float) -> Decision[bool]:
    """True: give it to all. False: take it back. Hold: not judged yet.

    Example: the canary kept 92% of its steps, the others 98%: 6 points lower, taken back.
    """
    judged = [window for window in windows if window.start >= canary.since]
    own = [
        w for window in judged for w in window.pods if w.pod == canary.pod and w.steps >= MIN_STEPS
    ]
    others = [w for window in judged for w in window.pods if w.pod != canary.pod]
    steps, within = _counts(own)
    peer_steps, peer_within = _counts(others)
    if len(own) >= CANARY_WINDOWS and peer_steps >= MIN_STEPS:
        mine, theirs = within / steps, peer_within / peer_steps
        fine = mine >= theirs - CANARY_POINTS
        detail = f"{canary.pod} kept {mine:.1%} of its steps, the others {theirs:.1%}"
        return act(fine, "CanaryGood" if fine else "CanaryWorse", detail, own=mine, others=theirs)
    if now - canary.since >= CANARY_S:
        return act(
            False, "CanaryInconclusive", f"{canary.pod} had too few steps in {CANARY_S:.0f} s"
        )
    return hold(False, "CanaryRunning", f"{canary.pod} tries {canary.limits.sequences} sequences")


def concluded(
    memory: BatchMemory, canary: Canary, verdict: Decision[bool], now: float
) -> BatchMemory:
    """The batch memory after a verdict: limits for all, or a rest without raises."""
    if not verdict.valid:
        return memory
    if verdict.value:
        return replace(memory, limits=canary.limits, changed=now, raised=now)
    return replace(memory, changed=now, rest_until=now + CANARY_REST_S, before_raise=None)

"""The control breaker: protects the fleet from the control loop if signals or actuators are unreliable.

Closed -> open on any cause below. Open: limits go to the last known good ones (after a raise that did
harm, those before it; if they oscillated, they stay; start-up values if none are known), replicas to
max(current, fallback), and nothing is lowered. Half-open after 120 s (doubling to 30 min): three ticks
in which decisions are computed but not applied, then one notch on one pod; closed after five good ticks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.autoscale.constants import (
    COMPARE_TICKS,
    CONTROL_OPEN_S,
    DIRECTION_CHANGES,
    DIRECTION_S,
    FAILURES,
    FAILURES_S,
    GOOD_S,
    GOOD_TICKS,
    LOST_TICKS,
    MODEL_WINDOWS,
    NOT_IN_EFFECT_S,
    WORSE_POINTS,
)
from fleetkeeper.autoscale.types import Limits


@dataclass(frozen=True, slots=True)
class Worse:
    """The effect of a raise."""

    by: float
    """Decrease of SLO attainment (ratio)."""
    before: Limits
    """The limits before the raise."""

    @property
    def is_much(self) -> bool:
        """Return whether attainment fell by more than chance explains."""
        return self.by >= WORSE_POINTS


@dataclass(frozen=True, slots=True)
class Evidence:
    """The observations of one tick from which the control breaker decides."""

    blind: bool = False
    """True if signals are unknown although pods should report."""
    failed_acts: int = 0
    """Failed writes or PUTs of the last tick."""
    limits_late_s: float = 0.0
    """Time for which the limits have not been in effect."""
    replicas_late_s: float = 0.0
    """Time for which the replicas have not been in effect."""
    reversals: tuple[float, ...] = ()
    """Times at which limits changed direction, by more than two notches."""
    worse: Worse | None = None
    """The effect of the last raise (None: not judged)."""
    model_off_windows: int = 0
    """Consecutive windows in which a proven model was wrong."""
    attained: bool = False
    """True if both objectives are attained under `limits`."""
    limits: Limits | None = None


@dataclass(frozen=True, slots=True)
class ControlBreaker:
    """The state of the control breaker."""

    state: BreakerState = BreakerState.CLOSED
    since: float = 0.0
    reason: str = ""
    detail: str = ""
    wait_s: float = CONTROL_OPEN_S[0]
    """Time for which it stays open."""
    lost: int = 0
    """Ticks without signals."""
    failures: tuple[float, ...] = ()
    """Times of failed writes or PUTs."""
    good: int = 0
    """Good ticks while half-open."""
    ignore_before: float = 0.0
    """Time before which causes are ignored, because they were handled."""
    last_good: Limits | None = None
    """Limits under which the objectives were attained for ten minutes, the limits before a harmful
    raise, or those that were in force when limits oscillated."""
    attained_since: float | None = None
    """Time since which `attained_limits` attain the objectives."""
    attained_limits: Limits | None = None

    @property
    def is_closed(self) -> bool:
        """Return whether decisions are applied in full."""
        return self.state is BreakerState.CLOSED

    @property
    def probes(self) -> bool:
        """Return whether one pod may get one notch: half-open, after the ticks that only compute."""
        return self.state is BreakerState.HALF_OPEN and self.good >= COMPARE_TICKS


OSCILLATING: Final = "Oscillating"

Cause = tuple[str, str]
"""Why signals or actuators are unreliable: reason and detail."""


def _causes(breaker: ControlBreaker, evidence: Evidence, now: float) -> Iterator[Cause]:
    """Yield the causes that apply. The first is the reason."""
    if breaker.lost >= LOST_TICKS:
        yield "SignalsLost", f"no signals for {breaker.lost} ticks"
    count = len(breaker.failures)
    if count >= FAILURES:
        yield "ActuatorFailed", f"{count} failed writes in {FAILURES_S / 60:.0f} minutes"
    late_s = evidence.limits_late_s
    if late_s > NOT_IN_EFFECT_S:
        yield "LimitsNotInEffect", f"batch limits are not in effect after {late_s:.0f} s"
    late_s = evidence.replicas_late_s
    if late_s > NOT_IN_EFFECT_S:
        yield "ReplicasNotInEffect", f"allocated replicas are not in effect after {late_s:.0f} s"
    since = max(breaker.ignore_before, now - DIRECTION_S)
    count = sum(1 for time in evidence.reversals if time > since)
    if count >= DIRECTION_CHANGES:
        minutes = DIRECTION_S / 60
        yield OSCILLATING, f"batch limits changed direction {count} times in {minutes:.0f} minutes"
    if evidence.worse is not None and evidence.worse.is_much:
        points = 100 * evidence.worse.by
        yield "WorseAfterChange", f"SLO attainment fell {points:.1f} points after a limit increase"
    if evidence.model_off_windows >= MODEL_WINDOWS:
        yield "StepTimeModelInaccurate", "the step-time model is off by more than 50%"


def _counted(breaker: ControlBreaker, evidence: Evidence, now: float) -> ControlBreaker:
    """Return the breaker with its counters updated: lost ticks, recent failures, last known good limits."""
    lost = breaker.lost + 1 if evidence.blind else 0
    failures = breaker.failures
    if failures or evidence.failed_acts:
        recent = [t for t in failures if now - t < FAILURES_S and t > breaker.ignore_before]
        failures = tuple((recent + [now] * min(evidence.failed_acts, FAILURES))[-FAILURES:])
    since, limits, good = breaker.attained_since, breaker.attained_limits, breaker.last_good
    if not evidence.attained or evidence.limits != limits:
        since, limits = (now if evidence.attained else None), evidence.limits
    elif since is None:
        since = now
    elif now - since >= GOOD_S:
        good = limits
    if evidence.worse is not None and evidence.worse.is_much:
        # The limits before the raise are known best: they were in force until then.
        good = evidence.worse.before
    return replace(
        breaker,
        lost=lost,
        failures=failures,
        attained_since=since,
        attained_limits=limits,
        last_good=good,
    )


def decide_control_breaker(
    breaker: ControlBreaker, evidence: Evidence, now: float
) -> ControlBreaker:
    """Return the breaker after one tick."""
    breaker = _counted(breaker, evidence, now)
    cause = next(_causes(breaker, evidence, now), None)
    if breaker.state is BreakerState.OPEN:
        return _tried(breaker, now)
    if breaker.state is BreakerState.HALF_OPEN:
        return _tested(breaker, evidence, cause, now)
    if cause is None:
        return breaker
    if cause[0] == OSCILLATING:
        breaker = replace(breaker, last_good=evidence.limits or breaker.last_good)
    wait_s = CONTROL_OPEN_S[0] if now - breaker.since > CONTROL_OPEN_S[1] else breaker.wait_s
    return _open(breaker, cause, now, wait_s)


def _tested(
    breaker: ControlBreaker, evidence: Evidence, cause: Cause | None, now: float
) -> ControlBreaker:
    """Handle half-open: open again on a cause, for twice as long; close after enough good ticks."""
    if cause is not None:
        return _open(breaker, cause, now, min(CONTROL_OPEN_S[1], 2 * breaker.wait_s))
    if evidence.blind:
        return replace(breaker, good=0)
    good = breaker.good + 1
    if good >= COMPARE_TICKS + GOOD_TICKS:
        return replace(breaker, state=BreakerState.CLOSED, since=now, reason="", detail="", good=0)
    return replace(breaker, good=good)


def _tried(breaker: ControlBreaker, now: float) -> ControlBreaker:
    """Handle open: go half-open once the waiting time is over and signals are known."""
    if now - breaker.since < breaker.wait_s or breaker.lost:
        return breaker
    return replace(
        breaker,
        state=BreakerState.HALF_OPEN,
        since=now,
        good=0,
        failures=(),
        ignore_before=now,
    )


def _open(breaker: ControlBreaker, cause: Cause, now: float, wait_s: float) -> ControlBreaker:
    reason, detail = cause
    return replace(
        breaker,
        state=BreakerState.OPEN,
        since=now,
        reason=reason,
        detail=detail,
        wait_s=wait_s,
        good=0,
        attained_since=None,
    )

"""Transitions in plain words: the events that people read, and the list of decisions in the status."""

from __future__ import annotations

from fleetkeeper.plan.control.control_breaker import ControlBreaker
from fleetkeeper.plan.control.load_breaker import LoadBreaker
from fleetkeeper.plan.control.source_breaker import SourceBreaker
from fleetkeeper.plan.control.values import BreakerState, Decision
from fleetkeeper.plan.model import Notice

NORMAL = "Normal"
WARNING = "Warning"

_TIER_WORDS = {
    BreakerState.OPEN: "refuses requests",
    BreakerState.HALF_OPEN: "lets some requests in again",
    BreakerState.CLOSED: "lets all requests in again",
}
_ADVISED_WORDS = {
    BreakerState.OPEN: "would refuse requests",
    BreakerState.HALF_OPEN: "would let some requests in again",
    BreakerState.CLOSED: "would let all requests in again",
}


def notice_of_control(
    before: ControlBreaker, after: ControlBreaker, *, acts: bool
) -> Notice | None:
    """The control breaker's transition, if there was one; `acts`: whether anything follows from it."""
    if before.state is after.state:
        return None
    if after.state is BreakerState.OPEN:
        follows = "safe limits, no scale-down" if acts else "reported only, breakers are disabled"
        text = f"Control breaker open: {after.detail}; {follows}, next try in {after.wait_s:.0f} s"
        return Notice(WARNING, "ControlBreakerOpen", text)
    if after.state is BreakerState.HALF_OPEN:
        return Notice(
            NORMAL,
            "ControlBreakerHalfOpen",
            "Control breaker half-open: decisions are compared, then tried on one pod",
        )
    return Notice(
        NORMAL, "ControlBreakerClosed", "Control breaker closed: decisions are carried out again"
    )


def notices_of_load(before: LoadBreaker, after: LoadBreaker, *, acts: bool) -> tuple[Notice, ...]:
    """The load breaker's transitions, tier by tier; `acts`: whether they are sent to the engines."""
    if before is after:
        return ()
    words = _TIER_WORDS if acts else _ADVISED_WORDS
    notices = []
    old = before.by_tier()
    for tier, breaker in after.by_tier().items():
        if breaker.state is old[tier].state:
            continue
        opened = breaker.state is BreakerState.OPEN
        why = f": {breaker.reason}" if opened and breaker.reason else ""
        notices.append(
            Notice(
                WARNING if opened else NORMAL,
                "LoadBreakerOpen" if opened else f"LoadBreaker{breaker.state}",
                f"Tier {tier} {words[breaker.state]}{why}",
            )
        )
    return tuple(notices)


def notice_of_source(before: SourceBreaker, after: SourceBreaker, *, known: bool) -> Notice | None:
    """Prometheus falling silent or answering again."""
    if before.state is after.state:
        return None
    if not after.is_open:
        return Notice(NORMAL, "PrometheusBack", "Prometheus answers again")
    how = "replicas' metrics are read directly" if known else "replicas are held"
    return Notice(WARNING, "PrometheusLost", f"Prometheus gives no fresh samples: {how}")


def notices_of_restart(restart: Decision[tuple[str, ...]], *, acts: bool) -> tuple[Notice, ...]:
    """A replica restarted because its allocator is fragmented; `acts`: whether it really goes."""
    if not restart.valid:
        return ()
    words = "is drained and restarted" if acts else "would be drained and restarted"
    return tuple(
        Notice(NORMAL, restart.reason, f"{pod} {words}: {restart.detail}") for pod in restart.value
    )

"""Events for the transitions of the breakers and for restarts; `status.decisions` shows them too."""

from __future__ import annotations

from fleetkeeper.plan.control.control_breaker import ControlBreaker
from fleetkeeper.plan.control.load_breaker import LoadBreaker
from fleetkeeper.plan.control.source_breaker import SourceBreaker
from fleetkeeper.plan.control.values import BreakerState, Decision
from fleetkeeper.plan.model import Notice

NORMAL = "Normal"
WARNING = "Warning"

_TIER_WORDS = {
    BreakerState.OPEN: "sheds requests",
    BreakerState.HALF_OPEN: "admits some requests again",
    BreakerState.CLOSED: "admits all requests again",
}
_ADVISED_WORDS = {
    BreakerState.OPEN: "would shed requests",
    BreakerState.HALF_OPEN: "would admit some requests again",
    BreakerState.CLOSED: "would admit all requests again",
}


def notice_of_control(
    before: ControlBreaker, after: ControlBreaker, *, acts: bool
) -> Notice | None:
    """Return the event for a transition of the control breaker, or None if its state is unchanged.

    `acts` is False if the breaker only reports.
    """
    if before.state is after.state:
        return None
    if after.state is BreakerState.OPEN:
        follows = "safe limits, no scale-down" if acts else "reported only, breakers are disabled"
        text = f"Control breaker open: {after.detail}; {follows}, retry in {after.wait_s:.0f} s"
        return Notice(WARNING, "ControlBreakerOpen", text)
    if after.state is BreakerState.HALF_OPEN:
        return Notice(
            NORMAL,
            "ControlBreakerHalfOpen",
            "Control breaker half-open: decisions are only computed, then tried on one pod",
        )
    return Notice(
        NORMAL, "ControlBreakerClosed", "Control breaker closed: decisions are applied again"
    )


def notices_of_load(before: LoadBreaker, after: LoadBreaker, *, acts: bool) -> tuple[Notice, ...]:
    """Return the events for the load breaker's transitions, one for each tier that changed its state.

    `acts` is False if the breaker only reports and engines keep admitting everything.
    """
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
    """Return the event for a loss of Prometheus or its return, or None if nothing changed."""
    if before.state is after.state:
        return None
    if not after.is_open:
        return Notice(NORMAL, "PrometheusBack", "Prometheus returns fresh samples again")
    how = "replicas are read directly" if known else "the replica count is unchanged"
    return Notice(WARNING, "PrometheusLost", f"Prometheus returns no fresh samples: {how}")


def notices_of_restart(restart: Decision[tuple[str, ...]], *, acts: bool) -> tuple[Notice, ...]:
    """Return the events for replicas that are restarted because their allocator is fragmented.

    `acts` is False if the restart is only reported.
    """
    if not restart.valid:
        return ()
    words = "is drained and restarted" if acts else "would be drained and restarted"
    return tuple(
        Notice(NORMAL, restart.reason, f"Pod {pod} {words}: {restart.detail}")
        for pod in restart.value
    )

"""Events for the transitions of the breakers and for restarts; `status.decisions` shows them too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.autoscale.rules.control_breaker import ControlBreaker
from fleetkeeper.autoscale.rules.load_breaker import LoadBreaker
from fleetkeeper.autoscale.rules.source_breaker import SourceBreaker
from fleetkeeper.autoscale.state import Breakers, TickState
from fleetkeeper.autoscale.types import Decision
from fleetkeeper.common.values import Event, Remedy

NORMAL = "Normal"
WARNING = "Warning"

_TIER_TEXTS = {
    BreakerState.OPEN: "sheds requests",
    BreakerState.HALF_OPEN: "admits some requests again",
    BreakerState.CLOSED: "admits all requests again",
}
_ADVISED_TEXTS = {
    BreakerState.OPEN: "would shed requests",
    BreakerState.HALF_OPEN: "would admit some requests again",
    BreakerState.CLOSED: "would admit all requests again",
}


@dataclass(frozen=True, slots=True)
class BreakerMove:
    """A transition of one breaker (`control`, `source`, or a tier) and its event."""

    breaker: str
    before: BreakerState
    after: BreakerState
    event: Event


def tick_events(
    before: Breakers,
    state: TickState,
    remedy: Decision[Remedy | None],
    restart: Decision[tuple[str, ...]],
) -> tuple[Event, ...]:
    """Return the events of one tick. Restarts that happen get theirs once the pod is deleted."""
    events = [move.event for move in breaker_moves(before, state)]
    if remedy.valid:
        events.append(Event(WARNING, remedy.reason, remedy.detail[:1].upper() + remedy.detail[1:]))
    if not state.settings.restarts:
        events += restart_events(restart, acts=False)
    return tuple(events)


def breaker_moves(before: Breakers, state: TickState) -> Iterator[BreakerMove]:
    """Yield the transitions of one tick: the control breaker, the tiers, the source breaker."""
    after, settings = state.breakers, state.settings
    event = control_breaker_event(before.control, after.control, acts=settings.breakers_act)
    if event is not None:
        yield BreakerMove("control", before.control.state, after.control.state, event)
    old = before.load.by_tier()
    for tier, event in load_breaker_events(before.load, after.load, acts=settings.gates):
        yield BreakerMove(tier, old[tier].state, after.load.by_tier()[tier].state, event)
    event = source_breaker_event(before.source, after.source, known=state.signals.known)
    if event is not None:
        yield BreakerMove("source", before.source.state, after.source.state, event)


def control_breaker_event(
    before: ControlBreaker, after: ControlBreaker, *, acts: bool
) -> Event | None:
    """Return the event for a transition of the control breaker, or None if its state is unchanged.

    `acts` is False if the breaker only reports.
    """
    if before.state is after.state:
        return None
    if after.state is BreakerState.OPEN:
        follows = "safe limits, no scale-down" if acts else "reported only, breakers are disabled"
        text = f"Control breaker open: {after.detail}; {follows}, retry in {after.wait_s:.0f} s"
        return Event(WARNING, "ControlBreakerOpen", text)
    if after.state is BreakerState.HALF_OPEN:
        return Event(
            NORMAL,
            "ControlBreakerHalfOpen",
            "Control breaker half-open: decisions are only computed, then tried on one pod",
        )
    return Event(
        NORMAL, "ControlBreakerClosed", "Control breaker closed: decisions are applied again"
    )


def load_breaker_events(
    before: LoadBreaker, after: LoadBreaker, *, acts: bool
) -> tuple[tuple[str, Event], ...]:
    """Return the events for the load breaker's transitions by tier that changed its state.

    `acts` is False if the breaker only reports and engines keep admitting everything.
    """
    texts = _TIER_TEXTS if acts else _ADVISED_TEXTS
    events = []
    old = before.by_tier()
    for tier, breaker in after.by_tier().items():
        if breaker.state is old[tier].state:
            continue
        opened = breaker.state is BreakerState.OPEN
        why = f": {breaker.reason}" if opened and breaker.reason else ""
        event = Event(
            WARNING if opened else NORMAL,
            "LoadBreakerOpen" if opened else f"LoadBreaker{breaker.state}",
            f"Tier {tier} {texts[breaker.state]}{why}",
        )
        events.append((tier, event))
    return tuple(events)


def source_breaker_event(
    before: SourceBreaker, after: SourceBreaker, *, known: bool
) -> Event | None:
    """Return the event for a loss of Prometheus or its return, or None if nothing changed."""
    if before.state is after.state:
        return None
    if not after.is_open:
        return Event(NORMAL, "PrometheusBack", "Prometheus returns fresh samples again")
    how = "replicas are read directly" if known else "the replica count is unchanged"
    return Event(WARNING, "PrometheusLost", f"Prometheus returns no fresh samples: {how}")


def restart_events(restart: Decision[tuple[str, ...]], *, acts: bool) -> tuple[Event, ...]:
    """Return the events for replicas that are restarted because their allocator is fragmented.

    `acts` is False if the restart is only reported.
    """
    if not restart.valid:
        return ()
    texts = "is drained and restarted" if acts else "would be drained and restarted"
    return tuple(
        Event(NORMAL, restart.reason, f"Pod {pod} {texts}: {restart.detail}")
        for pod in restart.value
    )

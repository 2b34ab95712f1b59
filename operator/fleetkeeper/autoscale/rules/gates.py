"""What forbids to add or to remove a replica.

A replica is removed only with complete and fresh samples, closed breakers, an empty queue and enough
capacity in the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.autoscale.capacity.supply import Supply
from fleetkeeper.autoscale.constants import CARRY_KV_RATIO, CARRY_RATIO
from fleetkeeper.autoscale.rules.batch.values import BatchMemory
from fleetkeeper.autoscale.rules.need import Need
from fleetkeeper.autoscale.rules.objectives import wait_is_near
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.state import TickState
from fleetkeeper.autoscale.types import ControlInputs, Grade


@dataclass(frozen=True, slots=True)
class Gates:
    """What forbids to change the replicas."""

    removal: str = ""
    """The first reason why none may be removed; empty if nothing forbids it."""
    breakers_closed: bool = True
    floor: int = 0
    """Number of replicas below which the control breaker allows no scale-down."""
    raise_first: bool = False
    """True if batch limits were just raised, which may be enough."""
    releases: bool = False
    """True if another service needs a replica that this one keeps for the next surge."""


def gates_of(state: TickState, need: Need, batch: BatchMemory, *, releases: bool) -> Gates:
    """Return what forbids to change the replicas."""
    inputs, closed = state.inputs, state.breakers_closed
    floor = 0
    if inputs.settings.breakers_act and state.breakers.control.state is BreakerState.OPEN:
        floor = max(inputs.replicas, inputs.settings.fallback_replicas or 0)
    return Gates(
        next(objections(inputs, need, state.estimate.supply, breakers_closed=closed), ""),
        closed,
        floor,
        raise_first=batch.replicas_wait_ticks > 0,
        releases=releases,
    )


def objections(
    inputs: ControlInputs, need: Need, supply: Supply, *, breakers_closed: bool
) -> Iterator[str]:
    """Yield why no replica may be removed."""
    if why := unread(need.signals):
        yield why
    if not breakers_closed:
        yield "a circuit breaker is not closed"
    starting = supply.pending + supply.overdue or inputs.replicas - supply.ready
    if starting > 0:
        yield "1 pod is starting" if starting == 1 else f"{starting} pods are starting"
    if supply.hung:
        yield f"{supply.hung} engines are hung"
    if wait_is_near(need.signals, inputs.settings):
        yield f"queue wait is {need.signals.queue_wait_s:.2f} s, above a quarter of its objective"
    left = inputs.replicas - 1
    if left >= 1 and not need.signals.idle:
        yield from _overload(need, left)


def unread(signals: Signals) -> str:
    """Return which samples are missing or late; empty if every ready pod has fresh ones."""
    if signals.grade is not Grade.FRESH:
        return f"signals are {signals.grade.lower()}"
    if signals.coverage < 1.0:
        return f"only {signals.reporting_pods} of {signals.ready_pods} ready pods report"
    count = signals.overdue_pods
    return f"samples of {count} replicas are overdue" if count else ""


def _overload(need: Need, left: int) -> Iterator[str]:
    """Yield why so many replicas would not carry what runs."""
    if need.capacity <= 0:
        yield "the capacity of a replica is not known yet"
    if need.signals.gauges.running / left > CARRY_RATIO * need.capacity:
        yield f"{left} replicas would run above 85% of their capacity"
    if need.signals.kv_ratio * (left + 1) / left > CARRY_KV_RATIO:
        yield f"the KV cache of {left} replicas would be more than 80% full"

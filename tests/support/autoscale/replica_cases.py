"""Inputs of the replica rules for tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fleetkeeper.autoscale.capacity.supply import Supply
from fleetkeeper.autoscale.rules.need import Need
from fleetkeeper.autoscale.rules.replicas import decide_replicas
from fleetkeeper.autoscale.rules.scale_down import Gates, ReplicasMemory, objections
from fleetkeeper.autoscale.signals.samples import Counters, Gauges
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import ControlInputs, ControlSettings, Decision, Grade
from tests.support.autoscale.control_cases import NOW

SETTINGS = ControlSettings(min_replicas=1, max_replicas=10, scale_down_delay_s=600.0)


OBSERVED = ReplicasMemory(recommendations=((NOW - 590, 2),), since=NOW - 700)


def signals(**changes: object) -> Signals:
    """Four calm pods."""
    base = Signals(
        Grade.FRESH,
        1.0,
        4,
        4,
        rates=Counters(arrivals_standard=4, wait_count_standard=4),
        gauges=Gauges(running=40),
        queue_wait_s=0.05,
        batch_time_s=0.03,
        kv_ratio=0.3,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


Part = TypeVar("Part", ControlInputs, Need, Supply, Gates)
INPUTS = ControlInputs("team-a", "chat", SETTINGS, replicas=4, started=0.0)


@dataclass(frozen=True)
class View:
    """What the replica rules read."""

    inputs: ControlInputs
    need: Need
    supply: Supply
    gates: Gates

    def decide(self, memory: ReplicasMemory, now: float) -> tuple[Decision[int], ReplicasMemory]:
        """Decide one tick."""
        return decide_replicas(self.inputs, self.need, self.supply, self.gates, memory, now=now)


def view(**changes: Any) -> View:
    """Four ready replicas of capacity 32, for which two would do. Changes of one of its fields' fields."""

    def changed(base: Part) -> Part:
        own = {name: changes.pop(name) for name in base.__dataclass_fields__ if name in changes}
        return replace(base, **own)

    inputs = changed(INPUTS)
    need = changed(Need(signals(), 2, 32.0, is_trusted=True))
    supply = changed(Supply(ready=4))
    gates = changed(Gates())
    assert not changes
    whys = objections(inputs, need, supply, breakers_closed=gates.breakers_closed)
    return View(inputs, need, supply, replace(gates, removal=next(whys, "")))


def decided(seen: View, memory: ReplicasMemory = OBSERVED) -> Decision[int]:
    """The decision alone."""
    return seen.decide(memory, NOW)[0]


BROKEN = {"waits": True, "needed": 6}


WAITS = signals(queue_wait_s=1.9, waiting=12.0)

"""Inputs of the replica rules for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fleetkeeper.autoscale.capacity.supply import Supply
from fleetkeeper.autoscale.rules.replica_view import ReplicaView
from fleetkeeper.autoscale.rules.replicas import (
    decide_replicas,
)
from fleetkeeper.autoscale.rules.scale_down import ReplicasMemory
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


INPUTS = ControlInputs("team-a", "chat", SETTINGS, replicas=4, started=0.0)


def view(**changes: Any) -> ReplicaView:
    """Four ready replicas of capacity 32, for which two would do. Changes of its inputs, supply or own fields."""
    inputs, supply, own = (
        {name: changes.pop(name) for name in kind.__dataclass_fields__ if name in changes}
        for kind in (ControlInputs, Supply, ReplicaView)
    )
    assert not changes
    base = ReplicaView(
        replace(INPUTS, **inputs),
        signals(),
        replace(Supply(ready=4), **supply),
        needed_up=2,
        needed_down=2,
        capacity=32.0,
        model_trusted=True,
    )
    return replace(base, **own)


def decided(seen: ReplicaView, memory: ReplicasMemory = OBSERVED) -> Decision[int]:
    """The decision alone."""
    return decide_replicas(seen, memory, NOW)[0]


BROKEN = {"wait_broken": True, "batch_at_limit": True, "needed_up": 6}


WAITS = signals(queue_wait_s=1.9, waiting=12.0)

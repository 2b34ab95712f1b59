"""No replica is removed and no state is lost while data is missing."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.autoscale.rules.control_breaker import ControlBreaker
from fleetkeeper.autoscale.rules.scale_down import ReplicasMemory
from fleetkeeper.autoscale.signals.samples import Gauges, PodSample, Source
from fleetkeeper.autoscale.types import ControlSettings, Limits
from tests.support.autoscale.control_cases import NOW, Loop, pod_view, sample
from tests.support.lanes import keep_first

SILENCES = ["nothing", "stale", "nan", "future", "gone back", "half", "unknown pods"]


@pytest.mark.promise("safe-state")
@pytest.mark.parametrize("silence", SILENCES)
def test_signals_lost_for_three_ticks_open_the_control_breaker(silence: str) -> None:
    """However they are lost; replicas stay, the start-up limits come back, and it recovers."""
    loop = Loop()
    loop.steady(10)
    lost_at = loop.now
    states = []
    for _ in range(24):
        decision = loop.tick(silent_samples(loop, silence, lost_at))
        states.append(decision.breakers.control.state)
        assert decision.replicas.value == 2
    if silence != "half":
        assert BreakerState.OPEN in states
        assert decision.in_force == Limits(256, 8192)
    for _ in range(80):
        decision = loop.tick(loop.samples())
    assert decision.breakers.control.state is BreakerState.CLOSED


def test_a_new_leader_has_time_to_measure_before_signals_count_as_lost() -> None:
    """Half a minute without signals after a start opens nothing; after that three ticks do."""
    loop = Loop(started=NOW)
    opened = None
    while opened is None and loop.now < NOW + 300:
        decision = loop.tick()
        if decision.breakers.control.state is BreakerState.OPEN:
            opened = loop.now - 5 - NOW
    assert opened == 40.0


def silent_samples(loop: Loop, silence: str, lost_at: float) -> list[PodSample]:
    """Samples of a tick in which signals are lost in one way."""
    rows = loop.samples()
    if silence in {"nothing", "half"}:
        return rows[:1] if silence == "half" else []
    match silence:
        case "stale":
            return [sample(lost_at - 5, row.pod) for row in rows]
        case "nan":
            return [replace(row, gauges=row.gauges._replace(running=math.nan)) for row in rows]
        case "future":
            return [replace(row, time=row.time + 3600) for row in rows]
        case "gone back":
            return [sample(loop.now, row.pod, origin=loop.now - 1) for row in rows]
    return [replace(row, pod=f"ghost-{row.pod}") for row in rows]


@pytest.mark.promise("missing-measurements", "bounded-numbers")
@pytest.mark.slow
@pytest.mark.parametrize("seed", keep_first(1, range(10), pytest.mark.exhaustive))
def test_no_replica_goes_on_missing_data_in_100_000_random_ticks(seed: int) -> None:
    """Random outages, garbage and silence of every kind: never one scale-down in a tick without full, fresh data."""
    random = Random(seed)
    ticks = lowered = 0
    while ticks < 10_000:
        settings = ControlSettings(
            min_replicas=1, max_replicas=8, scale_down_delay_s=random.choice([30.0, 60.0, 300.0])
        )
        replicas = random.randint(1, 4)
        loop = Loop(settings=settings, replicas=replicas, started=NOW)
        directly = random.random() < 0.5
        kind, left, last_well = "nothing", 0, NOW - 1e9
        for _ in range(250):
            if left == 0:
                kind, left = (
                    random.choice([*SILENCES, "one pod", "lost", "well", "well"]),
                    random.randint(1, 40),
                )
            left -= 1
            quiet = {
                "wait_count_standard": 0.0,
                "arrivals_standard": 0.0,
                "batch_time_count": 0.0,
                "batch_time_sum_s": 0.0,
                "batch_time_within": 0.0,
                "steps": 0.0,
                "wait_within_standard": 0.0,
                "wait_sum_s_standard": 0.0,
                "prompt_tokens": 0.0,
                "generation_tokens": 0.0,
                "arrivals_squared": 0.0,
                "schedule_calls": 0.0,
            }
            rows = [
                replace(row, counters=row.counters._replace(steps=1e6))
                for row in loop.samples(gauges=Gauges(kv_capacity_tokens=1e5), **quiet)
            ]
            if kind in {"well", "lost"} or (kind == "one pod" and loop.replicas == 1):
                last_well = loop.now
            if kind == "one pod":
                rows = rows[:1]
            elif kind not in {"well", "lost"}:
                rows = silent_rows(loop, kind, rows)
            if directly or kind == "lost":
                rows = [replace(row, source=Source.DIRECT) for row in rows]
            missed = not directly and kind in {"nothing", "lost"}
            decision = loop.tick(rows, prometheus_lost=missed)
            ticks += 1
            if decision.replicas.value < loop.replicas:
                lowered += 1
                assert loop.now - 5 - last_well <= 5.0, kind
                assert kind not in {"nan", "future", "gone back"}, kind
                assert directly or kind != "lost", "not while Prometheus is missed"
                assert decision.signals.coverage == 1.0
            assert 1 <= decision.replicas.value <= 8
            loop.replicas = decision.replicas.value
            loop.pods = loop.pods[: loop.replicas]
    assert lowered > 10, "the loop must also be able to go down when all is known"


def silent_rows(loop: Loop, kind: str, rows: list[PodSample]) -> list[PodSample]:
    """The given samples, spoilt in one way."""
    if kind in {"nothing", "half"}:
        return rows[: len(rows) // 2] if kind == "half" else []
    match kind:
        case "stale":
            return [replace(row, time=loop.now - 120) for row in rows]
        case "nan":
            return [replace(row, gauges=row.gauges._replace(running=math.nan)) for row in rows]
        case "future":
            return [replace(row, time=row.time + 3600) for row in rows]
        case "gone back":
            return [
                replace(row, counters=row.counters._replace(steps=2e6 - loop.now)) for row in rows
            ]
    return [replace(row, pod=f"ghost-{row.pod}") for row in rows]


def test_no_scale_down_for_one_delay_after_the_operators_start() -> None:
    """Also if the memory before the restart allows one."""
    settings = ControlSettings(scale_down_delay_s=300.0)
    loop = Loop(settings=settings, replicas=3, started=NOW)
    loop.memory = replace(loop.memory, replicas=ReplicasMemory(((NOW - 200, 1),), since=NOW - 9999))
    first = None
    for _ in range(120):
        decision = loop.tick(
            loop.samples(wait_count_standard=0.1, arrivals_standard=0.1, wait_within_standard=0.1),
        )
        if decision.replicas.value < 3 and first is None:
            first = loop.now - NOW
    assert first is None or first >= 300


def test_pods_that_are_warming_up_or_missing_keep_the_number() -> None:
    """A fleet whose pods all just became ready is not judged, and not taken for lost."""
    loop = Loop(pods=(pod_view("chat-0", age_s=5), pod_view("chat-1", age_s=5)))
    for _ in range(10):
        decision = loop.tick(loop.samples())
    assert decision.breakers.control == ControlBreaker() or decision.breakers.control.is_closed
    assert decision.replicas.value == 2

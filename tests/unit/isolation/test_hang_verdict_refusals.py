"""Requests are turned away, and replicas taken away, only on fresh signals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.autoscale.rules.load_breaker import LoadBreaker, decide_load_breaker
from fleetkeeper.autoscale.signals.samples import Counters, Gauges
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import ControlSettings, Grade
from tests.support.autoscale.control_cases import NOW, Loop, sample

SETTINGS = ControlSettings()
OVERLOAD = Signals(
    Grade.FRESH,
    1.0,
    2,
    2,
    rates=Counters(
        wait_count_standard=4.0,
        arrivals_standard=10.0,
        arrivals_realtime=10.0,
        wait_count_realtime=4.0,
        preemptions=5.0,
    ),
    gauges=Gauges(
        running=50, oldest_wait_s_realtime=90.0, waiting_standard=60.0, waiting_batch=1.0
    ),
    queue_wait_s=5.0,
)
AGEING = replace(OVERLOAD, grade=Grade.AGEING)


def played(rows: list[Signals], breaker: LoadBreaker | None = None) -> LoadBreaker:
    """The breaker after a tick of 5 s with each of these signals."""
    held = breaker or LoadBreaker()
    for number, signals in enumerate(rows):
        held = decide_load_breaker(signals, SETTINGS, 100.0, held, NOW + 5.0 * number)
    return held


def test_no_tier_is_closed_to_requests_on_signals_that_only_age() -> None:
    """The fleet may have recovered since: an overload that is not seen now refuses nobody."""
    assert not played([OVERLOAD] * 20).is_closed
    assert played([AGEING] * 20).is_closed


def test_ticks_before_signals_aged_do_not_count_with_those_after() -> None:
    """Ticks in a row are fresh ticks in a row."""
    one = replace(OVERLOAD, rates=OVERLOAD.rates._replace(preemptions=0.0))
    aged = replace(one, grade=Grade.AGEING)
    assert played([one, aged, one, aged, one, aged]).is_closed
    assert not played([one, one]).is_closed


def test_a_tier_that_is_open_lets_in_no_fewer_while_signals_age() -> None:
    """What was decided on fresh signals stays, until they are fresh again or lost."""
    opened = played([OVERLOAD] * 3)
    assert opened.standard.state is BreakerState.OPEN
    aged = played([AGEING] * 12, opened)
    assert aged.standard == replace(opened.standard, over=0)
    assert aged.batch.state is BreakerState.OPEN
    fresh = played([OVERLOAD] * 3, opened)
    assert fresh.standard.admit < opened.standard.admit
    assert played([replace(AGEING, grade=Grade.STALE, warmed_up_pods=2)], aged).is_closed


@pytest.mark.parametrize("delay_s", [0.0, 20.0], ids=["fresh", "ageing"])
def test_no_replica_goes_while_signals_only_age(delay_s: float) -> None:
    """The same fleet, idle for an hour, seen at once or through samples that are 20 s old."""
    loop = Loop(replicas=3, settings=replace(SETTINGS, scale_down_delay_s=60.0, min_replicas=1))
    least = 3
    for _ in range(720):
        rows = [
            sample(
                loop.now - delay_s,
                pod.name,
                arrivals_standard=0.1,
                wait_count_standard=0.1,
                wait_sum_s_standard=0.001,
            )
            for pod in loop.pods
        ]
        gauges = [row.gauges._replace(running=0.0) for row in rows]
        decision = loop.tick(
            [replace(row, gauges=held) for row, held in zip(rows, gauges, strict=True)]
        )
        least = min(least, decision.replicas.value)
    assert (least < 3) is (delay_s == 0.0)

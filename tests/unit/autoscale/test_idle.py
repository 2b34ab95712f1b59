"""Whether a service was without requests for long enough to sleep, and when its pods are read for that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.api.parse import parse_service
from fleetkeeper.api.types import ScalingMode
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.settings import settings_of
from fleetkeeper.autoscale.signals.backlog import Backlog
from fleetkeeper.autoscale.signals.samples import Gauges, PodSample, Source
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.common.activation import Activation, State
from fleetkeeper.common.sleep import NEVER_SLEPT, NOT_IDLE, Idle, Sleep
from fleetkeeper_contract.sleep import SleepState
from fleetkeeper_contract.tiers import Tier
from tests.support.autoscale.control_cases import Loop
from tests.support.reconcile.plan_world import service

AFTER_S = 900.0
SETTINGS = ControlSettings(min_replicas=2, sleep_after_s=AFTER_S)
QUIET: dict[str, Any] = {"arrivals_standard": 0.0, "wait_count_standard": 0.0}


def read(
    loop: Loop, *idle_s: float, source: Source = Source.DIRECT, gauge: str = ""
) -> list[PodSample]:
    """Samples of both pods, read now, with these idle times. In `gauge` they have a request."""
    held = Gauges(limit_sequences=32.0, limit_tokens=1024.0, kv_capacity_tokens=4e5)
    held = held._replace(**{gauge: 1.0}) if gauge else held
    rows = loop.samples(held, **QUIET)
    return [
        replace(row, source=source, gauges=row.gauges._replace(idle_s=seconds))
        for row, seconds in zip(rows, idle_s, strict=True)
    ]


def after(loop: Loop, ticks: int, *idle_s: float, **inputs: Any) -> ControlDecision:
    """Return the decision of the last of some ticks in which both pods were read directly."""
    for _ in range(ticks):
        decision = loop.tick(read(loop, *idle_s), **{"checks_directly": True, **inputs})
    return decision


def test_a_service_is_idle_once_every_pod_was_read_directly() -> None:
    """Prometheus' word alone is not enough, however long it says so. The oldest read counts."""
    loop = Loop(SETTINGS)
    for _ in range(10):
        decision = loop.tick(
            read(loop, 950.0, 950.0, source=Source.PROMETHEUS), checks_directly=True
        )
        assert decision.idle == NOT_IDLE
    assert after(loop, 2, 990.0, 990.0).idle == NOT_IDLE, "rates still rest on Prometheus"
    assert after(loop, 1, 990.0, 990.0).idle == Idle(is_idle=True, read_at=loop.now - 5.0)
    first, second = read(loop, 1000.0, AFTER_S)
    decision = loop.tick([replace(first, time=first.time - 1.5), second], checks_directly=True)
    assert decision.idle == Idle(is_idle=True, read_at=first.time - 1.5)


def test_without_a_prometheus_every_read_is_direct() -> None:
    assert after(Loop(SETTINGS), 3, AFTER_S, AFTER_S, checks_directly=False).idle.is_idle


BACKLOG = Backlog(5e6, 1e9, 10.0, Loop().now)


@pytest.mark.parametrize(
    ("idle_s", "change"),
    [
        pytest.param((AFTER_S, AFTER_S - 0.1), {}, id="one pod had a request"),
        pytest.param((AFTER_S, 0.0), {}, id="one pod does not export the time"),
        pytest.param((AFTER_S, AFTER_S), {"backlog": BACKLOG}, id="batches wait"),
        pytest.param(
            (AFTER_S, AFTER_S), {"checks_directly": False, "prometheus_lost": True}, id="lost"
        ),
    ],
)
def test_a_service_is_not_idle_if(idle_s: tuple[float, ...], change: dict[str, Any]) -> None:
    loop = Loop(SETTINGS)
    assert after(loop, 5, AFTER_S, AFTER_S).idle.is_idle
    assert after(loop, 1, *idle_s, **change).idle == NOT_IDLE


@pytest.mark.parametrize(
    "gauge", ["running", "waiting_realtime", "waiting_standard", "waiting_batch"]
)
def test_a_service_with_a_request_is_not_idle_whatever_its_engines_say(gauge: str) -> None:
    loop = Loop(SETTINGS)
    assert after(loop, 5, AFTER_S, AFTER_S).idle.is_idle
    rows = read(loop, AFTER_S, AFTER_S, gauge=gauge)
    assert loop.tick(rows, checks_directly=True).idle == NOT_IDLE


@pytest.mark.parametrize("source", [None, Source.PROMETHEUS])
def test_a_pod_that_was_not_read_directly_keeps_its_service_awake(source: Source | None) -> None:
    """It gave no answer in time, and Prometheus may have a sample of it."""
    loop = Loop(SETTINGS)
    assert after(loop, 5, AFTER_S, AFTER_S).idle.is_idle
    for _ in range(4):
        first, second = read(loop, AFTER_S, AFTER_S)
        others = [] if source is None else [replace(second, source=source)]
        decision = loop.tick([first, *others], checks_directly=True)
    assert decision.idle == NOT_IDLE


def test_where_prometheus_is_disputed_each_pod_must_be_read_all_the_same() -> None:
    loop = Loop(SETTINGS)
    for _ in range(5):
        first, second = read(loop, AFTER_S, AFTER_S)
        decision = loop.tick(
            [first, replace(second, source=Source.PROMETHEUS)], prometheus_disputed=True
        )
    assert decision.idle == NOT_IDLE


@pytest.mark.parametrize(
    "change",
    [
        {"sleep_after_s": None},
        {"paused": True},
        {"scaling_mode": ScalingMode.ADVISORY},
        {"activation": Activation(State.PINNED, 2)},
    ],
)
def test_a_service_that_does_not_sleep_is_not_idle_and_not_read(change: dict[str, Any]) -> None:
    loop = Loop(replace(SETTINGS, **change))
    decision = after(loop, 5, 9e6, 9e6)
    assert (decision.idle, decision.asks_pods) == (NOT_IDLE, False)


@pytest.mark.parametrize(
    ("idle_s", "change", "asks"),
    [
        ((AFTER_S - 15, AFTER_S), {}, True),
        ((AFTER_S - 15.1, AFTER_S), {}, False),
        ((AFTER_S, AFTER_S), {"backlog": BACKLOG}, False),
    ],
)
def test_pods_are_read_directly_near_the_end_of_the_idle_time(
    idle_s: tuple[float, ...], change: dict[str, Any], asks: bool
) -> None:
    """Three ticks before it: then the last read of them can show the whole time."""
    loop = Loop(SETTINGS)
    rows = read(loop, *idle_s, source=Source.PROMETHEUS)
    assert loop.tick(rows, checks_directly=True, **change).asks_pods is asks


def test_pods_are_read_directly_while_their_service_goes_to_sleep() -> None:
    """Also without a sample."""
    loop = Loop(replace(SETTINGS, goes_to_sleep=True))
    assert loop.tick(checks_directly=True).asks_pods


def test_the_loop_knows_the_state_of_the_sleep() -> None:
    spec = parse_service(
        service(access="Gateway", scaling={"sleep": {"afterIdleSeconds": 600}})
    ).spec
    awake = settings_of(spec, 1, sleep=NEVER_SLEPT)
    assert (awake.sleep_after_s, awake.goes_to_sleep, awake.waking_tier) == (600.0, False, None)
    going = Sleep(1, SleepState.GOING_TO_SLEEP, tier=Tier.BATCH)
    assert settings_of(spec, 1, sleep=going) == replace(awake, goes_to_sleep=True)
    waking = Sleep(1, SleepState.WAKING, since=70.0, tier=Tier.BATCH)
    assert settings_of(spec, 1, sleep=waking) == replace(
        awake, waking_tier=Tier.BATCH, waking_since=70.0
    )


def test_a_service_that_others_than_the_gateway_may_call_is_never_read_for_its_sleep() -> None:
    spec = parse_service(service(access="Open", scaling={"sleep": {}})).spec
    assert settings_of(spec, 1).sleep_after_s is None

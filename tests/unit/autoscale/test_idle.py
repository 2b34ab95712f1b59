"""Whether a service was without requests for long enough to sleep, and when its pods are read for that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.api.parse import parse_service
from fleetkeeper.api.types import ScalingMode
from fleetkeeper.autoscale.arbitrate import Allocation, Lack
from fleetkeeper.autoscale.constants import EARLY_IDLE_S, WAKE_LACKS_S
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.rules.idle import EarlySleep, early_sleep_cost
from fleetkeeper.autoscale.settings import settings_of
from fleetkeeper.autoscale.signals.backlog import Backlog
from fleetkeeper.autoscale.signals.samples import Gauges, PodSample, Source
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.common.activation import Activation, State
from fleetkeeper.common.sleep import NEVER_SLEPT, NOT_IDLE, Idle, Sleep
from fleetkeeper_contract.sleep import SleepState
from fleetkeeper_contract.tiers import Tier
from tests.support.autoscale.control_cases import NOW, Loop, pod_view
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
    assert after(loop, 1, 990.0, 990.0).idle == Idle(is_idle=True, read_at=loop.now - 5.0)
    first, second = read(loop, 1000.0, AFTER_S)
    decision = loop.tick([replace(first, time=first.time - 1.5), second], checks_directly=True)
    assert decision.idle == Idle(is_idle=True, read_at=first.time - 1.5)


def test_a_pod_in_its_first_minute_tells_the_time_of_its_last_request() -> None:
    loop = Loop(SETTINGS, pods=(pod_view("chat-0", age_s=5.0), pod_view("chat-1", age_s=5.0)))
    assert after(loop, 1, AFTER_S, AFTER_S).idle.is_idle


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
    assert (awake.awake_since, awake.min_awake_s) == (0.0, 300.0)
    going = Sleep(1, SleepState.GOING_TO_SLEEP, tier=Tier.BATCH)
    assert settings_of(spec, 1, sleep=going) == replace(awake, goes_to_sleep=True, awake_since=None)
    waking = Sleep(1, SleepState.WAKING, since=70.0, tier=Tier.BATCH, failures=1)
    assert settings_of(spec, 1, sleep=waking) == replace(
        awake,
        waking_tier=Tier.BATCH,
        waking_since=70.0,
        wake_has_failed=True,
        awake_since=None,
    )


def test_a_service_that_others_than_the_gateway_may_call_is_never_read_for_its_sleep() -> None:
    spec = parse_service(service(access="Open", scaling={"sleep": {}})).spec
    assert settings_of(spec, 1).sleep_after_s is None


# -- before the end of its idle time --------------------------------------------------------------

AWAKE = replace(SETTINGS, awake_since=0.0, min_awake_s=300.0)
FOR = "team-b/wakes"


def asked_to_sleep(settings: ControlSettings = AWAKE) -> Loop:
    """Return a service that the last arbitration asked to sleep for another one."""
    loop = Loop(settings)
    after(loop, 3, EARLY_IDLE_S, EARLY_IDLE_S)
    loop.memory = replace(loop.memory, allocation=Allocation(2, confirms=True, sleeps_for=FOR))
    return loop


def test_a_service_that_is_asked_to_sleep_is_idle_after_a_short_time_read_directly() -> None:
    decision = after(asked_to_sleep(), 1, EARLY_IDLE_S, EARLY_IDLE_S)
    assert decision.asks_pods
    assert decision.idle.is_idle
    assert decision.idle.sleeps_for == FOR
    assert after(asked_to_sleep(), 1, EARLY_IDLE_S, EARLY_IDLE_S - 1).idle == NOT_IDLE
    assert after(asked_to_sleep(), 1, EARLY_IDLE_S, 99.0, backlog=BACKLOG).idle == NOT_IDLE
    assert after(Loop(AWAKE), 5, EARLY_IDLE_S, EARLY_IDLE_S).idle == NOT_IDLE
    loop = asked_to_sleep()
    rows = read(loop, 60.0, 60.0, source=Source.PROMETHEUS)
    assert loop.tick(rows, checks_directly=True).idle == NOT_IDLE
    loop = asked_to_sleep()
    rows = read(loop, 60.0, 60.0, gauge="running")
    assert loop.tick(rows, checks_directly=True).idle == NOT_IDLE


def test_a_service_that_already_goes_needs_no_one_who_asks() -> None:
    """The status says that it goes: a new leader continues. A request ends it all the same."""
    loop = Loop(replace(AWAKE, goes_to_sleep=True, awake_since=None))
    assert after(loop, 3, EARLY_IDLE_S, EARLY_IDLE_S).idle.is_idle
    assert after(loop, 1, EARLY_IDLE_S, 1.0).idle == NOT_IDLE


def test_what_its_sleep_costs_is_its_start_by_the_time_without_a_request() -> None:
    """The replicas of the test took 60 s from pod to ready. The last request of either counts."""
    early = after(Loop(AWAKE), 3, 120.0, 600.0).want.early_sleep
    nodes = tuple(pod.node for pod in Loop(AWAKE).pods)
    assert early == EarlySleep(60.0 / 120.0, is_read=True, was_awake=True, nodes=nodes)
    assert early_sleep_cost(75.0, 300.0) == 0.25


@pytest.mark.parametrize(
    ("settings", "inputs"),
    [
        ({"sleep_after_s": None}, {}),
        ({"paused": True}, {}),
        ({"scaling_mode": ScalingMode.ADVISORY}, {}),
        ({"goes_to_sleep": True, "awake_since": None}, {}),
        ({"waking_since": 5.0, "awake_since": None}, {}),
        ({}, {"rolling_out": True}),
        ({}, {"replicas": 3}),
        ({}, {"backlog": BACKLOG}),
    ],
)
def test_these_never_sleep_early(settings: dict[str, Any], inputs: dict[str, Any]) -> None:
    loop = Loop(replace(AWAKE, **settings))
    assert after(loop, 3, 600.0, 600.0, **inputs).want.early_sleep is None


def test_a_pod_that_starts_or_has_a_request_keeps_its_service_awake() -> None:
    loop = Loop(AWAKE)
    assert after(loop, 3, 600.0, EARLY_IDLE_S - 1).want.early_sleep is None
    rows = read(loop, 600.0, 600.0, gauge="running")
    assert loop.tick(rows).want.early_sleep is None
    loop = Loop(AWAKE, pods=(pod_view("chat-0"), pod_view("chat-1", ready=False)))
    rows = [replace(row, gauges=row.gauges._replace(idle_s=600.0)) for row in read(loop, 600.0)]
    assert loop.tick(rows).want.early_sleep is None


@pytest.mark.parametrize(
    ("counters", "tier"),
    [
        ({"arrivals_realtime": 0.001}, Tier.REALTIME),
        ({}, Tier.STANDARD),
        ({"arrivals_batch": 1.0}, Tier.BATCH),
        ({"arrivals_batch": 1.0, "arrivals_standard": 1.0}, Tier.STANDARD),
    ],
)
def test_its_tier_is_the_most_urgent_of_all_requests_of_its_replicas(
    counters: dict[str, float], tier: Tier
) -> None:
    """They are counters of the engines, so a new leader knows them too."""
    loop = Loop(AWAKE)
    idle = Gauges(limit_sequences=32.0, limit_tokens=1024.0, idle_s=60.0)
    early = loop.tick(loop.samples(idle, **QUIET | counters)).want.early_sleep
    assert early is not None
    assert early.tier is tier
    assert not early.is_read


@pytest.mark.parametrize(
    ("since", "was_awake"), [(0.0, True), (NOW - 301.0, True), (NOW - 299.0, False)]
)
def test_its_time_awake_is_that_of_its_pods_and_of_its_status(
    since: float, was_awake: bool
) -> None:
    loop = Loop(replace(AWAKE, awake_since=since))
    early = loop.tick(read(loop, 60.0, 60.0)).want.early_sleep
    assert early is not None
    assert early.was_awake is was_awake
    young = Loop(AWAKE, pods=(pod_view("chat-0", age_s=299.0), pod_view("chat-1", age_s=200.0)))
    early = young.tick(read(young, 60.0, 60.0)).want.early_sleep
    assert early is not None
    assert not early.was_awake


def test_a_wake_lacks_after_some_seconds_without_a_direct_read_unless_its_start_failed() -> None:
    """Its mark is the proof, and the status has the time: a new leader does not begin again."""
    waking = replace(
        SETTINGS, waking_tier=Tier.STANDARD, waking_since=NOW - WAKE_LACKS_S, awake_since=None
    )

    def lack(settings: ControlSettings) -> Lack:
        return Loop(settings, replicas=0).tick(gpus_per_replica=1).want.lacks

    assert lack(waking) is Lack.CONFIRMED
    assert lack(replace(waking, waking_since=NOW - WAKE_LACKS_S + 1)) is Lack.LONG
    assert lack(replace(waking, wake_has_failed=True)) is Lack.NOTHING

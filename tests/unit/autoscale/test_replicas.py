"""Replicas: staffing, forecast, supply, when to go up, when not to go down."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.autoscale.capacity.forecast import Forecast, expected_per_s, smoothed
from fleetkeeper.autoscale.capacity.staffing import (
    Load,
    backlog_counts,
    headroom,
    needed_replicas,
    peakedness,
)
from fleetkeeper.autoscale.capacity.supply import (
    ColdStart,
    emptiest,
    measured_cold_start,
    supply_of,
)
from fleetkeeper.autoscale.rules.replica_view import ReplicaView
from fleetkeeper.autoscale.rules.replicas import (
    decide_replicas,
    most_replicas_now,
    with_recommendation,
)
from fleetkeeper.autoscale.rules.scale_down import ReplicasMemory
from fleetkeeper.autoscale.signals.samples import Counters, Gauges, Source
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import ControlSettings, Decision, Grade, PodView
from tests.support.control_cases import NOW, pod_view
from tests.support.lanes import examples

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


def view(**changes: object) -> ReplicaView:
    """Four ready replicas of capacity 32, for which two would do."""
    base = ReplicaView(
        signals(),
        SETTINGS,
        replicas=4,
        ready=4,
        needed_up=2,
        needed_down=2,
        capacity=32.0,
        model_trusted=True,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def decided(seen: ReplicaView, memory: ReplicasMemory = OBSERVED) -> Decision[int]:
    """The decision alone."""
    return decide_replicas(seen, memory, NOW)[0]


@pytest.mark.parametrize(
    ("realtime", "standard", "batch", "rho", "beta"),
    [
        (1, 0, 0, 0.75, 1.5),
        (0, 1, 0, 0.85, 0.75),
        (0, 0, 1, 0.95, 0.0),
        (1, 0, 1, 0.85, 0.75),
        (1, 1, 0, 0.8, 1.125),
        (0, 0, 0, 0.85, 0.75),
        (2, 1, 1, 0.825, 0.9375),
    ],
)
def test_headroom_follows_the_mix_of_tiers(
    realtime: float, standard: float, batch: float, rho: float, beta: float
) -> None:
    """From 0.75 and 1.5 (realtime) to 0.95 and 0 (batch only)."""
    rates = Counters(arrivals_realtime=realtime, arrivals_standard=standard, arrivals_batch=batch)
    assert headroom(rates) == pytest.approx((rho, beta))


@pytest.mark.parametrize(
    ("idc", "z"), [(0.0, 1.0), (1.0, 1.0), (3.0, 2.0), (16.0, 8.5), (100.0, 10.0)]
)
def test_peakedness_is_bounded(idc: float, z: float) -> None:
    """Within 1 and 10."""
    assert peakedness(idc) == z


def load(**changes: float) -> Load:
    """4 requests/s of 20 s at capacity 32, standard traffic."""
    base = Load(4.0, 20.0, 32.0, 0.85, 0.75, 1.0)
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({}, 3),
        ({"arrivals_per_s": 0.0}, 0),
        ({"rho": 0.75, "beta": 1.5}, 4),
        ({"burstiness": 16.0}, 4),
        ({"arrivals_per_s": 8.0}, 6),
        ({"capacity": 64.0}, 2),
        ({"capacity": 0.0}, 95),
        ({"backlog": 96.0, "completions_per_s": 1.6}, 4),
        ({"backlog": 960.0, "completions_per_s": 1.6}, 13),
        ({"backlog": 96.0, "completions_per_s": 0.0}, 3),
        ({"arrivals_per_s": 1e300}, 1_000_000),
    ],
)
def test_staffing_worked_examples(change: dict[str, float], want: int) -> None:
    """The formula's examples, its corner cases and its bound."""
    assert needed_replicas(load(**change)) == want


@given(
    st.floats(0, 500), st.floats(0, 500), st.floats(0.1, 60), st.floats(1, 256), st.floats(0, 20)
)
@examples(200)
def test_more_load_never_needs_fewer(
    a: float, b: float, service_s: float, capacity: float, idc: float
) -> None:
    """Monotone in arrivals, and never below the load itself."""
    low, high = sorted((a, b))
    small = needed_replicas(Load(low, service_s, capacity, 0.85, 0.75, idc))
    large = needed_replicas(Load(high, service_s, capacity, 0.85, 0.75, idc))
    assert small <= large
    assert large >= high * service_s / capacity - 0.1


@pytest.mark.parametrize(
    ("wait_s", "counts"), [(0.12, False), (0.125, False), (0.13, True), (5.0, True)]
)
def test_backlog_counts_from_a_quarter_of_the_objective(wait_s: float, counts: bool) -> None:
    """Below that it is the ordinary queue."""
    assert backlog_counts(wait_s, 0.5) is counts


@pytest.mark.parametrize(("horizon_s", "want"), [(0.0, 4.0), (60.0, 5.2), (600.0, 8.0), (1e9, 8.0)])
def test_forecast_worked_examples(horizon_s: float, want: float) -> None:
    """At most double the present rate."""
    assert expected_per_s(Forecast(4.0, 0.1, 50), 4.0, horizon_s) == pytest.approx(want)


def test_a_falling_forecast_never_lowers_the_present_rate() -> None:
    """Going down is not for forecasts."""
    assert expected_per_s(Forecast(4.0, -0.5, 50), 4.0, 180.0) == 4.0


def test_forecast_follows_a_ramp_and_forgets_it() -> None:
    """A steady ramp is seen ahead; at a constant rate the trend dies out."""
    forecast = Forecast()
    for i in range(60):
        forecast = smoothed(forecast, 4 + 0.1 * i)
    assert expected_per_s(forecast, 10.0, 60.0) > 10.5
    for _ in range(200):
        forecast = smoothed(forecast, 10.0)
    assert expected_per_s(forecast, 10.0, 60.0) == pytest.approx(10.0, rel=0.02)


@pytest.mark.parametrize(
    ("recent", "replicas", "most"),
    [
        ([], 1, 3),
        ([], 2, 4),
        ([], 3, 6),
        ([(30, 3)], 5, 6),
        ([(61, 3)], 5, 10),
        ([(10, 1)], 3, 3),
        ([(59, 8)], 9, 16),
    ],
)
def test_up_by_two_or_double_in_a_minute(
    recent: list[tuple[float, int]], replicas: int, most: int
) -> None:
    """Whichever is more, from the least of the last 60 s."""
    memory = ReplicasMemory(recent_replicas=tuple((NOW - ago, count) for ago, count in recent))
    assert most_replicas_now(memory, replicas, NOW) == most


BROKEN = {"wait_broken": True, "batch_at_limit": True, "needed_up": 6}
WAITS = signals(queue_wait_s=1.9, waiting=12.0)


@pytest.mark.parametrize(
    ("case", "change", "want", "reason"),
    [
        ("broken, batch at its limit", {**BROKEN, "signals": WAITS}, 6, "QueueWaitAboveTarget"),
        (
            "broken, little needed: one more",
            {**BROKEN, "needed_up": 2, "signals": WAITS},
            5,
            "QueueWaitAboveTarget",
        ),
        (
            "broken, batch has room",
            {**BROKEN, "batch_at_limit": False, "needed_up": 2},
            4,
            "Steady",
        ),
        ("forecast", {"needed_up": 6}, 6, "LoadForecast"),
        ("forecast without a model", {"needed_up": 6, "model_trusted": False}, 4, "Steady"),
        ("a raise of the batch may do", {**BROKEN, "raise_first": True}, 4, "Steady"),
        ("supply is coming", {**BROKEN, "needed_up": 4, "ready": 3, "pending": 1}, 4, "Steady"),
        (
            "more than is coming",
            {**BROKEN, "needed_up": 6, "ready": 3, "pending": 1},
            6,
            "QueueWaitAboveTarget",
        ),
        (
            "coming, no model",
            {**BROKEN, "needed_up": 6, "ready": 3, "pending": 1, "model_trusted": False},
            4,
            "Steady",
        ),
        (
            "overdue does not count",
            {"needed_up": 5, "ready": 3, "overdue": 1, "replicas": 4},
            6,
            "LoadForecast",
        ),
        ("at the floor and slow", {"demand": True}, 5, "MinimumBatchTooSlow"),
        (
            "never above max",
            {**BROKEN, "needed_up": 90, "replicas": 9, "ready": 9},
            10,
            "QueueWaitAboveTarget",
        ),
        ("at most double", {**BROKEN, "needed_up": 90}, 8, "QueueWaitAboveTarget"),
        ("hung engines are not supply", {"needed_up": 4, "hung": 1}, 4, "Steady"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_up(case: str, change: dict[str, object], want: int, reason: str) -> None:
    """Each way up, and each reason not to."""
    decision = decided(view(needed_down=4, **change), ReplicasMemory())
    assert decision.value == want
    if want > 4:
        assert decision.reason == reason


def test_up_is_blocked_while_the_newest_revision_cannot_start() -> None:
    """More pods of it would only take more accelerators."""
    decision = decided(view(**BROKEN, up_blocked="no replica of revision 3 is ready: ImagePull"))
    assert not decision.valid
    assert decision.value == 4
    assert decision.reason == "ScaleUpBlocked"


def test_ageing_signals_may_only_raise() -> None:
    """Up on a minute-old sample, never down."""
    old = replace(WAITS, grade=Grade.AGEING)
    assert decided(view(**BROKEN, signals=old)).value == 6
    assert decided(view(signals=replace(signals(), grade=Grade.AGEING))).value == 4


def test_down_one_pod_after_the_delay() -> None:
    """Everything known and calm."""
    decision = decided(view())
    assert decision.valid
    assert (decision.value, decision.reason) == (3, "LoadFell")


OBJECTIONS = [
    ("stale", {"signals": Signals()}),
    ("ageing", {"signals": signals(grade=Grade.AGEING)}),
    ("not all report", {"signals": signals(coverage=0.75, reporting_pods=3)}),
    ("direct source not watched", {"signals": signals(source=Source.DIRECT)}),
    ("a scrape is overdue", {"signals": signals(overdue_pods=1)}),
    ("breaker", {"breakers_closed": False}),
    ("pending", {"ready": 3, "pending": 1}),
    ("overdue", {"ready": 3, "overdue": 1}),
    ("fewer ready than ordered", {"ready": 3}),
    ("hung", {"hung": 1}),
    ("queue", {"signals": signals(waiting=1.0)}),
    ("n-1 would be too full", {"signals": signals(gauges=Gauges(running=0.86 * 3 * 32))}),
    ("n-1 would fill the cache", {"signals": signals(kv_ratio=0.61)}),
    ("capacity not known", {"capacity": 0.0}),
    ("need not known", {"needed_down": None, "needed_up": None}),
    ("more is needed", {"needed_down": 4}),
    ("floor of the breaker", {"floor": 4}),
]


@pytest.mark.parametrize(("case", "change"), OBJECTIONS, ids=[row[0] for row in OBJECTIONS])
def test_no_way_down_when(case: str, change: dict[str, object]) -> None:
    """Each objection alone holds the number."""
    assert decided(view(**change)).value == 4


@pytest.mark.parametrize(
    ("since_s", "change", "goes"),
    [
        (600, {}, True),
        (599, {}, False),
        (9999, {"prometheus_lost": True}, False),
        (9999, {"signals": signals(source=Source.DIRECT, coverage=0.75, reporting_pods=3)}, False),
        (9999, {"signals": signals(source=Source.DIRECT, overdue_pods=1)}, False),
        (9999, {"signals": signals(source=Source.DIRECT, grade=Grade.AGEING)}, False),
        (9999, {"signals": signals()}, True),
    ],
)
def test_direct_readings_lower_once_they_were_whole_for_the_delay(
    since_s: float, change: dict[str, object], goes: bool
) -> None:
    """Without a Prometheus every pod must have been read, fresh, all along; with one that is missed none goes."""
    direct = replace(view(signals=signals(source=Source.DIRECT)), **change)  # type: ignore[arg-type]
    memory = replace(OBSERVED, direct_since=NOW - since_s)
    assert (decided(direct, memory).value == 3) is goes


def test_one_gap_in_direct_readings_starts_their_time_anew() -> None:
    """A pod that was silent for one tick, or a Prometheus that was missed for one."""
    whole = view(signals=signals(source=Source.DIRECT))
    for gap in (
        replace(whole, signals=signals(source=Source.DIRECT, coverage=0.75)),
        replace(whole, signals=Signals()),
        replace(whole, prometheus_lost=True),
    ):
        memory = replace(OBSERVED, direct_since=NOW - 9999)
        _, memory = decide_replicas(gap, memory, NOW)
        assert memory.direct_since is None
        _, memory = decide_replicas(whole, memory, NOW + 5)
        assert memory.direct_since == NOW + 5
        assert decide_replicas(whole, memory, NOW + 300)[0].value == 4


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        (ReplicasMemory(), "not observed yet"),
        (replace(OBSERVED, since=NOW - 599), "one second too short"),
        (replace(OBSERVED, recommendations=((NOW - 300, 4),)), "four were needed five minutes ago"),
        (replace(OBSERVED, lowered=NOW - 59), "one went 59 s ago"),
        (replace(OBSERVED, raised=NOW - 59), "one came 59 s ago"),
    ],
)
def test_no_way_down_yet(memory: ReplicasMemory, why: str) -> None:
    """The highest recommendation of the delay, one step a minute."""
    assert decided(view(), memory).value == 4


@pytest.mark.parametrize(("replicas", "step"), [(4, 1), (10, 1), (19, 1), (20, 2), (55, 5)])
def test_large_fleets_lose_a_tenth_at_a_time(replicas: int, step: int) -> None:
    """One pod, or 10%."""
    wide = replace(SETTINGS, max_replicas=100)
    seen = view(
        settings=wide,
        replicas=replicas,
        ready=replicas,
        signals=signals(gauges=Gauges(running=4), ready_pods=replicas, reporting_pods=replicas),
    )
    assert decided(seen).value == replicas - step


def test_idle_goes_to_the_minimum_one_by_one() -> None:
    """And not below."""
    idle = signals(rates=Counters(), gauges=Gauges())
    memory, now, count, seen = ReplicasMemory(), NOW, 4, []
    for _ in range(400):
        held = view(
            signals=replace(idle, ready_pods=count, reporting_pods=count),
            replicas=count,
            ready=count,
            needed_up=0,
            needed_down=0,
        )
        decision, memory = decide_replicas(held, memory, now)
        if decision.value != count:
            seen.append((now, decision.value))
        count = decision.value
        now += 5
    assert [value for _, value in seen] == [3, 2, 1]
    assert seen[0][0] - NOW >= 600
    assert all(b - a >= 60 for (a, _), (b, _) in itertools.pairwise(seen))


def test_an_outage_restarts_the_delay() -> None:
    """Ticks without knowledge count as full."""
    memory, now = OBSERVED, NOW
    for _ in range(60):
        _, memory = decide_replicas(view(signals=Signals()), memory, now)
        now += 5
    waited = 0.0
    while decide_replicas(view(), memory, now)[0].value == 4:
        _, memory = decide_replicas(view(), memory, now)
        now += 5
        waited += 5
        assert waited < 2000
    assert waited >= 540


@pytest.mark.parametrize(("pinned", "live"), [(0, 4), (3, 4), (9, 1), (1000, 4)])
def test_a_pin_wins(pinned: int, live: int) -> None:
    """spec.replicas in every mode, also outside min and max."""
    held = replace(SETTINGS, pinned_replicas=pinned)
    assert decided(view(settings=held, replicas=live)).value == pinned


@pytest.mark.parametrize(
    ("live", "low", "high", "want"), [(0, 1, 10, 1), (1, 3, 10, 3), (12, 1, 10, 10), (5, 1, 10, 5)]
)
def test_bounds_are_kept_also_without_signals(live: int, low: int, high: int, want: int) -> None:
    """Below the minimum at once; above the maximum once something is known."""
    held = ControlSettings(min_replicas=low, max_replicas=high)
    seen = view(settings=held, replicas=live, ready=live, needed_up=live, needed_down=live)
    assert decided(seen).value == want


@given(
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.integers(0, 40),
            st.booleans(),
            st.booleans(),
            st.sampled_from(Grade),
            st.integers(0, 3),
            st.floats(0, 1),
        ),
        min_size=5,
        max_size=80,
    ),
    st.integers(1, 5),
    st.integers(5, 20),
)
@examples(150)
def test_replicas_stay_in_bounds_and_go_down_slowly(rows: list[tuple], low: int, high: int) -> None:  # type: ignore[type-arg]
    """Whatever is measured: within [min, max]; down a step a minute and only after the delay."""
    held = ControlSettings(min_replicas=low, max_replicas=high, scale_down_delay_s=60.0)
    memory, now, count = ReplicasMemory(), NOW, low
    lowered: list[float] = []
    for up, down, broken, at_limit, grade, pending, coverage in rows:
        seen = view(
            settings=held,
            replicas=count,
            ready=max(0, count - pending),
            pending=pending,
            needed_up=up,
            needed_down=down,
            wait_broken=broken,
            batch_at_limit=at_limit,
            signals=signals(grade=grade, coverage=1.0 if coverage > 0.3 else coverage),
        )
        decision, memory = decide_replicas(seen, memory, now)
        assert low <= decision.value <= high
        if decision.value < count:
            assert grade is Grade.FRESH
            assert coverage > 0.3
            assert now - NOW >= 60
            assert not lowered or now - lowered[-1] >= 60
            lowered.append(now)
        count = decision.value
        now += 5


@pytest.mark.parametrize("delay_s", [30.0, 60.0, 600.0, 3600.0])
def test_the_highest_recommendation_of_the_delay_is_remembered(delay_s: float) -> None:
    """And forgotten soon after it (within one slot)."""
    memory = with_recommendation(ReplicasMemory(), 7, delay_s, NOW)
    now = NOW
    while now < NOW + 2 * delay_s:
        now += 5
        memory = with_recommendation(memory, 2, delay_s, now)
        highest = max(count for _, count in memory.recommendations)
        if now - NOW < delay_s:
            assert highest == 7
    assert highest == 2
    assert len(memory.recommendations) <= 23


def test_pods_by_state() -> None:
    """Ready, pending, overdue after two cold starts; those being deleted count for nothing."""
    pods = (
        pod_view("a"),
        replace(pod_view("b", ready=False), created=NOW - 100),
        replace(pod_view("c", ready=False), created=NOW - 121),
        replace(pod_view("d"), deleting=True),
    )
    supply = supply_of(pods, 60.0, NOW)
    assert (supply.ready, supply.pending, supply.overdue) == (1, 1, 1)


def test_cold_start_is_measured() -> None:
    """The first measurement replaces the assumption, later ones weigh 30%, none is believed above 30 min."""

    def started(took_s: float, at: float) -> PodView:
        return PodView(f"p{at}", "u", at - took_s, True, at)

    cold = measured_cold_start(ColdStart(), (started(80, NOW),))
    assert cold.seconds == 80
    assert measured_cold_start(cold, (started(80, NOW),)) == cold
    cold = measured_cold_start(cold, (started(180, NOW + 10),))
    assert cold.seconds == pytest.approx(110)
    assert measured_cold_start(ColdStart(), (started(1e9, NOW),)).seconds == 1800


def test_the_emptiest_goes_first() -> None:
    """Not ready before ready, then the least running, then the youngest."""
    pods = (
        pod_view("busy"),
        pod_view("idle"),
        pod_view("idle-young", age_s=100),
        pod_view("pending", ready=False),
    )
    running = [("busy", 30.0), ("idle", 1.0), ("idle-young", 1.0)]
    assert emptiest(pods, running, 3) == ("pending", "idle-young", "idle")
    assert emptiest(pods, running, 0) == ()


def _over_time(
    seen: ReplicaView, memory: ReplicasMemory, seconds: int, now: float
) -> tuple[list[Decision[int]], ReplicasMemory, float]:
    made = []
    for _ in range(seconds // 5):
        decision, memory = decide_replicas(seen, memory, now)
        made.append(decision)
        now += 5.0
    return made, memory, now


def test_what_was_seen_while_prometheus_was_missed_lowers_nothing_when_it_is_back() -> None:
    """The delay begins anew: a recommendation of those minutes rests on another kind of evidence."""
    delay = replace(SETTINGS, scale_down_delay_s=60.0)
    lost = view(settings=delay, prometheus_lost=True, signals=signals(source=Source.DIRECT))
    back = view(settings=delay)
    made, memory, now = _over_time(lost, ReplicasMemory(), 300, NOW)
    assert {decision.value for decision in made} == {4}
    made, _, _ = _over_time(back, memory, 120, now)
    first = next(place for place, decision in enumerate(made) if decision.value < 4)
    assert 60 <= first * 5 <= 75


def test_what_was_too_little_is_not_tried_again_at_the_same_load() -> None:
    """Whatever the model says: 2 replicas that served 8 requests/s while others waited do not carry 10."""
    delay = replace(SETTINGS, scale_down_delay_s=60.0)
    waits = view(
        settings=delay,
        replicas=2,
        ready=2,
        wait_broken=True,
        batch_at_limit=True,
        signals=signals(rates=Counters(arrivals_standard=10, wait_count_standard=8)),
    )
    decision, memory = decide_replicas(waits, OBSERVED, NOW)
    assert decision.value > 2
    calm = view(
        settings=delay,
        replicas=3,
        ready=3,
        signals=signals(rates=Counters(arrivals_standard=10, wait_count_standard=10)),
    )
    made, after, now = _over_time(calm, memory, 1200, NOW + 5)
    assert {decision.value for decision in made} == {3}
    assert made[-1].reason == "ScaleDownBlocked"
    assert all(figure in made[-1].detail for figure in ("2 replicas", "8.0 requests/s", "10.0"))
    less = view(
        settings=delay,
        replicas=3,
        ready=3,
        signals=signals(rates=Counters(arrivals_standard=5, wait_count_standard=5)),
    )
    made, _, _ = _over_time(less, after, 120, now)
    first = next(place for place, decision in enumerate(made) if decision.value < 3)
    assert 60 <= first * 5 <= 75, "with less load it goes when the delay has passed since then"
    made, _, _ = _over_time(calm, after, 1200, now)
    assert made[-1].value == 2, "and after half an hour it may be tried again"

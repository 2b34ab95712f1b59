"""Scale-down: one step at a time, and only on complete and fresh data."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from fleetkeeper.autoscale.rules.scale_down import (
    RELEASED,
    UNCHECKED,
    ReplicasMemory,
    Surge,
    kept_for_surge,
)
from fleetkeeper.autoscale.signals.samples import Counters, Gauges, Source
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import Decision, Grade
from fleetkeeper.common.activation import Activation, State
from tests.support.autoscale.control_cases import NOW
from tests.support.autoscale.replica_cases import (
    BROKEN,
    OBSERVED,
    SETTINGS,
    WAITS,
    View,
    decided,
    signals,
    view,
)


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


@pytest.mark.parametrize(
    "pin",
    [
        Activation(State.SUSPENDED, 0),
        Activation(State.RESUMING, 4),
        Activation(State.PINNED, 4),
    ],
    ids=["suspended", "resumed", "spec.replicas"],
)
def test_the_delay_begins_anew_after_a_time_without_a_decision(pin: Activation) -> None:
    """Without it, a service that was suspended for an hour would lose its replicas at once."""
    pinned = view(settings=replace(SETTINGS, activation=pin))
    _, memory = pinned.decide(OBSERVED, NOW)
    after, memory = view().decide(memory, NOW + 5)
    assert (after.value, after.reason) == (4, "ScaleDownDelay")
    later = NOW + 5 + SETTINGS.scale_down_delay_s
    assert view().decide(memory, later)[0].reason == "LoadFell"


OBJECTIONS = [
    ("stale", {"signals": Signals()}),
    ("ageing", {"signals": signals(grade=Grade.AGEING)}),
    ("not all report", {"signals": signals(coverage=0.75, reporting_pods=3)}),
    ("direct source not watched", {"signals": signals(source=Source.DIRECT)}),
    ("a scrape is overdue", {"signals": signals(overdue_pods=1)}),
    ("breaker", {"breakers_closed": False}),
    ("pending", {"ready": 3, "pending": 1}),
    ("overdue", {"ready": 3, "overdue": 1}),
    ("fewer ready than replicas", {"ready": 3}),
    ("hung", {"hung": 1}),
    ("queue", {"signals": signals(queue_wait_s=0.13)}),
    ("n-1 would be too full", {"signals": signals(gauges=Gauges(running=0.86 * 3 * 32))}),
    ("n-1 would fill the cache", {"signals": signals(kv_ratio=0.61)}),
    ("capacity not known", {"capacity": 0.0}),
    ("need not known", {"needed": None}),
    ("more is needed", {"needed": 4}),
    ("floor of the breaker", {"floor": 4}),
]


@pytest.mark.parametrize(("case", "change"), OBJECTIONS, ids=[row[0] for row in OBJECTIONS])
def test_no_way_down_when(case: str, change: dict[str, object]) -> None:
    """Each objection alone keeps the number."""
    assert decided(view(**change)).value == 4


def test_a_few_waiting_requests_keep_no_replica() -> None:
    """They are scheduled in the next step: queue wait is at a quarter of its objective."""
    assert decided(view(signals=signals(waiting=3.0, queue_wait_s=0.125))).value == 3


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
    direct = view(**{"signals": signals(source=Source.DIRECT), **change})
    memory = replace(OBSERVED, direct_since=NOW - since_s)
    assert (decided(direct, memory).value == 3) is goes


def test_one_gap_in_direct_readings_starts_their_time_anew() -> None:
    """A pod that was silent for one tick, or a Prometheus that was missed for one."""
    whole = view(signals=signals(source=Source.DIRECT))
    for gap in (
        view(signals=signals(source=Source.DIRECT, coverage=0.75)),
        view(signals=Signals()),
        view(signals=signals(source=Source.DIRECT), prometheus_lost=True),
    ):
        memory = replace(OBSERVED, direct_since=NOW - 9999)
        _, memory = gap.decide(memory, NOW)
        assert memory.direct_since is None
        _, memory = whole.decide(memory, NOW + 5)
        assert memory.direct_since == NOW + 5
        assert whole.decide(memory, NOW + 300)[0].value == 4


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


@pytest.mark.promise("calm-fewer-replicas")
def test_idle_goes_to_the_minimum_one_by_one() -> None:
    """And not below."""
    idle = signals(rates=Counters(), gauges=Gauges())
    memory, now, count, seen = ReplicasMemory(), NOW, 4, []
    for _ in range(400):
        inputs = view(
            signals=replace(idle, ready_pods=count, reporting_pods=count),
            replicas=count,
            ready=count,
            needed=0,
        )
        decision, memory = inputs.decide(memory, now)
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
        _, memory = view(signals=Signals()).decide(memory, now)
        now += 5
    waited = 0.0
    while view().decide(memory, now)[0].value == 4:
        _, memory = view().decide(memory, now)
        now += 5
        waited += 5
        assert waited < 2000
    assert waited >= 540


def _over_time(
    seen: View, memory: ReplicasMemory, seconds: int, now: float
) -> tuple[list[Decision[int]], ReplicasMemory, float]:
    made = []
    for _ in range(seconds // 5):
        decision, memory = seen.decide(memory, now)
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


DELAY = replace(SETTINGS, scale_down_delay_s=60.0)

WAITED = {**BROKEN, "needed": 6, "wait_lasts": True, "signals": WAITS}
"""Four replicas, six are needed, and requests have waited too long for a minute."""


def _four(**changes: object) -> View:
    return view(settings=DELAY, **changes)


def test_the_replicas_of_a_surge_are_kept_for_four_delays() -> None:
    """Bursts return, and a replica takes minutes to start."""
    decision, memory = _four(**WAITED).decide(OBSERVED, NOW)
    assert decision.value == 6
    assert memory.surge == Surge(6, NOW)
    full = signals(ready_pods=6, reporting_pods=6)
    calm = _four(replicas=6, ready=6, signals=full)
    made, after, _ = _over_time(calm, memory, 235, NOW + 5)
    assert {each.value for each in made} == {6}
    assert (made[-1].reason, made[-1].detail) == (
        "ScaleDownBlocked",
        "requests waited too long within 4 minutes",
    )
    assert calm.decide(after, NOW + 240)[0].value == 5


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"wait_lasts": False}, id="the queue is short"),
        pytest.param({"signals": Signals()}, id="nothing is known"),
    ],
)
def test_only_a_lasting_wait_is_a_surge(change: dict[str, object]) -> None:
    """A load that grows without much harm keeps no replica beyond the usual delay."""
    memory = _four(**{**WAITED, **change}).decide(OBSERVED, NOW)[1]
    assert memory.surge is None


def test_a_surge_that_goes_on_is_kept_for_longer() -> None:
    """The four delays begin when fewer replicas are needed. A smaller surge does not lower the number."""
    memory = replace(OBSERVED, surge=Surge(6, NOW))
    same = _four(needed=6, replicas=6, ready=6)
    assert same.decide(memory, NOW + 200)[1].surge == Surge(6, NOW + 200)
    smaller = _four(**{**WAITED, "needed": 4})
    assert smaller.decide(memory, NOW + 200)[1].surge == Surge(6, NOW + 200)
    assert smaller.decide(memory, NOW + 240)[1].surge == Surge(5, NOW + 240)


def test_a_scale_down_that_was_taken_back_is_not_repeated_soon() -> None:
    """One replica went, and the load needs it again: it stays for four delays."""
    lowered = replace(OBSERVED, lowered=NOW - 100)
    decision, memory = _four(needed=5).decide(lowered, NOW)
    assert decision.value == 5
    assert memory.surge == Surge(5, NOW)
    long_ago = replace(OBSERVED, lowered=NOW - 240)
    assert _four(needed=5).decide(long_ago, NOW)[1].surge is None
    blocked = _four(needed=5, scale_up_blocked="no replica is ready")
    assert blocked.decide(lowered, NOW)[1].surge is None


def test_a_surge_keeps_no_more_than_the_maximum() -> None:
    """A lower maximum holds, whatever was needed."""
    memory = replace(OBSERVED, surge=Surge(6, NOW))
    small = replace(DELAY, max_replicas=3)
    assert decided(view(settings=small), memory).value == 3


@pytest.mark.parametrize(
    ("change", "starting"),
    [
        ({"ready": 3}, "1 pod is starting"),
        ({"ready": 2, "pending": 1, "overdue": 1}, "2 pods are starting"),
    ],
)
def test_the_number_of_pods_that_start_is_never_zero(change: dict[str, int], starting: str) -> None:
    """A replica without a pod yet counts as starting."""
    assert decided(view(**change)).detail == starting


KEPT = replace(OBSERVED, surge=Surge(4, NOW - 900))
"""Four replicas are kept for the next surge, for 25 more minutes."""


def test_a_kept_replica_goes_one_at_a_time_once_another_service_needs_it() -> None:
    """The surge holds it otherwise."""
    assert decided(view(), KEPT).value == 4
    decision, memory = view(releases=True).decide(KEPT, NOW)
    assert (decision.valid, decision.value, decision.reason) == (True, 3, RELEASED)
    assert (memory.released, memory.lowered) == (NOW, NOW)
    assert decided(view(releases=True), replace(KEPT, lowered=NOW - 59)).value == 4
    assert decided(view(), replace(OBSERVED, surge=None)).reason == "LoadFell"


@pytest.mark.parametrize(("case", "change"), OBJECTIONS, ids=[row[0] for row in OBJECTIONS])
def test_no_kept_replica_goes_when(case: str, change: dict[str, object]) -> None:
    """Another service's need lifts none of the checks."""
    assert decided(view(**change, releases=True), KEPT).value == 4


def test_a_kept_replica_goes_only_after_direct_reads() -> None:
    """Prometheus alone takes nothing away."""
    seen = view(releases=True, checks_directly=True)
    decision = decided(seen, KEPT)
    assert (decision.value, decision.detail) == (4, UNCHECKED)
    assert decided(seen, replace(KEPT, direct_since=NOW - 59)).value == 4
    direct = view(releases=True, checks_directly=True, signals=signals(is_direct=True))
    assert decided(direct, replace(KEPT, direct_since=NOW - 60)).value == 3


def test_what_is_kept_is_what_only_the_surge_holds() -> None:
    """Two of four are needed."""

    def kept(seen: View, memory: ReplicasMemory = KEPT) -> int:
        return kept_for_surge(seen.inputs, seen.gates, memory, NOW)

    assert kept(view()) == 2
    assert kept(view(needed=3), view(needed=3).decide(KEPT, NOW)[1]) == 1
    assert kept(view(), OBSERVED) == 0
    assert kept(view(), replace(KEPT, since=NOW - 599)) == 0
    assert kept(view(signals=signals(queue_wait_s=0.13))) == 0
    assert kept(view(breakers_closed=False)) == 0


def test_a_pod_that_misses_a_scrape_counts_as_full_and_restarts_no_delay() -> None:
    """In a large fleet there is always one: it must not keep replicas that no request needs."""
    silent = signals(coverage=0.75, reporting_pods=3)
    decision, memory = view(needed=1, signals=silent).decide(OBSERVED, NOW)
    assert not decision.valid
    assert [count for _, count in memory.recommendations] == [2, 2]
    assert decided(view(needed=1), memory).value == 3

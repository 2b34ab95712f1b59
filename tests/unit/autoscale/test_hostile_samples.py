"""Hostile numbers, resets and old samples never become signals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.autoscale.signals.observe import observe_service
from fleetkeeper.autoscale.signals.pod_history import PodTrack, accept, grade_of
from fleetkeeper.autoscale.signals.samples import (
    Counters,
    Gauges,
    PodSample,
    why_impossible,
)
from fleetkeeper.autoscale.signals.service_signals import SignalsMemory
from fleetkeeper.autoscale.types import Grade
from tests.support.autoscale.control_cases import NOW, Loop, pod_view, sample
from tests.support.lanes import examples

HOSTILE = [
    ("nan counter", {"steps": math.nan}, {}),
    ("infinite counter", {"steps": math.inf}, {}),
    ("negative counter", {"generation_tokens": -1.0}, {}),
    ("huge counter", {"arrivals_standard": 1e308}, {}),
    ("nan gauge", {}, {"running": math.nan}),
    ("infinite gauge", {}, {"waiting_standard": math.inf}),
    ("negative gauge", {}, {"oldest_wait_s_batch": -0.5}),
    ("minus infinity", {}, {"kv_resident_tokens": -math.inf}),
    ("kv above capacity", {}, {"kv_capacity_tokens": 100.0, "kv_resident_tokens": 106.0}),
    ("nan memory", {}, {"memory_used_ratio": math.nan}),
]


@pytest.mark.parametrize(("case", "counters", "gauges"), HOSTILE, ids=[row[0] for row in HOSTILE])
def test_hostile_numbers_are_rejected(
    case: str, counters: dict[str, float], gauges: dict[str, float]
) -> None:
    """A sample with one impossible value changes nothing but the count of refusals."""
    good = sample(NOW)
    later = sample(NOW + 5)
    bad = replace(
        later,
        counters=later.counters._replace(**counters),
        gauges=later.gauges._replace(**gauges),
    )
    track = accept(accept(PodTrack("chat-0"), good, 0.0, NOW), bad, 0.0, NOW + 5)
    assert track.newest is good
    assert track.rejected == 1


@pytest.mark.parametrize("field", Counters._fields)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_no_counter_may_be_hostile(field: str, value: float) -> None:
    """Every counter is checked."""
    row = sample(NOW)
    assert why_impossible(replace(row, counters=row.counters._replace(**{field: value})), 1.0, None)


@pytest.mark.parametrize("field", Gauges._fields)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_no_gauge_may_be_hostile(field: str, value: float) -> None:
    """Every gauge is checked."""
    row = sample(NOW)
    assert why_impossible(replace(row, gauges=row.gauges._replace(**{field: value})), 1.0, None)


def test_kv_slightly_above_capacity_is_rounding() -> None:
    """Up to 5% above capacity is believed."""
    row = sample(NOW)
    gauges = row.gauges._replace(kv_capacity_tokens=100.0, kv_resident_tokens=105.0)
    assert not why_impossible(replace(row, gauges=gauges), 1.0, None)


def test_steps_ten_times_longer_than_the_slowest_are_rejected() -> None:
    """A paused clock is not a slow engine."""
    before, after = sample(NOW), sample(NOW + 5, batch_time_sum_s=1.0)
    slow = replace(
        after,
        counters=after.counters._replace(
            batch_time_sum_s=before.counters.batch_time_sum_s + 125 * 0.5
        ),
    )
    assert why_impossible(slow, 10 * 0.04, before)
    assert not why_impossible(after, 10 * 0.04, before)


def test_three_rejections_in_a_row_make_a_pod_stale() -> None:
    """Two are bridged by the peers' median; the third makes it silent."""
    track = accept(PodTrack("chat-0"), sample(NOW), 0.0, NOW)
    for count in (1, 2, 3):
        bad = replace(sample(NOW + count), gauges=Gauges(running=math.nan))
        track = accept(track, bad, 0.0, NOW + count)
        assert track.rejected == count
    assert grade_of(track, NOW + 3) is Grade.STALE
    assert grade_of(accept(track, sample(NOW + 4), 0.0, NOW + 4), NOW + 4) is Grade.FRESH


def test_a_rejected_pod_counts_as_its_peers_median() -> None:
    """With one of three pods garbled the sums are three times the median of the others."""
    loop = Loop(replicas=3)
    loop.steady(4)
    rows = loop.samples()
    rows[1] = replace(rows[1], gauges=rows[1].gauges._replace(running=math.nan))
    signals = loop.tick(rows).signals
    assert signals.gauges.running == pytest.approx(60.0)
    tracks = loop.memory.signals.tracks
    assert [name for name, track in tracks.items() if track.rejected] == ["chat-1"]


@pytest.mark.parametrize("ahead_s", [6.0, 60.0, 1e9, math.inf, math.nan])
def test_samples_from_the_future_are_rejected(ahead_s: float) -> None:
    """A few seconds are clock skew, more is garbage."""
    track = accept(PodTrack("chat-0"), sample(NOW), 0.0, NOW)
    later = replace(sample(NOW + 5), time=NOW + ahead_s)
    assert accept(track, later, 0.0, NOW).newest is track.newest


@pytest.mark.parametrize("back_s", [0.0, 0.1, 5.0, 100.0])
def test_repeated_and_older_samples_change_nothing(back_s: float) -> None:
    """Duplicates, and the slower of two sources."""
    track = accept(PodTrack("chat-0"), sample(NOW), 0.0, NOW)
    assert accept(track, sample(NOW - back_s), 0.0, NOW) is track


@pytest.mark.parametrize(
    "field", [name for name in Counters._fields if "realtime" not in name and name[-5:] != "batch"]
)
def test_any_counter_going_back_is_a_reset(field: str) -> None:
    """An engine that restarted is left out for 60 s."""
    before, after = sample(NOW), sample(NOW + 5)
    lower = max(0.0, getattr(before.counters, field) - 1.0)
    reset = replace(after, counters=after.counters._replace(**{field: lower}))
    track = accept(accept(PodTrack("chat-0"), before, 0.0, NOW), reset, 0.0, NOW + 5)
    if getattr(before.counters, field) > 0:
        assert track.out_until == NOW + 65.0
        assert len(track.history) == 1


def test_a_pod_is_left_out_for_a_minute_after_a_reset() -> None:
    """Its service is not known from it alone, and known again afterwards."""
    loop = Loop(replicas=1)
    loop.steady(4)
    reset_at = loop.now
    grades = []
    for _ in range(16):
        decision = loop.tick([sample(loop.now, origin=reset_at - 1.0)])
        grades.append((loop.now - 5 - reset_at, decision.signals.grade))
    assert all(grade is Grade.STALE for since, grade in grades if since < 60)
    assert grades[-1][1] is Grade.FRESH


numbers = st.floats(allow_nan=True, allow_infinity=True)


@pytest.mark.promise("bounded-numbers")
@given(st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=1, max_size=12))
@examples(300)
def test_no_sequence_of_samples_gives_a_hostile_signal(rows: list[tuple[float, ...]]) -> None:
    """For any samples, every signal is a finite number that is not negative."""
    views = (pod_view("chat-0"), pod_view("chat-1"))
    memory = SignalsMemory()
    for i, (time, counter, gauge, other) in enumerate(rows):
        now = NOW + 5 * i
        good = sample(now, "chat-1")
        bad = PodSample(
            "chat-0",
            now + (time if abs(time) < 30 else 0.0),
            Counters(steps=counter, arrivals_standard=other, batch_time_count=counter),
            Gauges(
                running=gauge,
                waiting_standard=other,
                kv_capacity_tokens=gauge,
                kv_resident_tokens=other,
            ),
        )
        signals, memory = observe_service([good, bad], views, memory, now)
        values = [
            *signals.rates,
            *signals.gauges,
            signals.queue_wait_s,
            signals.batch_time_s,
            signals.kv_ratio,
            signals.coverage,
            signals.prompt_tokens,
        ]
        assert all(math.isfinite(value) and value >= 0 for value in values)

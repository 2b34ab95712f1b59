"""Raw samples become signals: grades, rates, hostile numbers, resets, windows, silence."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.autoscale.constants import AGEING_S, FRESH_S, WINDOW_S
from fleetkeeper.autoscale.signals.histogram_edges import Edges, snap_down
from fleetkeeper.autoscale.signals.pod_history import PodTrack, accept, grade_of
from fleetkeeper.autoscale.signals.samples import (
    Counters,
    Gauges,
    PodSample,
    Source,
    why_impossible,
)
from fleetkeeper.autoscale.signals.series_map import sample_of
from fleetkeeper.autoscale.signals.service_signals import Signals, SignalsMemory, observe_service
from fleetkeeper.autoscale.types import ControlSettings, Grade
from fleetkeeper_contract.histogram_buckets import BATCH_TIME_EDGES_S, QUEUE_WAIT_EDGES_S
from fleetkeeper_contract.step_terms import StepSums
from tests.support.control_cases import NOW, Loop, pod_view, sample
from tests.support.engine_metrics import metrics_series
from tests.support.lanes import examples

ROOT = Path(__file__).parents[3]


def observed(times: list[float], pods: int = 1, now: float | None = None) -> Signals:
    """Signals after samples of `pods` pods at `times`, seen at the last of them or at `now`."""
    views = tuple(pod_view(f"chat-{i}") for i in range(pods))
    memory, signals = SignalsMemory(), Signals()
    for time in times:
        rows = [sample(time, view.name) for view in views]
        signals, memory = observe_service(rows, views, memory, time)
    if now is not None:
        signals, memory = observe_service([], views, memory, now)
    return signals


@pytest.mark.parametrize(
    ("age_s", "grade"),
    [
        (0.0, Grade.FRESH),
        (FRESH_S, Grade.FRESH),
        (FRESH_S + 0.1, Grade.AGEING),
        (30.0, Grade.AGEING),
        (AGEING_S, Grade.AGEING),
        (AGEING_S + 0.1, Grade.STALE),
        (3600.0, Grade.STALE),
    ],
)
def test_grade_follows_age(age_s: float, grade: Grade) -> None:
    """FRESH up to 15 s, AGEING up to 60 s, then STALE."""
    track = accept(PodTrack("chat-0"), sample(NOW), 0.0, NOW)
    assert grade_of(track, NOW + age_s) is grade


def test_rates_come_from_successive_samples() -> None:
    """Rates over 30 s: 4 requests/s, 25 steps/s of 40 ms."""
    signals = observed([NOW + 5 * i for i in range(8)])
    assert signals.grade is Grade.FRESH
    assert signals.arrivals_per_s == pytest.approx(4.0)
    assert signals.served_per_s == pytest.approx(4.0)
    assert signals.batch_time_s == pytest.approx(0.04)
    assert signals.rates.steps == pytest.approx(25.0)


def test_one_sample_is_not_a_rate() -> None:
    """A single scrape says nothing about pace: the service is not known yet."""
    assert observed([NOW]).grade is Grade.STALE


@pytest.mark.parametrize("pods", [1, 2, 3, 7])
def test_sums_grow_with_pods(pods: int) -> None:
    """Rates and running are summed, oldest waits are means."""
    signals = observed([NOW + 5 * i for i in range(4)], pods=pods)
    assert signals.arrivals_per_s == pytest.approx(4.0 * pods)
    assert signals.gauges.running == pytest.approx(20.0 * pods)
    assert signals.coverage == 1.0


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
    assert track.rejection


@pytest.mark.parametrize("field", Counters._fields)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_no_counter_may_be_hostile(field: str, value: float) -> None:
    """Every counter is checked."""
    held = sample(NOW)
    assert why_impossible(
        replace(held, counters=held.counters._replace(**{field: value})), 1.0, None
    )


@pytest.mark.parametrize("field", Gauges._fields)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_no_gauge_may_be_hostile(field: str, value: float) -> None:
    """Every gauge is checked."""
    held = sample(NOW)
    assert why_impossible(replace(held, gauges=held.gauges._replace(**{field: value})), 1.0, None)


def test_kv_slightly_above_capacity_is_rounding() -> None:
    """Up to 5% above capacity is believed."""
    held = sample(NOW)
    gauges = held.gauges._replace(kv_capacity_tokens=100.0, kv_resident_tokens=105.0)
    assert not why_impossible(replace(held, gauges=gauges), 1.0, None)


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
    assert dict(signals.rejections).keys() == {"chat-1"}


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


@pytest.mark.parametrize("age_s", [0.0, 30.0, 59.0])
def test_young_pods_are_not_used(age_s: float) -> None:
    """A pod's first minute tells nothing about its pace."""
    views = (pod_view("chat-0", age_s=age_s, now=NOW), pod_view("chat-1"))
    memory, signals = SignalsMemory(), Signals()
    for i in range(-3, 1):
        rows = [sample(NOW + 5 * i, view.name) for view in views]
        signals, memory = observe_service(rows, views, memory, NOW + 0.001 * i)
    assert signals.reporting_pods == 1
    assert signals.coverage == 0.5


def test_pods_that_are_gone_or_not_ready_are_not_used() -> None:
    """Samples join with the pods that live: a ghost counts for nothing."""
    views = (
        pod_view("chat-0"),
        pod_view("chat-1", ready=False),
        replace(pod_view("chat-2"), deleting=True),
    )
    memory, signals = SignalsMemory(), Signals()
    for i in range(4):
        rows = [sample(NOW + 5 * i, name) for name in ("chat-0", "chat-1", "chat-2", "ghost")]
        signals, memory = observe_service(rows, views, memory, NOW + 5 * i)
    assert signals.reporting_pods == 1
    assert signals.arrivals_per_s == pytest.approx(4.0)
    assert set(memory.tracks) == {"chat-0"}


@pytest.mark.parametrize("silent", range(7))
def test_half_of_the_pods_must_report(silent: int) -> None:
    """For every k of 6 silent pods: known exactly when at least half report."""
    views = tuple(pod_view(f"chat-{i}") for i in range(6))
    memory, signals = SignalsMemory(), Signals()
    for i in range(4):
        rows = [sample(NOW + 5 * i, view.name) for view in views[silent:]]
        signals, memory = observe_service(rows, views, memory, NOW + 5 * i)
    assert signals.known is (6 - silent >= 3)
    assert signals.coverage == pytest.approx((6 - silent) / 6)


@pytest.mark.parametrize("paused", [False, True])
def test_an_engine_that_says_it_hangs_is_left_out_and_replaced(paused: bool) -> None:
    """Its pod is named, left out of the means, counted as seen, and replaced unless the service is paused."""
    loop = Loop(replicas=2, settings=replace(ControlSettings(), paused=paused))
    gauges = Gauges(waiting_standard=3.0, running=5.0, limit_sequences=32.0, hung=1.0)
    decision, replaced = None, list[str]()
    for _ in range(14):
        stuck = PodSample("chat-1", loop.now, Counters(steps=41.0), gauges)
        decision = loop.tick([sample(loop.now), stuck])
        replaced += decision.replace_pods
    assert decision is not None
    assert decision.signals.hung_pods == ("chat-1",)
    assert decision.signals.known
    assert replaced == ([] if paused else ["chat-1"])


def test_idle_is_known_not_missing() -> None:
    """0/0 with flat counters, pods up and nothing waiting is idle, never NaN."""
    loop = Loop(replicas=2)
    flat = dict.fromkeys(
        (
            "wait_count_standard",
            "wait_sum_s_standard",
            "wait_within_standard",
            "arrivals_standard",
            "arrivals_squared",
            "batch_time_count",
            "batch_time_sum_s",
            "batch_time_within",
            "steps",
            "schedule_calls",
            "prompt_tokens",
            "generation_tokens",
        ),
        0.0,
    )
    decision = loop.tick()
    for _ in range(8):
        decision = loop.tick(loop.samples(gauges=Gauges(kv_capacity_tokens=1e5), **flat))
    assert decision.signals.idle
    assert decision.signals.grade is Grade.FRESH
    assert decision.signals.batch_time_s == 0.0
    assert decision.signals.queue_wait_s == 0.0


def test_windows_are_disjoint_and_ten_seconds() -> None:
    """Each begins where the last one ended."""
    loop = Loop(replicas=2)
    loop.steady(14)
    windows = loop.memory.signals.windows
    assert len(windows) == 6
    for before, after in itertools.pairwise(windows):
        assert after.start >= before.end - 1e-6
        assert after.end - after.start == pytest.approx(WINDOW_S)


@pytest.mark.parametrize(
    ("requests_per_s", "steps_per_s", "wait_judged", "batch_judged"),
    [
        (4.0, 25.0, True, True),
        (1.9, 25.0, False, True),
        (2.0, 9.9, True, False),
        (0.5, 5.0, False, False),
    ],
)
def test_windows_need_20_requests_or_100_steps(
    requests_per_s: float, steps_per_s: float, wait_judged: bool, batch_judged: bool
) -> None:
    """Less is not judged."""
    loop = Loop(replicas=1)
    loop.steady(
        6,
        wait_count_standard=requests_per_s,
        wait_within_standard=requests_per_s,
        batch_time_count=steps_per_s,
        batch_time_within=steps_per_s,
    )
    window = loop.memory.signals.windows[-1]
    assert (window.wait_attainment is not None) is wait_judged
    assert (window.batch_attainment is not None) is batch_judged


def test_each_class_of_steps_is_summed_though_a_scrape_brings_one_of_them() -> None:
    """Decode and prefill sums come in turn, a class a tick: every window holds ten seconds of both."""
    views, memory, windows = (pod_view("chat-0"),), SignalsMemory(), []
    for tick in range(13):
        now = NOW + 5 * tick
        sums = StepSums(steps=100.0 * tick, seconds=4.0 * tick)
        row = sample(now)
        row = replace(row, decode=sums) if tick % 2 else replace(row, prefill=sums)
        signals, memory = observe_service([row], views, memory, now)
        windows += [signals.window] if signals.window is not None else []
    assert len(windows) >= 5
    for window in windows[1:]:
        assert (window.decode.steps, window.prefill.steps) == (200.0, 200.0)


def test_batch_tier_is_judged_only_when_alone() -> None:
    """A batch request that waits for minutes, as it may, does not break the objective of others."""
    loop = Loop(replicas=1)
    gauges = Gauges(running=20, oldest_wait_s_batch=300.0, waiting_batch=50.0, limit_sequences=32)
    for _ in range(5):
        mixed = loop.tick(loop.samples(gauges=gauges))
    assert mixed.signals.queue_wait_s < 0.5
    assert mixed.signals.waiting == 0.0
    alone = Loop(replicas=1)
    for _ in range(5):
        decision = alone.tick(
            alone.samples(
                gauges=gauges,
                wait_count_standard=0,
                wait_sum_s_standard=0,
                wait_within_standard=0,
                arrivals_standard=0,
                arrivals_batch=2,
                wait_count_batch=2,
            )
        )
    assert decision.signals.queue_wait_s == 300.0
    assert decision.signals.waiting == 50.0


def test_missing_metrics_are_named_and_their_pod_not_used() -> None:
    """A renamed metric blinds nobody silently."""
    loop = Loop(replicas=1)
    for _ in range(4):
        rows = [replace(row, missing=("fleetkeeper_steps_total",)) for row in loop.samples()]
        decision = loop.tick(rows)
    assert decision.signals.missing == ("fleetkeeper_steps_total",)
    assert not decision.signals.known


def test_source_is_direct_when_any_sample_is() -> None:
    """So that nothing is lowered on the fallback source."""
    loop = Loop(replicas=2)
    loop.steady(3)
    rows = loop.samples()
    rows[0] = replace(rows[0], source=Source.DIRECT)
    assert loop.tick(rows).signals.source is Source.DIRECT


@pytest.mark.parametrize("objective_s", [0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 10.0, 60.0])
def test_objectives_are_snapped_down_to_an_edge(objective_s: float) -> None:
    """Stricter by at most one bucket (1.25x), never laxer."""
    edge = snap_down(objective_s, QUEUE_WAIT_EDGES_S)
    assert edge <= objective_s * (1 + 1e-6)
    assert objective_s <= edge * 1.26


def test_an_objective_below_the_first_edge_is_judged_at_it() -> None:
    """There is no finer bucket."""
    assert snap_down(0.0001, BATCH_TIME_EDGES_S) == BATCH_TIME_EDGES_S[0]


def test_edges_equal_the_engines_contract() -> None:
    """The engine's table and ours are one."""
    table = json.loads((ROOT / "engine_image/contract/metrics.json").read_text())
    edges = {row["name"]: tuple(row["edges"]) for row in table["metrics"] if "edges" in row}
    assert edges["fleetkeeper_queue_wait_seconds"] == QUEUE_WAIT_EDGES_S
    assert edges["fleetkeeper_batch_time_seconds"] == BATCH_TIME_EDGES_S


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=1, max_size=12))
@examples(300)
def test_no_sequence_of_samples_gives_a_hostile_signal(rows: list[tuple[float, ...]]) -> None:
    """Whatever a pod says, every signal is a finite number that is not negative."""
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
        told = [
            *signals.rates,
            *signals.gauges,
            signals.queue_wait_s,
            signals.batch_time_s,
            signals.kv_ratio,
            signals.burstiness,
            signals.coverage,
            signals.prompt_tokens,
        ]
        assert all(math.isfinite(value) and value >= 0 for value in told)


BEFORE = Edges(queue_wait_s=0.5, batch_time_s=0.05)


@pytest.mark.parametrize(
    ("after", "within"),
    [
        (Edges(0.5, 0.02), 5.0),
        (Edges(0.01, 0.05), 25.0),
        (Edges(60.0, 10.0), 25.0),
    ],
)
def test_another_objective_is_no_reset_and_attainment_is_counted_anew(
    after: Edges, within: float
) -> None:
    """Fewer (or more) of the same requests and steps are within: signals stay known, older windows go."""
    loop = Loop()

    def rows(edges: Edges, **per_second: float) -> list[PodSample]:
        return [replace(row, edges=edges) for row in loop.samples(None, **per_second)]

    for _ in range(12):
        held = loop.tick(rows(BEFORE, batch_time_within=10.0, wait_within_standard=2.0)).signals
    assert len(held.windows) >= 4
    rates = held.rates.steps
    changed = loop.tick(rows(after, batch_time_within=within, wait_within_standard=4.0)).signals
    assert changed.rejudged
    assert changed.grade is Grade.FRESH
    assert changed.rates.steps == pytest.approx(rates)
    assert all(value >= 0.0 for value in changed.rates)
    for _ in range(6):
        signals = loop.tick(rows(after, batch_time_within=within, wait_within_standard=4.0)).signals
        assert signals.known
        assert not signals.rejudged
        for window in signals.windows:
            assert window.batch_attainment == pytest.approx(within / 25.0)
    assert 2 <= len(signals.windows) <= 4
    assert not loop.memory.control.lost


def test_a_pod_read_at_another_edge_is_no_reset() -> None:
    """Through the reader that both sources share: the narrower bucket holds less, and nothing is left out."""
    narrow = Edges(BEFORE.queue_wait_s / 2, BEFORE.batch_time_s / 2)
    track = PodTrack("chat-0")
    for time, edges in ((NOW, BEFORE), (NOW + 5, BEFORE), (NOW + 10, narrow), (NOW + 15, narrow)):
        series = metrics_series(sample(time), BEFORE)
        read = sample_of("chat-0", time, series, edges, Source.PROMETHEUS)
        assert read.edges == edges
        track = accept(track, read, 0.0, time)
    assert track.out_until == 0.0
    assert len(track.history) == 4


def test_a_reset_is_still_seen_when_the_objective_changes_with_it() -> None:
    """All counters begin again at 0: the pod is left out for its minute."""
    loop = Loop(replicas=1)
    for _ in range(12):
        loop.tick([replace(row, edges=BEFORE) for row in loop.samples()])
    anew = sample(loop.now, origin=loop.now - 5.0)
    assert not loop.tick([replace(anew, edges=Edges(0.5, 0.02))]).signals.known


def test_garbage_under_another_objective_leaves_no_trace() -> None:
    """A refused sample is not what later ones are compared with."""
    loop = Loop(replicas=1)
    for _ in range(12):
        loop.tick([replace(row, edges=BEFORE) for row in loop.samples()])
    before = loop.memory.signals.tracks["chat-0"].history
    bad = replace(loop.samples()[0], edges=Edges(0.5, 0.02), counters=Counters(steps=math.nan))
    loop.tick([bad])
    assert loop.memory.signals.tracks["chat-0"].history == before
    assert loop.tick([replace(row, edges=BEFORE) for row in loop.samples()]).signals.known

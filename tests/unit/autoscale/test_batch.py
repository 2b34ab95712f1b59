"""Batch limits: each rule by its table, and what always holds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.api.types import BatchingMode
from fleetkeeper.autoscale.capacity.targets import Targets
from fleetkeeper.autoscale.rules.batch.decide import decide_limits, direction
from fleetkeeper.autoscale.rules.batch.raises import step_up_possible
from fleetkeeper.autoscale.rules.batch.values import BatchMemory, BatchView, first_limits, start_up
from fleetkeeper.autoscale.rules.canary import Canary, concluded, judge_canary, needs_canary
from fleetkeeper.autoscale.rules.objectives import (
    has_room,
    high_mark,
    is_slow,
    low_mark,
    wait_is_broken,
)
from fleetkeeper.autoscale.signals.samples import Counters, Gauges
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.signals.windows import PodWindow, Window
from fleetkeeper.autoscale.types import ControlSettings, Grade, Limits
from tests.support.control_cases import NOW
from tests.support.lanes import examples

HELD = Limits(64, 2048)
SETTINGS = ControlSettings()
MEMORY = BatchMemory(limits=HELD, changed=NOW - 300)


def window(
    attained: float = 0.999, *, ago_s: float = 10.0, steps: float = 400.0, waited: float = 1.0
) -> Window:
    """A judged window that ended `ago_s` ago."""
    return Window(
        NOW - ago_s - 10,
        NOW - ago_s,
        requests=40,
        waited_within=40 * waited,
        steps=steps,
        steps_within=steps * attained,
        seconds=steps * 0.03,
    )


def windows(*attained: float) -> tuple[Window, ...]:
    """Windows in a row, the last one just closed."""
    count = len(attained)
    return tuple(window(a, ago_s=10.0 * (count - 1 - i)) for i, a in enumerate(attained))


def signals(**changes: object) -> Signals:
    """Two busy pods, 60 of 64 sequences used, all well."""
    base = Signals(
        Grade.FRESH,
        1.0,
        2,
        2,
        rates=Counters(
            wait_count_standard=8, arrivals_standard=8, prompt_tokens=4000, batch_time_count=60
        ),
        gauges=Gauges(running=120.0),
        queue_wait_s=0.05,
        batch_time_s=0.03,
        kv_ratio=0.4,
        kv_ratio_max=0.4,
        windows=windows(0.98, 0.98, 0.98, 0.98),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def decided(view: BatchView, memory: BatchMemory = MEMORY) -> tuple[Limits, str]:
    """Limits and reason."""
    decision, _ = decide_limits(view, memory, NOW)
    return decision.value, decision.reason


@pytest.mark.parametrize(
    ("percent", "low", "high"),
    [
        (95, 0.97, 0.995),
        (90, 0.92, 0.945),
        (99, 0.999, 0.999),
        (50, 0.52, 0.545),
        (97, 0.99, 0.999),
    ],
)
def test_marks_lie_above_the_objective(percent: int, low: float, high: float) -> None:
    """2 and 4.5 points above it, capped at 99.9%."""
    held = ControlSettings(attainment_ratio=percent / 100)
    assert low_mark(held) == pytest.approx(low)
    assert high_mark(held) == pytest.approx(high)


@pytest.mark.parametrize(
    ("attained", "slow"),
    [
        ((0.96,), False),
        ((0.96, 0.96), True),
        ((0.96, 0.99), False),
        ((0.96, 0.99, 0.96), True),
        ((0.96, 0.96, 0.99), True),
        ((0.96, 0.99, 0.99), False),
        ((0.99, 0.96, 0.96, 0.99, 0.99), False),
        ((0.97, 0.97, 0.97), False),
        ((0.0, 0.0, 0.0), True),
        ((), False),
    ],
)
def test_slow_is_two_of_three_windows(attained: tuple[float, ...], slow: bool) -> None:
    """One bad window is noise."""
    assert is_slow(windows(*attained), SETTINGS) is slow


@pytest.mark.parametrize(
    ("attained", "room"),
    [
        ((0.999,) * 3, False),
        ((0.999,) * 4, True),
        ((0.999, 0.999, 0.994, 0.999), False),
        ((0.9, 0.999, 0.999, 0.999, 0.999), True),
        ((0.995,) * 4, True),
    ],
)
def test_room_is_four_windows(attained: tuple[float, ...], room: bool) -> None:
    """All of the last four."""
    assert has_room(windows(*attained), SETTINGS) is room


@pytest.mark.parametrize(
    ("wait_s", "waited", "broken"),
    [
        (0.4, 1.0, False),
        (0.51, 1.0, True),
        (0.4, 0.94, True),
        (0.4, 0.95, False),
        (10.0, 0.0, True),
    ],
)
def test_queue_wait_is_broken_by_wait_or_attainment(
    wait_s: float, waited: float, broken: bool
) -> None:
    """The oldest wait speaks when nothing is scheduled and the histogram is silent."""
    held = signals(queue_wait_s=wait_s, windows=(window(waited=waited),))
    assert wait_is_broken(held, SETTINGS) is broken


@pytest.mark.parametrize(
    ("low", "high", "low_tokens", "high_tokens", "want"),
    [
        (4, 256, 256, 8192, Limits(32, 1024)),
        (1, 1, 64, 64, Limits(1, 64)),
        (8, 8, 256, 256, Limits(8, 256)),
        (1, 1024, 256, 2048, Limits(32, 512)),
        (16, 64, 512, 512, Limits(32, 512)),
    ],
)
def test_the_loop_begins_at_the_geometric_middle(
    low: int, high: int, low_tokens: int, high_tokens: int, want: Limits
) -> None:
    """Of floor and ceiling, tokens on a notch."""
    held = ControlSettings(
        min_sequences=low, max_sequences=high, min_tokens=low_tokens, max_tokens=high_tokens
    )
    assert first_limits(held) == want


def test_batch_time_above_objective_lowers_tokens_first() -> None:
    """One notch at once."""
    view = BatchView(signals(windows=windows(0.9, 0.9, 0.9)), SETTINGS)
    assert decided(view) == (Limits(64, 1536), "BatchTimeAboveTarget")


def test_then_sequences_where_no_prefill_is_left() -> None:
    """20% without a model, 10% with one, of what runs."""
    slow = signals(windows=windows(0.9, 0.9, 0.9))
    memory = replace(MEMORY, limits=Limits(64, 256))
    assert decided(BatchView(slow, SETTINGS), memory)[0] == Limits(48, 256)
    targets = Targets(None, 60, 64, 5.0)
    followed = replace(memory, followed=Limits(64, 256))
    assert decided(BatchView(slow, SETTINGS, targets), followed)[0] == Limits(54, 256)


@pytest.mark.parametrize(("since_s", "moves"), [(5.0, False), (9.9, False), (30.0, True)])
def test_down_at_most_every_ten_seconds(since_s: float, moves: bool) -> None:
    """And windows that straddle the last change are not judged."""
    slow = signals(windows=windows(0.5, 0.5))
    limits, _ = decided(BatchView(slow, SETTINGS), replace(MEMORY, changed=NOW - since_s))
    assert (limits != HELD) is moves


ROOM = {"queue_wait_s": 0.8, "batch_time_s": 0.045, "windows": windows(0.999, 0.999, 0.999, 0.999)}


def test_room_and_waiting_requests_give_one_notch_more() -> None:
    """10% more sequences where the limit is what holds requests back."""
    assert decided(BatchView(signals(**ROOM), SETTINGS)) == (Limits(70, 2048), "BatchTimeHeadroom")


def test_tokens_grow_where_sequences_are_not_the_limit() -> None:
    """40 of 64 sequences run, requests wait: prefill is what they wait for."""
    held = signals(**ROOM, gauges=Gauges(running=80.0))
    assert decided(BatchView(held, SETTINGS)) == (Limits(64, 3072), "BatchTimeHeadroom")


@pytest.mark.parametrize(
    ("case", "change", "memory"),
    [
        ("nobody waits", {"signals": signals(**{**ROOM, "queue_wait_s": 0.1})}, MEMORY),
        ("the control breaker is open", {"may_raise": False}, MEMORY),
        ("requests are refused for overload", {"gated": True}, MEMORY),
        (
            "less than half is used",
            {"signals": signals(**ROOM, gauges=Gauges(running=60.0))},
            MEMORY,
        ),
        ("changed 29 s ago", {}, replace(MEMORY, changed=NOW - 29)),
        ("a canary failed lately", {}, replace(MEMORY, rest_until=NOW + 1)),
        (
            "only three windows",
            {"signals": signals(**{**ROOM, "windows": windows(1, 1, 1)})},
            MEMORY,
        ),
        (
            "one window has no room",
            {"signals": signals(**{**ROOM, "windows": windows(1, 1, 0.99, 1)})},
            MEMORY,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_limits_are_not_raised_when(
    case: str, change: dict[str, object], memory: BatchMemory
) -> None:
    """Never up in these cases."""
    view = replace(BatchView(signals(**ROOM), SETTINGS), **change)  # type: ignore[arg-type]
    assert decided(view, memory)[0] == HELD


@pytest.mark.parametrize("pending", [1, 4])
def test_limits_rise_while_replicas_are_on_their_way(pending: int) -> None:
    """A cold start takes minutes: room in batch time is used meanwhile, within the same bounds."""
    view = BatchView(signals(**ROOM), SETTINGS, pending=pending)
    assert (
        decided(view)
        == decided(replace(view, pending=0))
        == (Limits(70, 2048), "BatchTimeHeadroom")
    )
    assert step_up_possible(view, MEMORY)


def test_short_steps_and_a_full_batch_grow_by_a_quarter() -> None:
    """W high, B low, KV low, R near M: the batch is too small; replicas wait two ticks."""
    view = BatchView(signals(queue_wait_s=0.8, batch_time_s=0.02), SETTINGS)
    decision, memory = decide_limits(view, MEMORY, NOW)
    assert decision.value == Limits(80, 2048)
    assert memory.replicas_wait_ticks == 3


def test_a_batch_that_is_simply_too_small_grows_while_requests_are_refused() -> None:
    """The load breaker opens before the objective breaks: it must not keep up the cause of it."""
    view = BatchView(signals(queue_wait_s=0.8, batch_time_s=0.02), SETTINGS, gated=True)
    assert decided(view) == (Limits(80, 2048), "BatchTimeHeadroom")
    assert decided(replace(view, may_raise=False))[0] == HELD
    assert not step_up_possible(view, MEMORY), "replicas are asked for all the same"


@pytest.mark.parametrize("kv", [0.86, 0.93])
def test_a_full_cache_is_not_widened(kv: float) -> None:
    """W high, B low, KV high: M down only if preempting or about to."""
    held = signals(queue_wait_s=0.8, batch_time_s=0.02, kv_ratio_max=kv)
    limits, _ = decided(BatchView(held, SETTINGS))
    assert limits.sequences == (64 if kv < 0.92 else 48)


@pytest.mark.parametrize(
    ("preemptions", "kv", "pending", "want"),
    [
        (0.3, 0.5, 0, 48),
        (0.1, 0.5, 0, 64),
        (0.0, 0.93, 0, 48),
        (0.0, 0.92, 0, 64),
        (0.3, 0.5, 1, 60),
    ],
)
def test_preemptions_and_a_full_cache_cut_to_eight_tenths_of_what_runs(
    preemptions: float, kv: float, pending: int, want: int
) -> None:
    """At once; while replicas are pending not below what runs."""
    rates = Counters(preemptions=2 * preemptions, prompt_tokens=1.0)
    view = BatchView(signals(rates=rates, kv_ratio_max=kv), SETTINGS, pending=pending)
    assert decided(view)[0].sequences == want


def test_a_cut_is_taken_back_by_five_percent_in_thirty_seconds() -> None:
    """Until the value before the cut is reached."""
    held = signals(kv_ratio_max=0.7)
    memory = BatchMemory(limits=Limits(40, 2048), changed=NOW - 60, before_cut=64)
    now, seen = NOW, [40]
    for _ in range(400):
        decision, memory = decide_limits(BatchView(held, SETTINGS), memory, now)
        if decision.value.sequences != seen[-1]:
            seen.append(decision.value.sequences)
        now += 5
    assert seen[-1] == 64
    assert all(b - a <= max(1, 0.05 * a + 0.5) for a, b in itertools.pairwise(seen))
    assert memory.before_cut is None


def test_memory_above_the_cap_tightens() -> None:
    """0.8 of what runs, not more often than every 30 s."""
    view = BatchView(signals(memory_used_ratio=0.83), SETTINGS)
    decision, memory = decide_limits(view, MEMORY, NOW)
    assert decision.reason == "MemoryAboveCap"
    assert decision.value.sequences == 48
    assert decide_limits(view, memory, NOW + 5)[0].value.sequences == 48


def test_the_model_is_followed_at_once_when_first_known() -> None:
    """We began at a guess."""
    view = BatchView(signals(), SETTINGS, Targets(4096, 100, 110, 5.0))
    limits, reason = decided(view, replace(MEMORY, changed=NOW - 5))
    assert (limits, reason) == (Limits(110, 4096), "FollowsStepTimeModel")


@pytest.mark.parametrize(
    ("before", "after", "want"), [(100, 105, 64), (100, 91, 64), (100, 80, 51), (100, 120, 77)]
)
def test_the_model_is_followed_by_as_much_as_it_moved(before: int, after: int, want: int) -> None:
    """Trim is kept; moves below a tenth are not followed."""
    memory = replace(MEMORY, followed=Limits(before, 2048))
    view = BatchView(signals(), SETTINGS, Targets(2048, after, after, 5.0))
    assert decided(view, memory)[0].sequences == want


def test_a_frozen_model_is_not_followed() -> None:
    """After a refit that jumped, tuning waits."""
    view = BatchView(signals(), SETTINGS, Targets(4096, 100, 110, 5.0), model_frozen=True)
    assert decided(view)[0] == HELD


def test_one_move_with_the_model_leaves_half_of_the_sequences() -> None:
    """A model that learned from a crowded minute asks for the floor: it costs a half, and the rest is kept."""
    view = BatchView(signals(), SETTINGS, Targets(2048, 4, 4, 5.0))
    for followed in (None, Limits(64, 2048)):
        decision, memory = decide_limits(view, replace(MEMORY, followed=followed), NOW)
        assert (decision.value, decision.reason) == (Limits(32, 2048), "FollowsStepTimeModel")
        assert decide_limits(view, memory, NOW + 25)[0].value.sequences == 32
        assert decide_limits(view, memory, NOW + 30)[0].value.sequences == 16
        better = replace(view, targets=Targets(2048, 64, 64, 5.0))
        assert decide_limits(better, memory, NOW + 30)[0].value.sequences == 64


def test_the_model_may_lower_the_first_guess_at_once() -> None:
    """The loop began ten seconds ago, at the middle of floor and ceiling."""
    began = BatchMemory(limits=HELD, changed=NOW - 10)
    view = BatchView(signals(), SETTINGS, Targets(2048, 40, 40, 5.0))
    assert decided(view, began) == (Limits(40, 2048), "FollowsStepTimeModel")


def test_tokens_follow_the_model_while_sequences_wait() -> None:
    """Half a minute for sequences after a cut; tokens have no such wait, or the trim would come first."""
    memory = replace(MEMORY, changed=NOW - 12, followed=Limits(64, 2048))
    view = BatchView(signals(), SETTINGS, Targets(1024, 32, 32, 5.0))
    assert decided(view, memory)[0] == Limits(64, 1024)


@pytest.mark.parametrize(
    ("batch_time_s", "queue_wait_s", "moves"),
    [(0.03, 2.0, True), (0.036, 2.0, False), (0.03, 0.1, False)],
)
def test_the_model_is_followed_up_while_requests_are_refused_for_want_of_places(
    batch_time_s: float, queue_wait_s: float, moves: bool
) -> None:
    """An open load breaker keeps limits from rising, unless a wider batch is what would close it."""
    memory = replace(MEMORY, limits=Limits(8, 2048), followed=Limits(8, 2048))
    busy = signals(
        gauges=Gauges(running=16.0), batch_time_s=batch_time_s, queue_wait_s=queue_wait_s
    )
    view = BatchView(busy, SETTINGS, Targets(2048, 64, 64, 5.0), gated=True)
    limits, reason = decided(view, memory)
    assert (limits.sequences > 8) is moves
    assert (limits.sequences, reason) == (64, "FollowsStepTimeModel") or not moves


def test_fixed_keeps_start_up_values() -> None:
    """Nothing is tuned."""
    fixed = ControlSettings(batching_mode=BatchingMode.FIXED)
    assert decided(BatchView(signals(), fixed)) == (start_up(fixed), "Fixed")


def test_stale_signals_hold() -> None:
    """A hold is not a decision to change, and keeps what is in force."""
    decision, memory = decide_limits(BatchView(Signals(), SETTINGS), MEMORY, NOW)
    assert not decision.valid
    assert decision.value == HELD
    assert memory.limits == HELD


@pytest.mark.parametrize(
    ("attained", "limits", "may_raise", "possible"),
    [
        (0.999, HELD, True, True),
        (0.99, HELD, True, False),
        (0.999, Limits(256, 8192), True, False),
        (0.999, Limits(256, 2048), True, True),
        (0.999, HELD, False, False),
    ],
)
def test_batch_at_its_limit_means_no_step_up(
    attained: float, limits: Limits, may_raise: bool, possible: bool
) -> None:
    """Attainment below 99.5%, or both at their ceilings."""
    view = BatchView(signals(windows=windows(*[attained] * 4)), SETTINGS, may_raise=may_raise)
    assert step_up_possible(view, replace(MEMORY, limits=limits)) is possible


ratios = st.floats(0, 1)


@given(
    st.lists(
        st.tuples(
            ratios,
            st.floats(0, 5),
            st.floats(0, 0.3),
            ratios,
            st.floats(0, 600),
            st.integers(0, 3),
            st.booleans(),
            st.floats(0, 2),
        ),
        min_size=5,
        max_size=60,
    ),
    st.integers(1, 64),
    st.integers(64, 1024),
)
@examples(150)
def test_limits_never_leave_their_bounds(rows: list[tuple], low: int, high: int) -> None:  # type: ignore[type-arg]
    """Whatever is measured: within [floor, start-up], at most one change in 10 s down, 30 s up."""
    bounds = ControlSettings(min_sequences=low, max_sequences=high, min_tokens=256, max_tokens=4096)
    memory, now, held = BatchMemory(), NOW, None
    changes: list[tuple[float, int]] = []
    for attained, wait_s, step_s, kv, running, pending, may_raise, preemptions in rows:
        now += 5.0
        judged = tuple(
            replace(window(attained), start=now - 10 * (4 - i) - 10, end=now - 10 * (4 - i))
            for i in range(4)
        )
        seen = signals(
            windows=judged,
            queue_wait_s=wait_s,
            batch_time_s=step_s,
            kv_ratio_max=kv,
            gauges=Gauges(running=running),
            rates=Counters(preemptions=preemptions, prompt_tokens=running),
        )
        view = BatchView(seen, bounds, pending=pending, may_raise=may_raise)
        decision, memory = decide_limits(view, memory, now)
        limits = decision.value
        assert low <= limits.sequences <= high
        assert 256 <= limits.tokens <= 4096
        if held is not None and limits != held:
            changes.append((now, direction(held, limits)))
            assert may_raise or changes[-1][1] < 0
        held = limits
    for (before, _), (after, turned) in itertools.pairwise(changes):
        assert after - before >= (30.0 if turned > 0 else 10.0)


@pytest.mark.parametrize(
    ("before", "after", "ready", "wanted"),
    [
        (HELD, Limits(70, 2048), 3, True),
        (HELD, Limits(70, 2048), 2, False),
        (HELD, Limits(60, 2048), 5, False),
        (HELD, Limits(64, 1536), 5, False),
        (None, HELD, 5, False),
        (HELD, HELD, 5, False),
    ],
)
def test_only_raises_of_three_pods_need_a_canary(
    before: Limits | None, after: Limits, ready: int, wanted: bool
) -> None:
    """Tightenings protect and go to all at once."""
    assert needs_canary(before, after, ready) is wanted


def canary_windows(own: float, others: float, count: int = 2, start: float = NOW) -> list[Window]:
    """Windows since the canary began."""
    rows = []
    for i in range(count):
        pods = (
            PodWindow("chat-0", 200, 200 * own),
            PodWindow("chat-1", 200, 200 * others),
            PodWindow("chat-2", 200, 200 * others),
        )
        rows.append(Window(start + 10 * i, start + 10 * i + 10, pods=pods))
    return rows


@pytest.mark.parametrize(
    ("own", "others", "good"),
    [
        (0.98, 0.98, True),
        (0.94, 0.98, True),
        (0.92, 0.98, False),
        (0.5, 0.5, True),
        (1.0, 0.2, True),
        (0.0, 0.98, False),
    ],
)
def test_a_canary_is_taken_back_when_it_falls_five_points_below(
    own: float, others: float, good: bool
) -> None:
    """Against the other pods, in the same windows."""
    verdict = judge_canary(Canary("chat-0", HELD, NOW), canary_windows(own, others), NOW + 20)
    assert verdict.valid
    assert verdict.value is good


def test_a_canary_is_not_judged_too_early_and_not_for_ever() -> None:
    """One window is too few; after 60 s without evidence it is taken back."""
    canary = Canary("chat-0", HELD, NOW)
    assert not judge_canary(canary, canary_windows(0.98, 0.98, 1), NOW + 10).valid
    assert not judge_canary(canary, canary_windows(0.98, 0.98, 2, NOW - 30), NOW + 10).valid
    late = judge_canary(canary, [], NOW + 60)
    assert late.valid
    assert late.value is False


def test_a_failed_canary_rests_for_five_minutes() -> None:
    """Nothing is raised meanwhile; a good one is given to all."""
    canary = Canary("chat-0", Limits(70, 2048), NOW)
    bad = judge_canary(canary, canary_windows(0.5, 0.98), NOW + 20)
    assert concluded(MEMORY, canary, bad, NOW + 20).rest_until == NOW + 320
    good = judge_canary(canary, canary_windows(0.98, 0.98), NOW + 20)
    assert concluded(MEMORY, canary, good, NOW + 20).limits == Limits(70, 2048)

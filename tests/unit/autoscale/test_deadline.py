"""Replicas for the deadline of a backlog: only if one would be missed, within every bound, and no longer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.api.conditions import ConditionType, Reason
from fleetkeeper.api.types import ScalingMode
from fleetkeeper.autoscale.arbitrate import want_of
from fleetkeeper.autoscale.capacity.demand import Demand
from fleetkeeper.autoscale.capacity.estimate import Estimate
from fleetkeeper.autoscale.capacity.supply import ColdStart, Supply
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.rules.deadline import BATCH_DEADLINE, DeadlineNeed, deadline_need
from fleetkeeper.autoscale.rules.scale_down import ReplicasMemory
from fleetkeeper.autoscale.signals.backlog import Backlog
from fleetkeeper.autoscale.signals.samples import Gauges
from fleetkeeper.autoscale.state import Breakers, TickState
from fleetkeeper.autoscale.types import ControlInputs, ControlSettings, Decision
from fleetkeeper.common.activation import Activation, State
from fleetkeeper_contract import rfc3339
from fleetkeeper_contract.tiers import Tier
from tests.support.autoscale.control_cases import NOW, Loop, condition, reported, reported_status
from tests.support.autoscale.replica_cases import BROKEN, SETTINGS, WAITS, decided, signals, view
from tests.support.lanes import examples

CARRIED_PER_S = 2.0
TOKENS = 500.0
"""A replica carries 2 requests/s of 500 tokens: 1,000 tokens/s."""


def need_of(
    required: float,
    *,
    tokens: float = 1e9,
    others_per_s: float = 0.0,
    floor: float = 0.05,
    ready: int = 2,
    cold_start_s: float = 180.0,
) -> DeadlineNeed:
    """What a backlog requires that needs so many tokens/s, in a fleet without a step-time model."""
    settings = ControlSettings(batch_floor_ratio=floor)
    inputs = ControlInputs("team-a", "chat", settings, replicas=ready, started=0.0)
    estimate = Estimate(
        cold_start=ColdStart(cold_start_s),
        demand=Demand(others_per_s, 60),
        supply=Supply(ready=ready),
        capacity=20.0,
    )
    seen = signals(prompt_tokens=400.0, generation_tokens=100.0)
    waits = Backlog(tokens, NOW + 3600, required, NOW)
    state = TickState(inputs, seen, seen, estimate, Breakers(), waits)
    need = deadline_need(state, CARRIED_PER_S, NOW)
    assert need is not None
    return need


@pytest.mark.parametrize(
    ("required", "others_per_s", "up", "down", "least"),
    [
        (0.0, 0.0, 0, 0, 0),
        (1.0, 0.0, 1, 1, 1),
        (880.0, 0.0, 1, 2, 1),  # times 1.25: 1.1 replicas, of which a tenth is rounded off
        (881.0, 0.0, 2, 2, 1),
        (1100.0, 0.0, 2, 2, 1),
        (1101.0, 0.0, 2, 2, 2),
        (880.0, 2.0, 2, 3, 2),  # one more than alone: the others take a whole replica
        (881.0, 2.0, 3, 3, 2),
    ],
)
def test_the_need_has_a_margin_and_leaves_the_others_their_demand(
    required: float, others_per_s: float, up: int, down: int, least: int
) -> None:
    need = need_of(required, others_per_s=others_per_s)
    assert (need.up, need.down, need.least) == (up, down, least)


def test_the_floor_of_the_tier_counts_even_if_the_others_take_everything() -> None:
    """One replica is full of other requests. A floor of 30% of it is 300 tokens/s."""
    assert need_of(200.0, others_per_s=2.0, floor=0.3).up == 1
    assert need_of(200.0, others_per_s=2.0, floor=0.0).up == 2


@pytest.mark.parametrize(("others_per_s", "given_per_s"), [(0.0, 2000.0), (3.0, 500.0), (4.0, 100.0), (40.0, 100.0)])  # fmt: skip
def test_what_replicas_give_is_what_the_others_leave_but_the_floor(
    others_per_s: float, given_per_s: float
) -> None:
    assert need_of(1.0, others_per_s=others_per_s).given_per_s == pytest.approx(given_per_s)


def test_a_deadline_nearer_than_a_cold_start_asks_for_no_more() -> None:
    """A replica that starts after it cannot help: at most the whole backlog in one cold start."""
    for rate in (1e4, 1e9, math.inf):
        assert need_of(rate, tokens=180_000.0).up == 2
    assert need_of(math.inf, tokens=0.0).up == 0


def test_nothing_is_required_if_it_is_not_known_what_a_replica_does() -> None:
    settings = ControlSettings()
    inputs = ControlInputs("team-a", "chat", settings, replicas=1, started=0.0)
    waits = Backlog(1e6, NOW + 60, 1e4, NOW)
    for seen, carried in ((signals(), 2.0), (signals(prompt_tokens=9.0), 0.0)):
        assert (
            deadline_need(
                TickState(inputs, seen, seen, Estimate(), Breakers(), waits), carried, NOW
            )
            is None
        )
    bare = signals(prompt_tokens=9.0)
    without = TickState(inputs, bare, bare, Estimate(), Breakers(), None)
    assert deadline_need(without, 2.0, NOW) is None


# -- the decision ----------------------------------------------------------------------------------------


def need(
    up: int, down: int | None = None, least: int | None = None, *, adds: bool = True
) -> DeadlineNeed:
    """What a backlog of 1.5 million tokens requires."""
    waits = Backlog(1.5e6, NOW + 3600, 100.0, NOW)
    return DeadlineNeed(
        waits, up, up if down is None else down, up if least is None else least, 0.0, adds
    )


DUE = rfc3339.format(NOW + 3600)


@pytest.mark.parametrize(
    ("case", "change", "want", "reason"),
    [
        ("in time", {"deadline": need(4)}, 4, "Steady"),
        ("late", {"deadline": need(5)}, 5, BATCH_DEADLINE),
        ("at most double in a minute", {"deadline": need(10)}, 8, BATCH_DEADLINE),
        ("never above max", {"deadline": need(99), "replicas": 9, "ready": 9}, 10, BATCH_DEADLINE),
        ("on the way", {"deadline": need(5), "replicas": 5, "pending": 1}, 5, "Steady"),
        ("hung engines give nothing", {"deadline": need(4), "hung": 1}, 4, "Steady"),
        ("overdue pods give nothing", {"deadline": need(5), "ready": 4, "overdue": 1, "replicas": 5}, 6, BATCH_DEADLINE),
        ("users need as many", {**BROKEN, "signals": WAITS, "deadline": need(6)}, 6, "QueueWaitAboveTarget"),
        ("users need fewer", {**BROKEN, "signals": WAITS, "deadline": need(7)}, 7, BATCH_DEADLINE),
        ("without a model", {"deadline": need(5), "is_trusted": False}, 5, BATCH_DEADLINE),
        ("the control breaker is open", {"deadline": need(6, adds=False)}, 4, "Steady"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_up(case: str, change: dict[str, Any], want: int, reason: str) -> None:
    """Each way up, and each reason not to. Four replicas are ready."""
    decision = decided(view(**{"needed": 4, **change}), ReplicasMemory())
    assert (decision.value, decision.reason) == (want, reason)


def test_the_message_names_the_tokens_the_deadline_and_the_replicas() -> None:
    decision = decided(view(deadline=need(5)))
    assert decision.detail == (
        f"batches of 1,500,000 tokens, the first due by {DUE}, need 5 replicas together with the "
        "other tiers"
    )


def test_the_message_says_that_all_replicas_are_not_enough() -> None:
    decision = decided(view(replicas=9, ready=9, deadline=need(13, least=11)))
    assert decision.value == 10
    assert decision.detail.endswith("need more than maxReplicas (10): a deadline will be missed")
    near = decided(view(replicas=9, ready=9, deadline=need(13, least=10)))
    assert "need 10 replicas" in near.detail, "only the margin is not available"


def test_up_is_blocked_while_the_newest_revision_cannot_start() -> None:
    decision = decided(view(deadline=need(9), scale_up_blocked="no replica of revision 3 is ready"))
    assert (decision.valid, decision.value, decision.reason) == (False, 4, "ScaleUpBlocked")


@pytest.mark.parametrize("pinned", [0, 3, 9])
def test_a_pin_or_a_suspension_wins(pinned: int) -> None:
    settings = replace(
        SETTINGS, activation=Activation(State.PINNED if pinned else State.SUSPENDED, pinned)
    )
    assert decided(view(settings=settings, deadline=need(7))).value == pinned


def test_a_replica_is_kept_while_the_backlog_needs_it_and_goes_after_the_delay() -> None:
    """Four are there, two would do for the others; the need falls to three, then to none."""
    memory, now, count = ReplicasMemory(), NOW, 4
    went: list[float] = []
    for tick in range(720):
        down = 4 if tick < 240 else 3 if tick < 480 else 0
        seen = view(replicas=count, ready=count, deadline=need(min(down, 2), down))
        decision, memory = seen.decide(memory, now)
        if decision.value < count:
            went.append((now - NOW) / 5)
        count, now = decision.value, now + 5
    assert count == 2
    assert len(went) == 2
    assert 240 + 120 <= went[0] <= 240 + 130
    assert 480 + 120 <= went[1] <= 480 + 130


def test_replicas_for_a_deadline_are_no_surge_but_a_reversal_is_kept() -> None:
    """A tier batch that is shed is no reason to keep them for four delays; a scale-down that was wrong is."""
    shed = view(deadline=need(6), breakers_closed=False)
    _, memory = shed.decide(ReplicasMemory(), NOW)
    assert memory.surge is None
    _, memory = shed.decide(ReplicasMemory(lowered=NOW - 900), NOW)
    assert memory.surge is not None
    assert memory.surge.replicas == 6


def test_replicas_for_a_deadline_are_as_urgent_as_batch() -> None:
    """Among services that compete for accelerators; the traffic of the others does not lend them rank."""
    seen = view(deadline=need(5))
    urgent = seen.need.signals.rates._replace(arrivals_realtime=9.0)
    crowded = replace(seen.need.signals, rates=urgent)

    def tier(replicas: Decision[int]) -> Tier:
        calm: dict[str, Any] = {"lacks_since": None, "kept": 0, "cold_start_s": 60.0}
        return want_of(seen.inputs, crowded, replicas, ReplicasMemory(), NOW, **calm).tier

    assert tier(decided(seen)) is Tier.BATCH
    assert tier(decided(view(needed=6))) is Tier.REALTIME


# -- a service, tick by tick -----------------------------------------------------------------------------

FULL = Gauges(
    running=20.0, limit_sequences=32.0, limit_tokens=1024.0, kv_capacity_tokens=400_000.0,
    kv_resident_tokens=100_000.0, memory_used_ratio=0.7, memory_peak_ratio=0.75,
)  # fmt: skip
BATCH_TOO: dict[str, Any] = {
    "arrivals_batch": 20.0, "wait_count_batch": 4.0, "wait_sum_s_batch": 40.0,
    "wait_within_batch": 0.0,
}  # fmt: skip


def driven(
    ticks: int,
    rate: float | None,
    settings: ControlSettings | None = None,
    *,
    due_s: float = 7200.0,
    **per_second: float,
) -> tuple[Loop, ControlDecision]:
    """Two pods with steady load; a backlog of 50 million tokens requires this rate (None: none known)."""
    loop = Loop(settings=settings or ControlSettings(min_replicas=1, max_replicas=8))
    for _ in range(ticks):
        waits = None if rate is None else Backlog(5e7, loop.now + due_s, rate, loop.now)
        decision = loop.tick(loop.samples(FULL, **per_second), backlog=waits)
    return loop, decision


def test_a_deadline_adds_replicas_and_the_status_says_why() -> None:
    """Reason and message as of other decisions, and the event is the planner's from the same words."""
    loop, decision = driven(66, 1e5)
    assert decision.replicas.reason == BATCH_DEADLINE
    report = reported(loop, decision)
    assert report.allocation is not None
    assert report.allocation.reason == BATCH_DEADLINE
    assert report.allocation.message.startswith("Batches of 50,000,000 tokens, the first due by ")
    scaling = reported_status(report.report)["scaling"]
    assert scaling["reason"] == BATCH_DEADLINE
    assert "50,000,000 tokens" in scaling["message"]


def test_a_far_deadline_waits_until_the_demand_of_the_others_is_known() -> None:
    """The first means after a start of the operator are chance, and would add a replica for nothing."""
    _, early = driven(20, 1e5)
    assert early.deadline is not None
    assert early.deadline.up > 2
    assert early.replicas.reason != BATCH_DEADLINE
    _, near = driven(20, 1e5, due_s=500.0)
    assert near.replicas.reason == BATCH_DEADLINE


@pytest.mark.parametrize("changes", [
    {"scaling_mode": ScalingMode.ADVISORY}, {"scaling_mode": ScalingMode.EXTERNAL},
    {"activation": Activation(State.PINNED, 2)}, {"activation": Activation(State.SUSPENDED, 0)},
    {"paused": True},
])  # fmt: skip
def test_modes_that_do_not_scale_allocate_nothing_for_a_deadline(changes: dict[str, Any]) -> None:
    loop, decision = driven(66, 1e5, ControlSettings(max_replicas=8, **changes))
    assert reported(loop, decision).allocation is None


def test_a_backlog_that_is_in_time_changes_nothing() -> None:
    """Requests of tier batch that wait and are refused add no replica: their deadline is far."""
    _, calm = driven(90, 1.0, **BATCH_TOO)
    assert calm.replicas.value == 2
    assert calm.replicas.reason != BATCH_DEADLINE
    assert calm.deadline is not None
    assert calm.deadline.up <= 2


def test_a_backlog_alone_adds_no_replica_for_its_own_queue() -> None:
    """Nobody waits for a token of it. Without the backlog, the same queue would."""
    alone: dict[str, Any] = {
        **BATCH_TOO,
        "arrivals_standard": 0.0, "wait_count_standard": 0.0, "wait_sum_s_standard": 0.0,
        "wait_within_standard": 0.0,
    }  # fmt: skip
    _, with_backlog = driven(90, 1.0, **alone)
    _, without = driven(90, None, **alone)
    assert with_backlog.replicas.value <= 2
    assert without.replicas.value > 2


def test_users_who_wait_get_replicas_once_the_backlog_was_shed_for_half_a_minute() -> None:
    """To shed it may be enough. Without a backlog, replicas come for the same wait before that."""
    wait: dict[str, Any] = {**BATCH_TOO, "wait_sum_s_standard": 16.0, "wait_within_standard": 0.0}
    queue = FULL._replace(waiting_standard=200)
    came: dict[float | None, int] = {}
    shed: dict[float | None, int] = {}
    for rate in (1.0, None):
        loop = Loop(settings=ControlSettings(min_replicas=2, max_replicas=8))
        for tick in range(60):
            waits = None if rate is None else Backlog(5e7, loop.now + 7200, rate, loop.now)
            decision = loop.tick(loop.samples(queue, **wait), backlog=waits)
            if not decision.breakers.load.batch.is_closed:
                shed.setdefault(rate, tick)
            if decision.replicas.value > 2:
                came.setdefault(rate, tick)
    assert came[1.0] - shed[1.0] == 6
    assert came[None] - shed[None] < 6


def test_even_all_replicas_are_not_enough_and_the_service_says_so() -> None:
    settings = ControlSettings(min_replicas=2, max_replicas=2)
    loop, decision = driven(90, 1e9, settings)
    report = reported(loop, decision)
    assert condition(report, ConditionType.SCALING_LIMITED)[:2] == ("True", Reason.AT_MAXIMUM)


def test_a_batch_tier_that_ends_adds_no_replica_behind_it() -> None:
    """Rates are means of 30 s: when the series end, requests of the backlog are still in them."""
    loop, _ = driven(90, 1.0, **BATCH_TOO)
    for _ in range(6):
        decision = loop.tick(loop.samples(FULL, **BATCH_TOO))
        assert decision.replicas.value == 2
    assert loop.memory.backlog is not None


BROKEN_READINGS = (
    Backlog(math.nan, NOW + 9e9, 1e9, NOW),
    Backlog(1e9, NOW + 9e9, -1e9, NOW),
    Backlog(1e9, NOW + 9e9, math.nan, NOW),
    Backlog(1e9, NOW + 9e9, 1e9, NOW - 61),
    Backlog(1e9, NOW + 9e9, 1e9, NOW + 9e9),
)


@pytest.mark.parametrize("reading", BROKEN_READINGS)
def test_broken_and_old_readings_decide_as_none(reading: Backlog) -> None:
    """Every decision and the memory are equal in all ticks."""
    broken, none = Loop(), Loop()
    for tick in range(120):
        load: dict[str, Any] = {
            "arrivals_standard": 4.0 + tick % 7,
            "wait_sum_s_standard": 0.04 * (tick % 50),
        }
        one = broken.tick(broken.samples(**load), backlog=reading)
        two = none.tick(none.samples(**load))
        assert replace(one, state=replace(one.state, inputs=two.state.inputs)) == two
        assert broken.memory == none.memory


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 40), st.booleans(), st.booleans(), st.integers(0, 3)),
        min_size=5, max_size=60,
    ),
    st.integers(1, 5),
    st.integers(5, 20),
)  # fmt: skip
@examples(100)
def test_the_bounds_hold_for_any_need(rows: list[Any], low: int, high: int) -> None:
    """Within [min, max]; a backlog never lowers what is recommended without it."""
    settings = ControlSettings(min_replicas=low, max_replicas=high, scale_down_delay_s=60.0)
    memory, now, count = ReplicasMemory(), NOW, low
    for up, others, broken, closed, pending in rows:
        seen = view(
            settings=settings, replicas=count, ready=max(0, count - pending), pending=pending,
            needed=others, waits=broken,
            breakers_closed=closed,
        )  # fmt: skip
        plain, _ = seen.decide(memory, now)
        decision, memory = replace(seen, need=replace(seen.need, deadline=need(up))).decide(
            memory, now
        )
        assert low <= decision.value <= high
        assert decision.value >= plain.value
        count, now = decision.value, now + 5


LOADS = st.floats(0.0, 1e6)


@given(
    LOADS,
    LOADS,
    st.floats(1.0, 1e6),
    st.floats(1.0, 1e6),
    st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 1.0)),
)
@examples(300)
def test_more_tokens_or_an_earlier_deadline_never_need_fewer(
    tokens: float, more: float, due_s: float, later_s: float, fleet: tuple[float, float]
) -> None:
    others, floor = fleet

    def needed(tokens: float, due_s: float) -> tuple[int, int, int]:
        found = need_of(tokens / due_s, tokens=tokens, others_per_s=others, floor=floor)
        return found.up, found.down, found.least

    base = needed(tokens, due_s)
    assert all(a <= b for a, b in zip(base, needed(tokens + more, due_s), strict=True))
    assert all(a <= b for a, b in zip(needed(tokens, due_s + later_s), base, strict=True))
    assert base[2] <= base[0] <= base[1]

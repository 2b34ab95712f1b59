"""Invariants of the simulated engine under random loads, and its closed forms against explicit sums."""

from __future__ import annotations

import math
from collections import Counter
from statistics import NormalDist
from typing import NamedTuple

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from fleetkeeper.autoscale.signals.samples import Counters
from fleetkeeper.simulate.counts import Counts, share_within
from fleetkeeper.simulate.engine import Engine, EngineSpec
from fleetkeeper.simulate.requests import Request
from fleetkeeper_contract.step_terms import StepSums
from fleetkeeper_steps.costs import StepCosts
from fleetkeeper_steps.running import BLOCK_TOKENS, steps_until
from tests.support.lanes import examples

pytestmark = pytest.mark.exhaustive

T = 1000.0
COSTS = StepCosts(0.003, 0.004, 2e-5, 5e-6, 4e-7, 1e-9, 1e-4)


class Action(NamedTuple):
    """A request after `gap_s`, with limits (sequences, tokens) that are set before it."""

    gap_s: float
    tier: int
    prompt: int
    generated: int
    draw: float
    limits: tuple[int, int] | None


ACTIONS = st.lists(
    st.builds(
        Action,
        st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.3, 4.0, 12.0]),
        st.sampled_from([0, 1, 1, 2]),
        st.sampled_from([0, 16, 60, 100, 700]),
        st.sampled_from([120, 60, 1, 300]),
        st.sampled_from([0.0, 0.5, 0.95]),
        st.sampled_from([None, None, None, (1, 1), (4, 200), (10, 2048)]),
    ),
    min_size=6,
    max_size=40,
)
SPECS = st.builds(
    EngineSpec,
    st.just(COSTS),
    kv_capacity_tokens=st.sampled_from([400.0, 800.0, 1600.0, 1e6]),
    max_sequences=st.sampled_from([12, 6, 1]),
    max_tokens=st.sampled_from([300, 2048]),
    queue_limits=st.sampled_from([None, (2, 3, 4)]),
    prefix_hit_ratio=st.sampled_from([0.0, 0.4, 1.0]),
)
TIGHT = EngineSpec(COSTS, kv_capacity_tokens=400.0)
TOGETHER = [Action(0.0, 1, 60, 120, 0.0, None)] * 6
"""Six prompts that fill 24 of 25 blocks: their outputs preempt one another."""
RESERVED = [Action(0.0, 0, 16, 1, 0.0, (2, 2048)), *[Action(0.0, 1, 16, 4000, 0.0, None)] * 6]
"""One sequence of two is kept for realtime for 10 s, while the other decodes: then another one starts."""


class Watched:
    """An engine whose invariants are checked after every call."""

    def __init__(self, spec: EngineSpec, admit: float) -> None:
        self.engine = Engine(spec, "engine", T)
        self.engine.admit = (1.0, admit, admit)
        self.taken: list[Request] = []
        self.refused: list[Request] = []
        self.ended: list[Request] = []
        self._running = 0
        self._counters = [0.0] * len(Counters._fields)

    def advance(self, until: float) -> None:
        """Run the steps that begin before `until`."""
        before = self.engine.time
        self.engine.advance(until)
        self.ended += self.engine.take_ended()
        assert self.engine.time >= before
        assert self.engine.is_idle or self.engine.time >= until
        self.check()

    def act(self, now: float, action: Action) -> None:
        """Set limits, and let a request arrive."""
        if action.limits is not None:
            self.engine.limit_sequences, self.engine.limit_tokens = action.limits
        request = Request(now, action.tier, action.prompt, action.generated)
        taken = self.engine.arrive(request, action.draw)
        (self.taken if taken else self.refused).append(request)
        self.check()

    def check(self) -> None:
        """Check what holds at any time."""
        engine, blocks = self.engine, self.engine.spec.blocks
        assert 0 <= engine.kv_tokens <= engine.blocks_used * BLOCK_TOKENS
        assert 0 <= engine.blocks_used <= blocks
        if engine.is_idle:
            assert (engine.blocks_used, engine.kv_tokens, engine.load) == (0, 0, 0)
        assert engine.running <= max(engine.limit_sequences, self._running)
        self._running = engine.running
        assert engine.waiting == sum(len(queue) for queue in engine.queues)
        waiting = {id(row) for queue in engine.queues for row in queue}
        ended = {id(row) for row in self.ended}
        assert len(self.ended) == len(ended), "a request ends once"
        assert not waiting & ended
        assert waiting | ended <= {id(row) for row in self.taken}
        assert len(self.taken) == len(ended) + engine.load
        counters = list(engine.counts.counters)
        assert all(a <= b for a, b in zip(self._counters, counters, strict=True))
        self._counters = counters


@given(SPECS, ACTIONS, st.sampled_from([0.3, 1.0]))
@example(TIGHT, TOGETHER, 1.0)
@examples(60)
def test_every_request_ends_once_within_blocks_and_limits(
    spec: EngineSpec, actions: list[Action], admit: float
) -> None:
    """Refused, inside, or ended with all tokens; time and counters never go back."""
    watched, now = Watched(spec, admit), T
    for action in actions:
        now += action.gap_s
        watched.advance(now)
        watched.act(now, action)
    inside = watched.engine.load
    watched.advance(now + 1e4)
    assert watched.engine.is_idle
    counters = Counters._make(watched.engine.counts.counters)
    event(f"preemptions: {counters.preemptions > 0}, refused: {len(watched.refused) > 0}")
    event(f"inside at the last arrival: {inside > 0}")
    assert {id(row) for row in watched.ended} == {id(row) for row in watched.taken}
    for request in watched.taken:
        assert request.arrived <= request.scheduled <= request.first_token <= request.ended
    for request in watched.refused:
        assert (request.scheduled, request.first_token, request.ended) == (-1.0, -1.0, -1.0)
    assert counters.generation_tokens == sum(row.generated for row in watched.taken)
    waited = Counter(row.tier for row in watched.taken)
    arrived = Counter(row.tier for row in (*watched.taken, *watched.refused))
    by_tier = (
        counters.wait_count_realtime,
        counters.wait_count_standard,
        counters.wait_count_batch,
    )
    assert by_tier == tuple(waited[tier] for tier in range(3))
    came = (counters.arrivals_realtime, counters.arrivals_standard, counters.arrivals_batch)
    assert came == tuple(arrived[tier] for tier in range(3))


@given(SPECS, ACTIONS, st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4))
@example(TIGHT, TOGETHER, [0.5])
@example(EngineSpec(COSTS), RESERVED, [0.5])
@examples(40)
def test_observing_an_engine_does_not_change_what_it_does(
    spec: EngineSpec, actions: list[Action], at: list[float]
) -> None:
    """An engine that is advanced in pieces, and sampled in between, runs the same steps."""
    one, two, now = Watched(spec, 1.0), Watched(spec, 1.0), T
    for action in actions:
        for share in sorted(at):
            two.advance(now + share * action.gap_s)
            two.engine.sample(now + share * action.gap_s)
        now += action.gap_s
        one.advance(now)
        two.advance(now)
        one.act(now, action)
        two.act(now, action)
    one.advance(now + 1e4)
    for number in range(200):
        two.advance(now + 0.1 * number)
    two.advance(now + 1e4)
    ends = [row.ended for row in two.taken]
    assert [row.ended for row in one.taken] == pytest.approx(ends, rel=0.0, abs=1e-6)
    first, second = (Counters._make(row.engine.counts.counters) for row in (one, two))
    assert first.steps == second.steps
    assert first.preemptions == second.preemptions
    assert first.generation_tokens == second.generation_tokens
    assert first.batch_time_sum_s == pytest.approx(second.batch_time_sum_s)
    for sums, others in zip(one.engine.counts.sums(), two.engine.counts.sums(), strict=True):
        assert sums == pytest.approx(others, rel=1e-9)


@given(st.floats(1e-4, 1.0), st.just(0.0) | st.floats(1e-12, 1.0), st.floats(1e-6, 1e4))
@examples(300)
def test_steps_until_is_the_least_number_that_fills_the_room(
    first_s: float, growth_ratio: float, room_s: float
) -> None:
    """n steps reach the end of the room, and n - 1 do not, up to a millionth of a step."""
    growth_s = growth_ratio * first_s
    steps = steps_until(first_s, growth_s, room_s)

    def takes_s(count: int) -> float:
        return count * first_s + growth_s * (count * (count - 1) // 2)

    slack_s = 1e-6 * (first_s + growth_s * steps)
    assert steps >= 1
    assert takes_s(steps) >= room_s - slack_s
    assert steps == 1 or takes_s(steps - 1) < room_s + slack_s


@given(st.floats(1e-4, 1.0), st.just(0.0) | st.floats(1e-12, 1.0), st.integers(1, 100_000))
@example(0.01, 1e-10, 1000)
@examples(300)
def test_a_whole_number_of_steps_fills_the_room(
    first_s: float, growth_ratio: float, steps: int
) -> None:
    """The room of n steps is filled by n steps, also if they grow by next to nothing."""
    growth_s = growth_ratio * first_s
    room_s = steps * first_s + growth_s * (steps * (steps - 1) // 2)
    assert steps_until(first_s, growth_s, room_s) == steps


@pytest.mark.parametrize(
    ("first_s", "growth_s", "room_s", "steps"),
    [
        (0.01, 0.0, 0.025, 3),
        (0.01, 0.0, 0.03, 3),
        (0.01, 0.0, 0.0, 1),
        (0.01, 0.0, -5.0, 1),
        (0.01, 0.001, 0.033, 3),
        (0.01, 0.001, 0.0331, 4),
    ],
)
def test_steps_until_in_known_cases(
    first_s: float, growth_s: float, room_s: float, steps: int
) -> None:
    """Steps of 10, 11, 12 ms take 33 ms. A step that began always runs."""
    assert steps_until(first_s, growth_s, room_s) == steps


RUNS = st.lists(
    st.tuples(
        st.integers(1, 60),
        st.integers(1, 40),
        st.integers(0, 5000),
        st.floats(1e-3, 0.2),
        st.floats(0.0, 1e-3),
    ),
    max_size=6,
)


@given(RUNS, st.lists(st.tuples(st.integers(1, 900), st.integers(1, 40), st.integers(0, 5000))))
@examples(80)
def test_counts_are_the_sums_over_single_steps(
    runs: list[tuple[int, int, int, float, float]], prefills: list[tuple[int, int, int]]
) -> None:
    """Closed forms for runs of decode steps; the noise adds its variance to the squared times."""
    noise = 0.08
    counts, decode, prefill = Counts(0.5, 0.05, noise), [], []
    for steps, sequences, kv, first_s, growth_s in runs:
        counts.decode_steps(steps, sequences, kv, first_s, growth_s)
        decode += [
            terms(0, sequences, kv + i * sequences, first_s + i * growth_s, noise)
            for i in range(steps)
        ]
    for tokens, sequences, kv in prefills:
        counts.prefill_step(tokens, sequences, kv, 0.03)
        prefill.append(terms(tokens, sequences, kv, 0.03, noise))
    found_decode, found_prefill = counts.sums()
    assert found_decode == pytest.approx(total(decode), rel=1e-9)
    assert found_prefill == pytest.approx(total(prefill), rel=1e-9)
    counters = Counters._make(counts.counters)
    assert counters.steps == counters.batch_time_count == len(decode) + len(prefill)
    assert counters.schedule_calls == counters.steps
    seconds = sum(row[4] for row in (*decode, *prefill))
    assert counters.batch_time_sum_s == pytest.approx(seconds, rel=1e-9)


def terms(tokens: int, sequences: int, kv: int, step_s: float, noise: float) -> tuple[float, ...]:
    """Return the products of one step, in the order of `StepSums`."""
    p, n, k, s = float(tokens), float(sequences), float(kv), step_s
    squared = s * s * (1 + noise * noise)
    return 1, p, n, k, s, p * p, p * n, p * k, p * s, n * n, n * k, n * s, k * k, k * s, squared


def total(rows: list[tuple[float, ...]]) -> StepSums:
    """Return the sums of columns."""
    columns = zip(*rows, strict=True)
    return StepSums._make([sum(column) for column in columns] or [0.0] * len(StepSums._fields))


@given(st.floats(1e-3, 1.0), st.floats(1e-3, 1.0), st.floats(0.01, 0.5))
@examples(60)
def test_share_within_is_that_of_a_lognormal_distribution(
    step_s: float, edge_s: float, sigma: float
) -> None:
    """With the step as the median; without spread it is all or nothing."""
    normal = NormalDist(math.log(step_s), sigma)
    assert share_within(step_s, edge_s, sigma) == pytest.approx(normal.cdf(math.log(edge_s)))
    assert share_within(step_s, edge_s, 0.0) == (1.0 if step_s <= edge_s else 0.0)


@given(st.lists(st.sampled_from([0.0, 0.1, 0.4, 1.0, 3.7]), min_size=1, max_size=60))
@examples(40)
def test_squared_arrivals_are_those_of_whole_seconds(gaps: list[float]) -> None:
    """The bin of the last arrival is open, and counts once a later second begins."""
    counts, now, bins = Counts(0.5, 0.05, 0.0), T, Counter[int]()
    for gap_s in gaps:
        now += gap_s
        counts.arrived(1, now)
        bins[math.floor(now)] += 1
    counters = Counters._make(counts.counters)
    assert counters.arrivals_standard == len(gaps)
    closed = [count for second, count in bins.items() if second != math.floor(now)]
    assert counters.arrivals_squared == sum(count * count for count in closed)

"""The closed form of the simulated engine against a naive one that computes every step."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from fleetkeeper.autoscale.signals.samples import Counters
from fleetkeeper.simulate.engine import Engine, EngineSpec
from fleetkeeper.simulate.requests import Request
from fleetkeeper_contract.step_terms import StepSums
from fleetkeeper_steps.costs import StepCosts
from tests.support.autoscale.naive_engine import NaiveEngine, Step
from tests.support.lanes import examples

COSTS = StepCosts(0.003, 0.004, 2e-5, 5e-6, 4e-7, 1e-9, 1e-4)


class Arrival(NamedTuple):
    """A request after `gap_s`, and the limits that are set before it."""

    gap_s: float
    tier: int
    prompt: int
    generated: int
    limits: tuple[int, int] | None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.sampled_from([0.0, 0.001, 0.01, 0.05, 0.3, 4.0]),
        st.sampled_from([1, 1, 0, 2]),
        st.integers(1, 700),
        st.integers(1, 120),
        st.none() | st.tuples(st.integers(1, 12), st.sampled_from([1, 64, 300, 1024])),
    ),
    min_size=1,
    max_size=25,
)
SPECS = st.builds(
    EngineSpec,
    costs=st.just(COSTS),
    kv_capacity_tokens=st.sampled_from([900.0, 1600.0, 3000.0, 100_000.0]),
    max_sequences=st.sampled_from([2, 8, 16]),
    max_tokens=st.sampled_from([300, 2048]),
    step_noise=st.just(0.0),
    queue_limits=st.sampled_from([None, (2, 3, 4)]),
    batch_ageing_s=st.sampled_from([0.02, 60.0]),
)


class Pair:
    """Both engines, given the same."""

    def __init__(self, spec: EngineSpec) -> None:
        self.engine = Engine(spec, "engine", 100.0)
        self.naive = NaiveEngine(spec, 100.0, spec.max_sequences, spec.max_tokens)
        self.requests: list[tuple[Request, Request]] = []
        self.ended: list[Request] = []

    def advance(self, until: float) -> None:
        """Advance both, and compare the blocks and tokens that they hold."""
        self.engine.advance(until)
        self.naive.advance(until)
        self.ended += self.engine.take_ended()
        engine, naive = self.engine, self.naive
        assert engine.time == pytest.approx(naive.time, rel=1e-9)
        assert engine.running == len(naive.running)
        assert [len(queue) for queue in engine.queues] == [len(queue) for queue in naive.waiting]
        assert engine.waiting == sum(len(queue) for queue in naive.waiting)
        assert engine.blocks_used == engine.spec.blocks - len(naive.free)
        assert 0 <= engine.blocks_used <= engine.spec.blocks
        assert engine.kv_tokens == sum(row.in_kv for row in naive.running)
        if engine.is_idle:
            assert (engine.blocks_used, engine.kv_tokens) == (0, 0)

    def arrive(self, now: float, arrival: Arrival) -> bool:
        """Give both a request of their own."""
        _, tier, prompt, generated, limits = arrival
        if limits is not None:
            self.engine.limit_sequences, self.engine.limit_tokens = limits
            self.naive.limit_sequences, self.naive.limit_tokens = limits
        one, two = (Request(now, tier, prompt, generated) for _ in range(2))
        taken = self.engine.arrive(one)
        assert taken == self.naive.arrive(two)
        if taken:
            self.requests.append((one, two))
        return taken


def played(spec: EngineSpec, arrivals: list[Arrival]) -> Pair:
    """Both engines after the load, when all requests have ended."""
    pair, now = Pair(spec), 100.0
    for arrival in arrivals:
        now += arrival.gap_s
        pair.advance(now)
        pair.arrive(now, arrival)
    pair.advance(now + 1000.0)
    assert pair.engine.is_idle
    return pair


@pytest.mark.exhaustive
@given(SPECS, ARRIVALS)
@examples(60)
def test_times_blocks_counters_and_sums_are_those_of_single_steps(
    spec: EngineSpec, arrivals: list[Arrival]
) -> None:
    """Every request ends once and at the same time; the exported sums are those of the steps."""
    pair = played(spec, arrivals)
    naive = pair.naive
    event(f"preemptions: {naive.preemptions > 0}")
    assert {id(row) for row in pair.ended} == {id(row) for row, _ in pair.requests}
    assert len(pair.ended) == len(pair.requests)
    for one, two in pair.requests:
        assert one.scheduled == pytest.approx(two.scheduled, rel=1e-9)
        assert one.first_token == pytest.approx(two.first_token, rel=1e-9)
        assert one.ended == pytest.approx(two.ended, rel=1e-9)
        assert one.arrived <= one.scheduled <= one.first_token <= one.ended
    counters = Counters._make(pair.engine.counts.counters)
    assert counters.preemptions == naive.preemptions
    assert counters.generation_tokens == naive.generated
    assert naive.generated == sum(row.generated for row, _ in pair.requests)
    assert counters.steps == counters.batch_time_count == len(naive.steps)
    assert counters.batch_time_sum_s == pytest.approx(sum(s.seconds for s in naive.steps), rel=1e-6)
    waits = counters.wait_sum_s_realtime + counters.wait_sum_s_standard + counters.wait_sum_s_batch
    assert waits == pytest.approx(sum(naive.waits), rel=1e-6, abs=1e-6)
    decode, prefill = pair.engine.counts.sums()
    assert decode == pytest.approx(sums([s for s in naive.steps if not s.has_prefill]), rel=1e-6)
    assert prefill == pytest.approx(sums([s for s in naive.steps if s.has_prefill]), rel=1e-6)


def sums(steps: list[Step]) -> StepSums:
    """The sums of products over single steps."""
    rows = []
    for step in steps:
        p, n, kv, s = float(step.prefill), float(step.sequences), float(step.kv), step.seconds
        left = (1.0, p, n, kv, s, p * p, p * n, p * kv, p * s, n * n)
        rows.append((*left, n * kv, n * s, kv * kv, kv * s, s * s))
    return StepSums._make([sum(column) for column in zip(*rows, strict=True)] or [0.0] * 15)


@given(SPECS, ARRIVALS)
@examples(30)
def test_steps_keep_to_the_limits(spec: EngineSpec, arrivals: list[Arrival]) -> None:
    """A step has at most max(limit, running + 256) tokens and the start-up maximum."""
    pair = played(spec, arrivals)
    highest = max([spec.max_tokens, *[a.limits[1] for a in arrivals if a.limits]])
    for step in pair.naive.steps:
        tokens = step.prefill + step.decoding
        assert tokens <= min(spec.max_tokens, max(highest, step.running + 256))

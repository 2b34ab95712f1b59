"""The simulated engine against known results: Erlang C, saturated throughput, steps worked by hand."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from statistics import fmean

import pytest

from fleetkeeper.autoscale.signals.samples import Counters
from fleetkeeper.simulate.engine import Engine, EngineSpec
from fleetkeeper.simulate.requests import Request
from fleetkeeper_steps.costs import StepCosts

pytestmark = pytest.mark.slow

T = 1000.0
STEP_S = 0.01
SERVICE_S = 2.0
CONSTANT = EngineSpec(
    StepCosts(STEP_S, 0.0, 0.0, 0.0, 0.0), kv_capacity_tokens=1e8, queue_limits=None
)
"""Every step takes 10 ms, whatever it computes."""


def erlang_c(servers: int, load: float) -> float:
    """Return the probability that an arrival waits in M/M/k; `load`: arrivals times service time."""
    terms = [load**n / math.factorial(n) for n in range(servers)]
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(terms) + last)


def poisson_requests(rate: float, mean_tokens: float, count: int, seed: int) -> Iterator[Request]:
    """Yield Poisson arrivals with one prompt token and a geometric number of output tokens."""
    random, now = Random(seed), T
    per_token = -math.log(1 - 1 / mean_tokens)
    for _ in range(count):
        now += random.expovariate(rate)
        yield Request(now, 1, 1, math.ceil(random.expovariate(1.0) / per_token))


def first_come_starts(requests: Sequence[Request], servers: int) -> list[float]:
    """Return the starts in a queue with so many servers, in the order of arrival, without steps."""
    free_at = [T] * servers
    starts = []
    for request in requests:
        start = max(request.arrived, heapq.heappop(free_at))
        starts.append(start)
        heapq.heappush(free_at, start + request.generated * STEP_S)
    return starts


def served(servers: int, utilization: float, count: int, seed: int) -> list[Request]:
    """Return requests that an engine has served; one takes 2 s on average."""
    rate = utilization * servers / SERVICE_S
    engine = Engine(replace(CONSTANT, max_sequences=servers), "engine", T)
    requests = list(poisson_requests(rate, SERVICE_S / STEP_S, count, seed))
    for request in requests:
        engine.advance(request.arrived)
        assert engine.arrive(request)
    engine.advance(T + 1e9)
    counters = Counters._make(engine.counts.counters)
    assert counters.wait_count_standard == count
    waits_s = sum([request.scheduled - request.arrived for request in requests])
    assert counters.wait_sum_s_standard == pytest.approx(waits_s, rel=1e-9)
    return requests


@pytest.mark.parametrize(("servers", "utilization"), [(1, 0.5), (4, 0.6)])
def test_waits_are_those_of_erlang_c(servers: int, utilization: float) -> None:
    """Mean wait and the share of waits beyond a second, within 5% for 80,000 requests.

    Over 24 seeds, the mean wait of four sequences spreads by 4% around that of Erlang C. A request
    that finds a free sequence in a busy engine waits for the end of the step, 5 ms on average.
    """
    requests = served(servers, utilization, 80_000, seed=3)
    waits_s = [request.scheduled - request.arrived for request in requests]
    waiting = erlang_c(servers, utilization * servers)
    drain_per_s = servers * (1 - utilization) / SERVICE_S
    assert fmean(waits_s) == pytest.approx(waiting / drain_per_s + STEP_S / 2, rel=0.05)
    beyond = fmean([wait_s > 1.0 for wait_s in waits_s])
    assert beyond == pytest.approx(waiting * math.exp(-drain_per_s), rel=0.05)


@pytest.mark.parametrize(("servers", "utilization"), [(1, 0.9), (4, 0.9), (32, 0.97)])
def test_every_start_is_that_of_a_queue_with_servers_within_a_step(
    servers: int, utilization: float
) -> None:
    """Rounding arrivals up to the end of a step delays every start by a step at most."""
    requests = served(servers, utilization, 10_000, seed=4)
    for request, start in zip(requests, first_come_starts(requests, servers), strict=True):
        assert start - 1e-6 <= request.scheduled <= start + STEP_S + 1e-6
        assert request.ended - request.scheduled == pytest.approx(request.generated * STEP_S)


@pytest.mark.parametrize(
    ("costs", "step_s"),
    [
        (StepCosts(0.01, 0.0, 0.0, 0.0, 0.0), 0.01),
        (StepCosts(0.002, 0.0, 5e-4, 0.0, 0.0), 0.002 + 8 * 5e-4),
        (StepCosts(0.002, 0.009, 5e-4, 0.0, 0.0), 0.011),
    ],
)
def test_saturated_throughput_is_sequences_over_the_step_time(
    costs: StepCosts, step_s: float
) -> None:
    """While requests wait, every step gives one token to each of 8 sequences."""
    engine = Engine(replace(CONSTANT, costs=costs, max_sequences=8), "engine", T)
    random = Random(5)
    for _ in range(500):
        engine.arrive(Request(T, 1, 1, random.randint(1, 60)))
    for number in range(1, 11):
        engine.advance(T + float(number))
        assert engine.waiting, "saturated"
        counters = Counters._make(engine.counts.counters)
        seconds = engine.time - T
        assert seconds >= float(number)
        assert counters.generation_tokens / seconds == pytest.approx(8 / step_s, rel=1e-9)
        assert counters.batch_time_sum_s == pytest.approx(seconds, rel=1e-9)


COSTS = StepCosts(0.003, 0.004, 2e-5, 5e-6, 4e-7, 1e-9, 1e-4)


def test_ttft_of_one_request_is_the_sum_of_its_chunks() -> None:
    """A prompt of 2500 tokens at 1000 a step: chunks of 1000, 1000 and 500; then single tokens."""
    spec = replace(CONSTANT, costs=COSTS, max_tokens=1000)
    engine, request = Engine(spec, "engine", T), Request(T, 1, 2500, 3)
    engine.arrive(request)
    engine.advance(T + 60)
    t0_s, w_s, g_s, b_s, c_s, q_s, request_s = COSTS
    first = t0_s + g_s * 1000 + q_s * 1000 * 500 + request_s
    second = t0_s + g_s * 1000 + c_s * 1000 + q_s * 1000 * 1500
    third = t0_s + g_s * 500 + c_s * 2000 + q_s * 500 * 2250
    assert request.scheduled == T
    assert request.ttft_s == pytest.approx(first + second + third)
    decode = 2 * (t0_s + w_s + b_s) + c_s * (2500 + 2501)
    assert request.ended - request.first_token == pytest.approx(decode)
    assert request.tpot_s == pytest.approx(decode / 2)


def test_the_token_limit_leaves_room_beside_the_running_sequences() -> None:
    """A limit of one token becomes the running sequences + 256: 600 prompt tokens take 3 steps."""
    engine, request = Engine(CONSTANT, "engine", T), Request(T, 1, 600, 1)
    engine.limit_tokens = 1
    engine.arrive(request)
    engine.advance(T + 60)
    assert request.ttft_s == pytest.approx(3 * STEP_S)
    _, prefill = engine.counts.sums()
    assert prefill[:2] == (3.0, 600.0)


def test_a_preemption_worked_by_hand() -> None:
    """Four blocks of 16 tokens, and two requests with 16 prompt and 20 output tokens.

    Step 1 prefills both (a block each) and gives their first token. Step 2 takes a second block for
    each, and steps 2 to 17 fill it: 17 tokens are out. Step 18 needs two blocks and has none, so the
    second request is preempted and loses both. The first ends in step 20 with 3 blocks; the one left
    is too little for the other's 33 tokens. It computes them in step 21 and ends in step 23.
    """
    per_token_s = 1e-4
    costs = StepCosts(STEP_S, 0.0, per_token_s, 0.0, 0.0)
    spec = replace(CONSTANT, costs=costs, kv_capacity_tokens=64.0)
    engine = Engine(spec, "engine", T)
    one, two = Request(T, 1, 16, 20), Request(T, 1, 16, 20)
    assert engine.arrive(one)
    assert engine.arrive(two)
    seventeen_s = 17 * STEP_S + (32 + 16 * 2) * per_token_s
    engine.advance(T + seventeen_s - STEP_S / 2)
    assert (engine.blocks_used, engine.kv_tokens, engine.running) == (4, 64, 2)
    assert engine.time == pytest.approx(T + seventeen_s)
    engine.advance(engine.time + STEP_S / 2)
    assert (engine.blocks_used, engine.kv_tokens, engine.running) == (3, 33, 1)
    assert [list(queue) for queue in engine.queues] == [[], [two], []]
    assert (two.to_prefill, two.to_generate) == (33, 3)
    engine.advance(T + 60)
    ends_s = seventeen_s + 3 * (STEP_S + per_token_s)
    assert one.ended == pytest.approx(T + ends_s)
    assert two.ended == pytest.approx(T + ends_s + 3 * STEP_S + (33 + 2) * per_token_s)
    assert one.first_token == two.first_token == pytest.approx(T + STEP_S + 32 * per_token_s)
    counters = Counters._make(engine.counts.counters)
    assert counters.preemptions == 1
    assert counters.steps == 23
    assert counters.generation_tokens == 40
    assert counters.wait_count_standard == 2, "a preempted request waits once"
    assert (engine.blocks_used, engine.kv_tokens) == (0, 0)


def test_prefix_hits_shorten_the_prefill() -> None:
    """Three quarters of 4000 tokens are cached: 1000 are computed, and 250 blocks are held."""
    t0_s, _, g_s, _, c_s, q_s, request_s = COSTS
    spec = replace(CONSTANT, costs=COSTS, prefix_hit_ratio=0.75)
    engine, request = Engine(spec, "engine", T), Request(T, 1, 4000, 2)
    engine.arrive(request)
    engine.advance(T + t0_s)
    assert engine.blocks_used == 250
    assert engine.kv_tokens == 4000
    engine.advance(T + 60)
    step_s = t0_s + g_s * 1000 + c_s * 3000 + q_s * 1000 * 3500 + request_s
    assert request.ttft_s == pytest.approx(step_s)
    plain = Request(T, 1, 4000, 2)
    other = Engine(replace(spec, prefix_hit_ratio=0.0), "engine", T)
    other.arrive(plain)
    other.advance(T + 60)
    assert plain.ttft_s > 3 * request.ttft_s

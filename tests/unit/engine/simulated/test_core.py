"""The core of a simulated engine: steps that take the time of the fit, and end at planned times."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.simulate.engine import Engine, EngineSpec
from fleetkeeper.simulate.requests import Request
from fleetkeeper_engine.simulated.core import (
    Lateness,
    Prefill,
    SequenceOutput,
    SimulatedCore,
    Work,
)
from fleetkeeper_steps.hardware import known_hardware
from fleetkeeper_steps.running import BLOCK_TOKENS
from tests.support.engine.virtual_core import COSTS, VirtualCore, config
from tests.support.lanes import examples


@pytest.mark.parametrize("speed", [1.0, 20.0])
@pytest.mark.parametrize("name", ["h100-8b", "h100-70b"])
async def test_steps_take_the_time_of_the_fit(name: str, speed: float) -> None:
    """A chunk of 2,048, one of 952 with the first token, and two decode steps."""
    hardware = known_hardware()[name]
    engine = VirtualCore(config(costs=hardware.costs, speed=speed), now=0.0)
    await engine.finish([Work("a", 3000, 3)])
    steps = [
        hardware.step_time_s(2048, 0, 0, pairs=2048 * 1024, admitted=1),
        hardware.step_time_s(952, 0, 2048, pairs=952 * (2048 + 476)),
        hardware.step_time_s(0, 1, 3000),
        hardware.step_time_s(0, 1, 3001),
    ]
    ends = [math.fsum(steps[:count]) / speed for count in (2, 3, 4)]
    assert [at for at, _ in engine.outputs] == pytest.approx(ends, rel=1e-9)
    assert [output for _, output in engine.outputs] == [
        SequenceOutput("a", 1, None, Prefill(3000, 0)),
        SequenceOutput("a", 1),
        SequenceOutput("a", 1, "length"),
    ]


async def test_a_request_ends_by_itself_at_its_length_or_with_its_prefill() -> None:
    engine = VirtualCore(config())
    await engine.finish([
        Work("stops", 10, 8, ends_after=8),
        Work("long", 10, 8, ends_after=9),
        Work("pooling", 10, 0),
    ])  # fmt: skip
    last = {output.request_id: output for _, output in engine.outputs if output.finished_reason}
    assert {name: output.finished_reason for name, output in last.items()} == {
        "stops": "stop",
        "long": "length",
        "pooling": "stop",
    }
    assert sum(output.new_token_count for _, output in engine.of("long")) == 8
    assert last["pooling"] == SequenceOutput("pooling", 0, "stop", Prefill(10, 0))


ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from([0.0001, 0.001, 0.01, 0.05, 0.3, 4.0]),
        st.integers(1, 700),
        st.integers(1, 120),
    ),
    min_size=1,
    max_size=25,
)


@examples(80)
@given(
    ARRIVALS,
    st.sampled_from([60, 100, 190, 6000]),
    st.sampled_from([2, 8, 16]),
    st.sampled_from([300, 2048]),
)
def test_a_trace_has_the_times_of_the_simulator(
    arrivals: list[tuple[float, int, int]], blocks: int, sequences: int, tokens: int
) -> None:
    """Without tiers, to rounding: the simulator adds many steps at once, the core one by one."""
    spec = EngineSpec(
        COSTS, float(blocks * BLOCK_TOKENS), sequences, max(tokens, 16), step_noise=0.0, queue_limits=None
    )  # fmt: skip
    simulated, now = Engine(spec, "engine", 100.0), 100.0
    requests: dict[str, Request] = {}
    works = []
    for number, (gap_s, prompt, generated) in enumerate(arrivals):
        now += gap_s
        simulated.advance(now)
        request = Request(now, 1, prompt, generated)
        if simulated.arrive(request):
            name = f"{number:03}"
            requests[name] = request
            works.append(Work(name, prompt, generated, arrival_s=now))
    simulated.advance(1e6)
    if not works:
        return
    real = VirtualCore(config(blocks=blocks, max_num_seqs=sequences, max_num_batched_tokens=tokens))
    asyncio.run(real.finish(works))
    for name, request in requests.items():
        assert real.first_and_last(name) == pytest.approx(
            (request.first_token, request.ended), rel=1e-9
        )
    assert real.scheduler.num_preemptions == simulated.counts.counters[_PREEMPTIONS]


_PREEMPTIONS = Engine(EngineSpec(COSTS), "engine", 0.0).sample(0.0).counters._fields.index(
    "preemptions"
)  # fmt: skip


@dataclass
class Chaos:
    """Aborts and arrivals while steps run."""

    random: Random
    added: list[str]

    def __call__(self, engine: VirtualCore) -> None:
        if self.random.random() < 0.2:
            engine.core.abort(self.random.choices(self.added, k=2))
        if self.random.random() < 0.1 and len(self.added) < 60:
            name = f"late-{len(self.added)}"
            self.added.append(name)
            engine.add(Work(name, self.random.randint(1, 300), self.random.randint(0, 40)))


@examples(60)
@given(
    st.integers(0, 10**6), st.sampled_from([40, 80, 4000]), st.sampled_from([0, 64]), st.booleans()
)
def test_each_request_ends_once_and_gives_its_blocks_back(
    seed: int, blocks: int, threshold: int, has_priorities: bool
) -> None:
    random = Random(seed)
    names = [f"r{number}" for number in range(random.randint(1, 30))]
    engine = VirtualCore(
        config(
            blocks=blocks,
            max_num_seqs=random.choice([1, 4, 16]),
            max_num_batched_tokens=256,
            long_prefill_token_threshold=threshold,
        ),
        before_step=Chaos(random, names),
    )
    asked = {name: random.randint(0, 60) for name in names}
    works = [
        Work(name, random.randint(1, 500), tokens, priority=random.randint(0, 3) * has_priorities)
        for name, tokens in asked.items()
    ]
    asyncio.run(engine.finish(works))
    ends = [output.request_id for _, output in engine.outputs if output.finished_reason]
    assert sorted(ends) == sorted(names)
    for name, tokens in asked.items():
        outputs = [output for _, output in engine.of(name)]
        generated = sum(output.new_token_count for output in outputs)
        assert outputs[-1].finished_reason == "abort" or generated == tokens
        assert [output.prefill is not None for output in outputs[:-1]] == [
            place == 0 for place in range(len(outputs) - 1)
        ]
    scheduler = engine.scheduler
    sequences = scheduler._sequences
    assert scheduler.kv_cache_manager.usage == 0.0
    assert (sequences.kv_tokens, len(sequences)) == (0, 0)
    assert (scheduler.running, list(scheduler.waiting), scheduler.requests) == ([], [], {})


@pytest.mark.parametrize("late_s", [0.0, 0.0007, 0.05])
async def test_lateness_does_not_add_up(late_s: float) -> None:
    """Each wake is late, and the last of 500 steps ends as late as the first."""
    exact, late = VirtualCore(config()), VirtualCore(config(), late_s=lambda: late_s)
    for engine in (exact, late):
        await engine.finish([Work("a", 10, 500)])
    assert late.outputs[-1][0] - exact.outputs[-1][0] <= late_s + 1e-9
    assert late.core.lateness.count == 500
    assert late.core.lateness.quantile_s(0.99) >= late_s
    assert late.core.lateness.sum_s >= late_s


async def test_what_runs_does_not_depend_on_lateness() -> None:
    """A request that came after a planned start waits for the next step, as it does in time."""
    rows = [(0.05 * number + 0.0001, 200 + 7 * number, 30) for number in range(20)]
    works = [Work(f"{at:.4f}", prompt, 30, arrival_s=100.0 + at) for at, prompt, _ in rows]
    seen = []
    for late_s in (0.0, 0.03):
        engine = VirtualCore(config(max_num_seqs=4), late_s=lambda late_s=late_s: late_s)  # type: ignore[misc]
        await engine.finish(works)
        seen.append([output for _, output in engine.outputs])
    assert seen[0] == seen[1]


def test_the_quantile_is_an_edge_that_bounds_it() -> None:
    lateness = Lateness()
    assert lateness.quantile_s(0.99) == 0.0
    for _ in range(99):
        lateness.record(0.0004)
    lateness.record(0.3)
    assert (lateness.quantile_s(0.99), lateness.quantile_s(0.995)) == (0.001, 0.5)
    lateness.record(60.0)
    assert lateness.quantile_s(1.0) == math.inf
    assert (lateness.count, sum(lateness.counts)) == (101, 101)


async def test_what_cannot_fit_and_a_used_id_are_refused() -> None:
    engine = VirtualCore(config(blocks=10))
    with pytest.raises(ValueError, match="KV cache holds 160"):
        engine.core.add(Work("large", 100, 61))
    await engine.finish([Work("fits", 100, 60), Work("short", 100, 1000, ends_after=60)])
    engine.add(Work("twice", 1, 1))
    with pytest.raises(ValueError, match="in use"):
        engine.core.add(Work("twice", 1, 1))
    await engine.finish([Work("fits", 100, 60)])
    assert len(engine.of("fits")) == 120


async def test_a_frozen_engine_keeps_its_step_and_ends_nothing() -> None:
    """Its scheduler has a step in flight, as a hung vLLM has."""
    engine = VirtualCore(config(), before_step=lambda engine: engine.core.freeze())
    engine.add(Work("a", 10, 10))
    loop = asyncio.create_task(engine.core.run())
    for _ in range(20):
        await asyncio.sleep(0)
    assert (engine.outputs, engine.steps) == ([], 1)
    assert engine.scheduler.has_unfinished_requests()
    loop.cancel()
    await asyncio.wait([loop])


async def test_an_idle_core_waits_without_polling() -> None:
    """It sleeps only in steps: 2 for a request of 2 tokens, and none before or after."""
    engine = VirtualCore(config())
    loop = asyncio.create_task(engine.core.run())
    for _ in range(20):
        await asyncio.sleep(0)
    assert engine.steps == 0
    engine.add(Work("a", 10, 2))
    for _ in range(50):
        await asyncio.sleep(0)
    assert (engine.steps, len(engine.outputs)) == (2, 2)
    engine.core.abort(["unknown", "a"])
    for _ in range(50):
        await asyncio.sleep(0)
    assert (engine.steps, len(engine.outputs)) == (2, 2)
    loop.cancel()
    await asyncio.wait([loop])


async def test_steps_end_in_real_time() -> None:
    """With the clock and the sleep of asyncio: no sooner than planned."""
    outputs: list[SequenceOutput] = []
    done = asyncio.Event()

    def collect(step: list[SequenceOutput]) -> None:
        outputs.extend(step)
        if step[-1].finished_reason:
            done.set()

    core = SimulatedCore(config(), collect)
    loop = asyncio.create_task(core.run())
    began = asyncio.get_running_loop().time()
    core.add(Work("a", 10, 5))
    await done.wait()
    assert asyncio.get_running_loop().time() - began >= 5 * 0.007
    assert len(outputs) == core.lateness.count == 5
    loop.cancel()
    await asyncio.wait([loop])

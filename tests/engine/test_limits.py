"""Live batch limits on a real vLLM: they follow at the next step, and nothing is lost by it."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import time

import pytest
from aiohttp import ClientSession

from fleetkeeper_contract.histogram_buckets import BATCH_SEQUENCES_EDGES
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.shm.layout import SchedulerBlock
from tests.support.engine.engine_environment import PYTHON
from tests.support.engine.inside_engine import Answer, InsideEngine, client
from tests.support.engine.shared_engine import shared_engine
from tests.support.engine.supervised_engine import START_TIMEOUT_S
from tests.support.guards import GUARD_S

STREAMS = 64
CHANGES = 200
PROMISED_S = 0.1
PROMISED_STEPS = 2
"""A new limit is read within so many seconds or steps; steps hold on a crowded machine too."""
SEEN = 300
"""Tokens of a stream that is to be seen while it runs: with so many beside it, seconds on a quick machine."""
SEEN_ALONE = 1000
"""The same of one that runs alone. What runs is said every 200 ms, and whoever looks may be halted for longer."""

pytestmark = pytest.mark.timeout(900)
"""The first test waits for the shared engine to start."""


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> InsideEngine:
    found = shared_engine(request.config)
    found.free_all()
    return found


@pytest.mark.promise("live-limits")
async def test_two_hundred_changes_under_64_streams_are_read_at_once_and_kill_nothing(
    engine: InsideEngine,
) -> None:
    """99% are read within 100 ms or 2 steps, whichever is longer; every stream ends whole; never above start-up."""
    dice = random.Random(7)
    over = False
    ends: list[int] = []

    async def keep_streaming() -> None:
        async with client() as session:
            while not over:
                answer = await engine.stream(session, 24)
                assert answer.status == 200
                ends.append(answer.tokens)

    streams = [asyncio.create_task(keep_streaming()) for _ in range(STREAMS)]
    await engine.until(lambda: sum(engine.scheduler().running) >= STREAMS // 2)
    before = engine.scheduler()
    latencies, steps_until_read, limits = [], [], set()
    for _ in range(CHANGES):
        requested = engine.set_block(
            sequences=dice.choice([1, 2, 4, 8, 16, 32, 64, 128]),
            tokens=dice.choice([64, 256, 512, 1024, 2048, 4096]),
        )
        unread_s, unread_steps, block = await _until_read(engine, requested.generation)
        latencies.append(unread_s)
        steps_until_read.append(unread_steps)
        limits.add((block.limit_sequences, block.limit_tokens))
        await asyncio.sleep(dice.uniform(0.0, 0.04))
    engine.free_all()
    over = True
    await asyncio.gather(*streams)
    after = engine.scheduler()

    timely = [
        took_s <= PROMISED_S or steps <= PROMISED_STEPS
        for took_s, steps in zip(latencies, steps_until_read, strict=True)
    ]
    latencies.sort()
    print(
        f"read within: p50 {1e3 * latencies[99]:.0f} ms, p99 {1e3 * latencies[197]:.0f} ms, "
        f"most steps {max(steps_until_read)}, in time {sum(timely)} of {CHANGES}"
    )
    assert sum(timely) >= 0.99 * CHANGES
    assert len(ends) >= STREAMS
    assert set(ends) == {24}
    assert all(sequences <= 64 and tokens <= 2048 for sequences, tokens in limits)
    assert {sequences for sequences, _ in limits} >= {1, 64}
    above = [n for n, edge in enumerate(BATCH_SEQUENCES_EDGES) if edge > 72]
    assert not any(after.batch_sequences_buckets[n] for n in above)
    assert after.preemptions == before.preemptions


async def _until_read(engine: InsideEngine, generation: int) -> tuple[float, int, SchedulerBlock]:
    """For how long (seconds, worked steps) the request was last seen unread, and the block that has read it.

    By what shared memory shows, not by when it is looked at: whoever looks late would count his own delay.
    """
    requested_at, before = time.monotonic(), engine.scheduler().worked_steps
    unread_s, unread_steps = 0.0, 0
    while (block := engine.scheduler()).generation < generation:
        unread_s, unread_steps = time.monotonic() - requested_at, block.worked_steps - before
        assert unread_s < GUARD_S, f"never read: {block}"
        await asyncio.sleep(0.002)
    return unread_s, unread_steps, block


async def test_a_lower_limit_drains_and_a_higher_one_fills(engine: InsideEngine) -> None:
    """Lowering kills nothing: what runs ends, and then no step holds more than the limit."""
    await engine.until_idle()  # else the sequences of the test before may still be counted
    async with client() as session:
        tasks = [asyncio.create_task(engine.stream(session, SEEN)) for _ in range(32)]
        await engine.until(lambda: sum(engine.scheduler().running) >= 24)
        preempted = engine.scheduler().preemptions
        engine.set_block(sequences=4)
        await engine.until(lambda: engine.scheduler().limit_sequences == 4)
        answers = await asyncio.gather(*tasks)
        assert {answer.tokens for answer in answers} == {SEEN}
        await engine.until_idle()  # steps are counted up to 200 ms late
        before = engine.scheduler()
        assert before.preemptions == preempted, "what runs goes on"
        await asyncio.gather(*(engine.stream(session, SEEN) for _ in range(24)))  # they meet
        after = engine.scheduler()
        grown = [
            BATCH_SEQUENCES_EDGES[n]
            for n, (was, now) in enumerate(
                zip(before.batch_sequences_buckets, after.batch_sequences_buckets, strict=True)
            )
            if now > was
        ]
        assert max(grown) == 4
        engine.free_all()
        tasks = [asyncio.create_task(engine.stream(session, SEEN)) for _ in range(32)]
        await engine.until(lambda: sum(engine.scheduler().running) >= 24)
        await asyncio.gather(*tasks)


@pytest.mark.promise("limits-lease", "start-up-limits")
async def test_an_ended_lease_returns_start_up_values_notch_by_notch(engine: InsideEngine) -> None:
    """Read from the engine 0, 6, 15, 27 and 31 s after the end: rising, at last the start-up values."""
    seen = []
    async with client() as session:
        for since_end_s in (-60.0, 1.0, 6.5, 15.5, 27.5, 31.0):
            engine.set_block(sequences=4, tokens=128, lease_deadline=time.monotonic() - since_end_s)
            await engine.stream(session, 4)
            seen.append(engine.scheduler().limit_sequences)
    assert seen[:2] == [4, 4]
    assert seen == sorted(seen)
    assert 4 < seen[2] < seen[3] < seen[4] < 64
    assert seen[5] == 64


async def test_an_idle_engine_reads_new_limits_with_its_next_request(engine: InsideEngine) -> None:
    """An idle core never schedules: that it has not read them is no failure, and they still count."""
    await engine.until_idle()
    calls = engine.heartbeat().schedule_calls
    requested = engine.set_block(sequences=2)
    await asyncio.sleep(0.3)
    assert engine.heartbeat().schedule_calls == calls
    async with client() as session:
        await asyncio.gather(*(engine.stream(session, 4) for _ in range(4)))
    block = engine.scheduler()
    assert (block.generation, block.limit_sequences) == (requested.generation, 2)


async def seen_running(engine: InsideEngine, session: ClientSession) -> asyncio.Task[Answer]:
    """Return a stream that the scheduler reports as running.

    On a crowded machine one can end before anybody looks: then the next is started.
    """
    while True:
        stream = asyncio.create_task(engine.stream(session, SEEN_ALONE))
        await engine.until(lambda: stream.done() or sum(engine.scheduler().running) == 1)  # noqa: B023
        if not stream.done():
            return stream
        assert (await stream).tokens == SEEN_ALONE


async def test_above_the_memory_cap_nothing_new_starts_and_what_runs_ends(
    engine: InsideEngine,
) -> None:
    """The supervisor's flag stops new sequences only; when it falls, the waiting ones run."""
    async with client() as session:
        running = await seen_running(engine, session)
        engine.set_block(cap_exceeded=True)
        waiting = asyncio.create_task(engine.stream(session, 4))
        assert (await running).tokens == SEEN_ALONE
        await engine.until(lambda: sum(engine.middleware().waiting) == 1)
        await engine.until(lambda: sum(engine.scheduler().running) == 0)
        assert not waiting.done()
        engine.set_block(cap_exceeded=False)
        assert (await waiting).tokens == 4


async def test_what_the_scheduler_counts_adds_up(engine: InsideEngine) -> None:
    """Tokens, steps, batch time and the sums for the step-time model tell of the same steps."""
    await engine.until_idle()
    before = engine.scheduler()
    started = time.monotonic()
    async with client() as session:
        answers = await asyncio.gather(
            *(engine.stream(session, 10, prompt=list(range(10, 110))) for _ in range(6))
        )
    took = time.monotonic() - started
    await engine.until_idle()
    after = engine.scheduler()
    assert {answer.tokens for answer in answers} == {10}
    assert after.prompt_tokens - before.prompt_tokens == 600
    assert after.generation_tokens - before.generation_tokens == 60
    steps = after.worked_steps - before.worked_steps
    assert 10 <= steps <= 60
    sums = [now - was for was, now in zip(before.step_model, after.step_model, strict=True)]
    decode, prefill = sums[:15], sums[15:]
    assert decode[0] + prefill[0] == steps
    assert decode[1] == 0
    assert prefill[1] == 600
    seconds = after.batch_time_sum - before.batch_time_sum
    assert decode[4] + prefill[4] == pytest.approx(seconds)
    assert 0 < seconds < took
    assert sum(after.queue_wait_of(Tier.STANDARD)) - sum(before.queue_wait_of(Tier.STANDARD)) == 6
    assert after.kv_capacity_tokens > 2048
    assert after.kv_resident_tokens == 0


CHOICES = """
from types import SimpleNamespace
from vllm.config import SchedulerConfig
from fleetkeeper_engine.in_vllm.scheduler import chosen_class, live_scheduler, mixed_into
from fleetkeeper_engine.in_vllm.vllm_settings import SCHEDULER_FACTORY
import json
found = {}
for name, asynchronous, diffusion in (("sync", False, None), ("async", True, None), ("diffusion", True, 1)):
    config = SchedulerConfig.default_factory(
        async_scheduling=asynchronous, scheduler_cls=SCHEDULER_FACTORY
    )
    assert config.get_scheduler_cls() is live_scheduler
    chosen = chosen_class(SimpleNamespace(scheduler_config=config, diffusion_config=diffusion))
    mixed = mixed_into(chosen)
    assert issubclass(mixed, chosen) and mixed.schedule is not chosen.schedule
    found[name] = chosen.__name__
print(json.dumps(found))
"""


@pytest.mark.exhaustive
def test_the_factory_mixes_into_each_class_that_this_vllm_chooses_from() -> None:
    """Async under an asynchronous runner, the plain one under a synchronous, the diffusion ones for those."""
    done = subprocess.run(
        [PYTHON, "-c", CHOICES], capture_output=True, text=True, check=True, timeout=START_TIMEOUT_S
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "sync": "Scheduler",
        "async": "AsyncScheduler",
        "diffusion": "DiffusionAsyncScheduler",
    }

"""The scheduler of a simulated engine under our own live limits, as vLLM's is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.live_scheduling import LiveScheduling
from fleetkeeper_engine.in_vllm.realtime_reserve import RESERVE_KEPT_S
from fleetkeeper_engine.in_vllm.scheduler import LiveLimits, chosen_class, live_scheduler
from fleetkeeper_engine.in_vllm.vllm_settings import VllmSettings
from fleetkeeper_engine.shm.layout import SupervisorBlock
from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.simulated.core import Prefill, Work
from fleetkeeper_engine.simulated.scheduler import SimulatedScheduler
from tests.support.engine.scheduler_stand_in import RULE, block
from tests.support.engine.virtual_core import VirtualCore, config

Step = Callable[[VirtualCore], None]


def live(
    region: Region, before_step: Step = lambda _: None, *, prefixes: bool = True, **options: Any
) -> VirtualCore:
    """Return an engine with live limits, on the clock of the engine."""
    settings = config(scheduler_cls=live_scheduler, **options)
    settings.cache_config.enable_prefix_caching = prefixes
    engine = VirtualCore(settings, before_step=before_step)
    engine.scheduler._live = LiveScheduling(
        engine.scheduler, region, VllmSettings.of_environment(), lambda: engine.now
    )
    return engine


def work(name: str, tier: Tier, at: float, tokens: int = 20, prompt: int = 10) -> Work:
    """Return a request with the priority that the middleware gives it."""
    number = RULE.number(tier, round(at * 1e6))
    return Work(name, prompt, tokens, priority=number, arrival_s=at)


def standard(count: int, tokens: int = 20, at: float = 100.0) -> list[Work]:
    return [
        work(f"s{number:02}", Tier.STANDARD, at + number * 1e-5, tokens) for number in range(count)
    ]


def running(engine: VirtualCore) -> set[str]:
    return {request.request_id for request in engine.scheduler.running}


def test_vllms_rule_makes_it_with_live_limits(region: Region) -> None:
    settings = config(scheduler_cls=live_scheduler)
    assert chosen_class(settings) is SimulatedScheduler
    scheduler = VirtualCore(settings).scheduler
    assert isinstance(scheduler, LiveLimits)
    assert isinstance(scheduler, SimulatedScheduler)
    found = block(region)
    assert found.supported
    assert (found.ceiling_sequences, found.ceiling_tokens) == (64, 2048)
    assert (found.floor_sequences, found.floor_tokens) == (4, 256)
    assert found.kv_capacity_tokens == 16_000


async def test_lowered_limits_end_nothing_and_raised_ones_start_more(region: Region) -> None:
    """30 run, then the limit is 8: nothing starts until fewer run. Later it is 64 again."""
    counts: list[tuple[int, int, int]] = []

    def change(engine: VirtualCore) -> None:
        if engine.steps == 3:
            write(engine, 8)
            engine.add(*standard(30, tokens=200, at=engine.now + 1e-4))
        if engine.steps == 120:
            write(engine, 64)
        scheduler = engine.scheduler
        counts.append((engine.steps, len(scheduler.running), scheduler.max_num_scheduled_tokens))

    def write(engine: VirtualCore, sequences: int) -> None:
        region.write_supervisor(
            SupervisorBlock(
                generation=engine.steps,
                sequences=sequences,
                tokens=300,
                lease_deadline=engine.now + 60,
            )
        )

    engine = live(region, change, long_prefill_token_threshold=512)
    first = [work(f"f{number:02}", Tier.STANDARD, 100.0, 100) for number in range(30)]
    await engine.finish(first)
    by_step = {step: (count, tokens) for step, count, tokens in counts}
    assert by_step[3] == (30, 2048)
    assert by_step[4] == (30, 300)
    assert {by_step[step][0] for step in range(4, 100)} == {30}
    assert {by_step[step][0] for step in range(102, 120)} == {8}
    assert by_step[122][0] == 30
    assert block(region).generation == 120


async def test_above_the_memory_cap_nothing_starts_and_what_runs_goes_on(region: Region) -> None:
    """A request that waits for the cap starts soon after it is lifted; nothing has to wake the core."""
    region.write_supervisor(SupervisorBlock(cap_exceeded=False))

    def cap(engine: VirtualCore) -> None:
        if engine.steps == 2:
            region.write_supervisor(SupervisorBlock(cap_exceeded=True))
            engine.add(work("new", Tier.STANDARD, engine.now, 5))
        if engine.steps > 2 and "new" in running(engine):
            assert engine.now >= 101.0
        if engine.now >= 101.0:
            region.write_supervisor(SupervisorBlock(cap_exceeded=False))

    engine = live(region, cap)
    await engine.finish([work("old", Tier.STANDARD, 100.0, 20)])
    assert engine.first_and_last("old")[1] < 100.2
    assert 101.0 <= engine.first_and_last("new")[0] < 101.05
    assert block(region).worked_steps == 25


async def test_the_reserve_is_kept_while_realtime_comes(region: Region) -> None:
    """Of 20 sequences, others take 18 until 10 s after a realtime request: its peak is 1, and 1 more is kept."""
    most = {True: 0, False: 0}

    def count(engine: VirtualCore) -> None:
        others = sum(name.startswith("s") for name in running(engine))
        is_kept = engine.now < 100.0 + RESERVE_KEPT_S
        if engine.steps > 2:
            most[is_kept] = max(most[is_kept], others)

    engine = live(region, count, max_num_seqs=20)
    waves = [standard(60, tokens=150, at=at) for at in (100.1, 103.0, 112.0)]
    works = [
        Work(f"{item.request_id}-{number}", item.prompt, item.max_tokens, None, item.priority, item.arrival_s)
        for number, wave in enumerate(waves)
        for item in wave
    ]  # fmt: skip
    await engine.finish([work("realtime", Tier.REALTIME, 100.0, 3), *works])
    assert most == {True: 18, False: 20}


async def test_requests_start_in_the_order_of_tiers_and_arrivals(region: Region) -> None:
    """One runs; of those that wait, realtime is first, and batch counts as 30 s later."""
    engine = live(region, max_num_seqs=1)
    await engine.finish([
        work("runs", Tier.STANDARD, 100.0),
        work("batch", Tier.BATCH, 100.01),
        work("second", Tier.STANDARD, 100.03),
        work("first", Tier.STANDARD, 100.02),
        work("realtime", Tier.REALTIME, 100.05),
    ])  # fmt: skip
    ends = [output.request_id for _, output in engine.outputs if output.finished_reason]
    assert ends == ["runs", "realtime", "first", "second", "batch"]


async def test_without_kv_blocks_the_last_in_order_is_preempted_and_starts_again(
    region: Region,
) -> None:
    """The batch request came first and runs first. It is preempted all the same, and loses no token."""
    engine = live(region, blocks=24)
    await engine.finish([
        work("batch", Tier.BATCH, 100.0, tokens=150, prompt=100),
        work("one", Tier.STANDARD, 100.01, tokens=150, prompt=100),
        work("two", Tier.STANDARD, 100.02, tokens=20, prompt=100),
    ])  # fmt: skip
    preempted = engine.scheduler.num_preemptions
    assert preempted >= 1
    assert block(region).preemptions == preempted
    ends = [output.request_id for _, output in engine.outputs if output.finished_reason]
    assert ends == ["two", "one", "batch"]
    for name, tokens in (("batch", 150), ("one", 150), ("two", 20)):
        assert sum(output.new_token_count for _, output in engine.of(name)) == tokens
        assert sum(output.prefill is not None for _, output in engine.of(name)) == 1
    times = [at for at, _ in engine.of("one")]
    assert max(after - before for before, after in pairwise(times)) < 0.02


async def test_shared_memory_has_the_steps_of_the_engine(region: Region) -> None:
    """Their number, tokens and time, and nothing left when all requests have ended."""
    engine = live(region)
    await engine.finish([*standard(10), work("r", Tier.REALTIME, 100.0, 20, prompt=3000)])
    found = block(region)
    assert found.worked_steps == engine.core.lateness.count
    assert found.prompt_tokens == 10 * 10 + 3000
    assert found.generation_tokens == 11 * 20
    assert found.batch_time_sum == pytest.approx(engine.outputs[-1][0] - 100.0)
    assert sum(found.queue_wait_buckets) == 11
    assert (found.running, found.waiting, found.kv_resident_tokens) == ((0, 0, 0), (0, 0, 0), 0)
    assert not found.instrumentation_disabled


async def test_an_abort_leaves_nothing_in_shared_memory(region: Region) -> None:
    """Also of the last request: the scheduler is called once more, as vLLM's is."""

    seen: list[tuple[int, int]] = []

    def abort(engine: VirtualCore) -> None:
        if engine.steps == 30:
            seen.append((sum(block(region).running), sum(block(region).waiting)))
            engine.core.abort(["s00", "s01"])

    engine = live(region, abort, max_num_seqs=1)
    await engine.finish(standard(2, tokens=500))
    assert [output.finished_reason for _, output in engine.outputs[-2:]] == ["abort", "abort"]
    seen.append((sum(block(region).running), sum(block(region).waiting)))
    assert seen == [(1, 1), (0, 0)]


async def test_a_long_prompt_is_cut_while_there_are_others(region: Region) -> None:
    """512 tokens a step beside another request; alone it takes the whole step."""
    chunks: list[int] = []

    def note(engine: VirtualCore) -> None:
        chunks.extend(row.chunk for row in engine.scheduler._sequences.prefilling if row.computed)

    engine = live(region, note, long_prefill_token_threshold=512)
    await engine.finish([
        work("short", Tier.STANDARD, 100.0, tokens=3),
        work("then-long", Tier.STANDARD, 100.0, prompt=5000),
    ])  # fmt: skip
    assert chunks == [10, 512, 512, 512, 2048, 5000 - 3 * 512 - 2048]


async def test_without_chunked_prefill_a_prompt_waits_for_a_step_of_its_own(region: Region) -> None:
    engine = live(region, enable_chunked_prefill=False)
    await engine.finish([
        work("a", Tier.STANDARD, 100.0, tokens=1, prompt=1500),
        work("b", Tier.STANDARD, 100.0, tokens=1, prompt=1500),
    ])  # fmt: skip
    assert engine.steps == 2


@pytest.mark.parametrize(
    ("second", "prefixes", "lora", "cached"),
    [
        (list(range(40)), True, None, 32),
        (list(range(32)), True, None, 16),
        ([*range(20), *range(100, 130)], True, None, 16),
        (list(range(1, 40)), True, None, 0),
        (list(range(40)), True, "other", 0),
        (list(range(40)), False, None, 0),
        (40, True, None, 0),
    ],
    ids=["same", "last-block", "prefix", "other", "lora", "disabled", "count"],
)
async def test_the_prefix_cache_holds_whole_blocks_of_earlier_prompts(
    region: Region, second: list[int] | int, prefixes: bool, lora: str | None, cached: int
) -> None:
    """At least one token is computed, and an adapter has its own cache."""
    engine = live(region, prefixes=prefixes)
    await engine.finish([Work("first", list(range(40)), 2)])
    await engine.finish([Work("second", second, 2, lora_name=lora)])
    count = second if isinstance(second, int) else len(second)
    assert engine.of("second")[0][1].prefill == Prefill(count, cached)
    assert block(region).prompt_tokens == 40 + count - cached

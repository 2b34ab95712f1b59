"""A campaign of faults: whatever is killed, every line has exactly one result, in order.

Two batch processes share a directory. The gateway, an engine that also dies by itself, Redis, both batch
processes and their worker processes are killed with SIGKILL in turn. Redis is also emptied, and restored from
append-only files that are a while old, which is what a failover to a replica that lags looks like. The answer of
one line in a thousand ends the worker process that handles it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from tests.support.batch.batch_process import (
    FAILURES,
    BatchProcess,
    BatchSurroundings,
    batch_surroundings,
    copy_append_only,
    ended,
    line,
    lines_of,
    numbers,
    restore_append_only,
    submit,
)
from tests.support.batch.batch_tree import a_worker
from tests.support.batch.poisoned_batch import COMMAND, POISON

pytestmark = pytest.mark.exhaustive

BY_ITSELF: Final = "engine by itself"
PATIENCE_S: Final = 1800.0


@dataclass(frozen=True)
class Plan:
    """The size of a campaign."""

    lines: tuple[int, ...]
    """Of each batch. Two keys have them in turn."""
    seconds: float
    """Of one line."""
    every_s: float
    """Time between two faults."""
    old_s: float
    """Age of the append-only files that Redis is restored from."""
    faults: int
    """After so many, everything runs undisturbed."""
    least: int
    """More batches are run until there were so many."""


@dataclass
class Campaign:
    """What is killed, and how often."""

    world: BatchSurroundings
    plan: Plan
    processes: list[BatchProcess]
    done: Counter[str] = field(default_factory=Counter)
    copies: list[tuple[float, Path]] = field(default_factory=list)
    engine_turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def faults(self) -> int:
        """Return the number of faults that were caused."""
        return sum(count for name, count in self.done.items() if name != BY_ITSELF)

    async def batch(self, index: int) -> None:
        process = self.processes[index]
        process.kill()
        await process.start().ready()

    async def engine(self) -> None:
        async with self.engine_turn:
            self.world.engine.kill()
            await asyncio.to_thread(self.world.engine.start)

    async def worker(self, index: int) -> None:
        (await a_worker(self.processes[index])).kill()

    async def gateway(self) -> None:
        self.world.serve.kill()
        await self.world.serve.start().ready()

    async def redis(self) -> None:
        self.world.redis.kill()
        await asyncio.to_thread(self.world.redis.start)

    async def redis_emptied(self) -> None:
        with self.world.redis.client() as client:
            await asyncio.to_thread(client.flushall)

    async def redis_restored(self) -> None:
        """Begin again with the files that were there a while ago."""
        limit = time.monotonic() - self.plan.old_s
        old = [copy for at, copy in self.copies if at <= limit]
        copy = old[-1] if old else self.copies[0][1]
        self.world.redis.kill()
        await asyncio.to_thread(restore_append_only, self.world.redis, copy)
        await asyncio.to_thread(self.world.redis.start)

    async def run(self) -> None:
        """Cause faults, each after the one before was repaired."""
        faults: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("batch", lambda: self.batch(0)),
            ("redis restored", self.redis_restored),
            ("worker", lambda: self.worker(1)),
            ("engine", self.engine),
            ("batch", lambda: self.batch(1)),
            ("redis emptied", self.redis_emptied),
            ("worker", lambda: self.worker(0)),
            ("gateway", self.gateway),
            ("redis", self.redis),
        ]
        for number, (name, fault) in zip(
            range(self.plan.faults), itertools.cycle(faults), strict=False
        ):
            await asyncio.sleep(self.plan.every_s)
            await fault()
            self.done[name] += 1
            print(f"fault {number + 1}: {name}", flush=True)

    async def keep_copies(self) -> None:
        """Copy the files of Redis, and keep the latest copies."""
        for number in itertools.count():
            at, copy = time.monotonic(), self.world.directory / f"redis-copy-{number}"
            with contextlib.suppress(FileNotFoundError, shutil.Error):  # it rewrites its files
                await asyncio.to_thread(copy_append_only, self.world.redis, copy)
                self.copies.append((at, copy))
            while len(self.copies) > 2 and self.copies[1][0] < at - self.plan.old_s:
                shutil.rmtree(self.copies.pop(0)[1])
            await asyncio.sleep(min(1.0, self.plan.old_s / 4))

    async def keep_engine(self) -> None:
        """Start the engine again when it ended by itself."""
        engine = self.world.engine
        while True:
            await asyncio.sleep(0.2)
            async with self.engine_turn:
                if not engine.alive:
                    await asyncio.to_thread(engine.start)
                    self.done[BY_ITSELF] += 1


@contextlib.asynccontextmanager
async def beside(*work: Awaitable[None]) -> AsyncIterator[None]:
    """Run tasks beside the body, and fail if one fails."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
    for one in found:
        if isinstance(one, Exception):
            raise one


async def patiently(
    processes: list[BatchProcess], key: str, ask: Callable[[openai.AsyncOpenAI], Awaitable[Any]]
) -> Any:
    """Ask one process after another until one answers."""
    async with asyncio.timeout(PATIENCE_S):
        for process in itertools.cycle(processes):
            with contextlib.suppress(*FAILURES):
                async with process.client(key, max_retries=0, timeout=30.0) as client:
                    return await ask(client)
            await asyncio.sleep(0.2)
    raise AssertionError("there is no process")


async def run_campaign(tmp_path: Path, plan: Plan) -> None:
    """Run batches through all faults, and check every line."""
    async with batch_surroundings(tmp_path, engine_most=24, engine_deaths=0.002) as world:
        world.add_key("other")
        processes = [world.batch(name, BATCH_CONCURRENCY="24") for name in ("batch-a", "batch-b")]
        for process in processes:
            process.command = COMMAND
            await process.start().ready()
        campaign = Campaign(world, plan, processes)
        begin, sizes, lines = time.monotonic(), plan.lines, 0
        async with beside(campaign.keep_copies(), campaign.keep_engine()):
            await wait_for_copy(campaign)
            async with beside(campaign.run()):
                while lines == 0 or campaign.faults < plan.least:
                    await run_batches(campaign, sizes)
                    lines += sum(sizes)
                    sizes = (40,)
        report(campaign, lines, time.monotonic() - begin)
        for one in (*processes, world.serve):
            assert one.tracebacks() == [], one.name


async def run_batches(campaign: Campaign, sizes: tuple[int, ...]) -> None:
    """Run batches of these sizes at the same time, for two keys in turn."""
    chance, seconds = random.Random(1), campaign.plan.seconds
    inputs = [
        [line(number, **fields_of(number, seconds * chance.uniform(0.2, 1.8))) for number in range(size)]
        for size in sizes
    ]  # fmt: skip
    keys = [
        key for key, _ in zip(itertools.cycle(campaign.world.keys.values()), sizes, strict=False)
    ]
    batches = []
    for one, key in zip(inputs, keys, strict=True):
        batches.append(
            await patiently(campaign.processes, key, functools.partial(submit, lines=one))
        )
    for one, key, batch_id in zip(inputs, keys, batches, strict=True):
        await check(campaign.processes, key, batch_id, one)


def fields_of(number: int, seconds: float) -> dict[str, Any]:
    """Return what a line asks of its engine."""
    poison = POISON if number % 1000 == 103 else ""
    return {"seconds": seconds, "wrong": number % 50 == 7, "poison": poison}


async def wait_for_copy(campaign: Campaign) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not campaign.copies:  # noqa: ASYNC110 - copies have no event
            await asyncio.sleep(0.05)


async def check(
    processes: list[BatchProcess], key: str, batch_id: str, sent: list[dict[str, Any]]
) -> None:
    """Wait for the end of a batch, and compare its files with its input."""
    batch = await patiently(processes, key, lambda client: ended(client, batch_id))
    assert batch.status == "completed"

    async def files(client: openai.AsyncOpenAI) -> tuple[list[Any], list[Any]]:
        return (
            await lines_of(client, batch.output_file_id),
            await lines_of(client, batch.error_file_id),
        )

    output, errors = await patiently(processes, key, files)
    for found in (output, errors):
        assert numbers(found) == sorted(numbers(found)), "in order"
    assert sorted(numbers(output + errors)) == list(range(len(sent))), "each once"
    for one in output:
        prompt = one["response"]["body"]["prompt"]
        assert f"c-{prompt}" == one["custom_id"], "the answer is that of its line"
    wrong = {number for number in range(len(sent)) if sent[number]["body"]["wrong"]}
    refused = [one for one in errors if one["response"] is not None]
    assert set(numbers(refused)) <= wrong <= set(numbers(errors))
    check_failed(sent, [one for one in errors if one["response"] is None])
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (
        len(sent),
        len(output),
        len(errors),
    )
    words = f"{len(output)} answers, {len(refused)} refused, {len(errors) - len(refused)} given up"
    print(f"batch of {len(sent)}: {words}", flush=True)


def check_failed(sent: list[dict[str, Any]], failed: list[dict[str, Any]]) -> None:
    """Check that lines have no answer only if theirs ended two processes, or five attempts of their own ended."""
    poison = {number for number, one in enumerate(sent) if one["body"]["poison"]}
    assert {one["error"]["code"] for one in failed} <= {"engine_failed"}
    assert poison <= set(numbers(failed)), "a line whose answer ends its reader has no answer"
    others = [one["error"]["message"] for one in failed if numbers([one])[0] not in poison]
    assert all(message.startswith("5 attempts") for message in others), others


def report(campaign: Campaign, lines: int, seconds: float) -> None:
    """Print what happened, and what it cost."""
    logs = [process.log.read_text(errors="replace") for process in campaign.processes]
    ends = sum(text.count("a worker process ended") for text in logs)
    faults = ", ".join(f"{name} {count}" for name, count in sorted(campaign.done.items()))
    print(f"{lines} lines in {seconds:.0f} s; faults: {faults}; {ends} ends of worker processes")


@pytest.mark.promise("batch-one-result")
async def test_500_lines_have_one_result_each_whatever_is_killed(tmp_path: Path) -> None:
    await run_campaign(tmp_path, Plan((300, 200), 0.8, every_s=1.5, old_s=4.0, faults=9, least=9))


@pytest.mark.timeout(3600)
async def test_10_000_lines_have_one_result_each_whatever_is_killed(tmp_path: Path) -> None:
    plan = Plan((5000, 3000, 1500, 500), 1.0, every_s=5.0, old_s=60.0, faults=10_000, least=50)
    await run_campaign(tmp_path, plan)

"""Processes that work at the same time and end, while Redis is killed, emptied and set back again and again."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import pytest

from fleetkeeper_gateway.batch.interfaces import QueueDown
from fleetkeeper_gateway.batch.model import BatchRecord
from fleetkeeper_gateway.batch.queue import RedisQueue
from tests.gateway.batch.queue.world import MODEL, World, batch_of, until, up
from tests.support.guards import GUARD_S

CHUNKS = {"key-a": 600, "key-b": 10, "key-c": 300}
RESETS = 8


class Truth:
    """What the store knows, and the part of the lifecycle that repairs the queue."""

    def __init__(self) -> None:
        self.open: dict[BatchRecord, set[int]] = {
            batch_of(key): set(range(count)) for key, count in CHUNKS.items()
        }
        self.closed = 0

    @property
    def left(self) -> int:
        return sum(map(len, self.open.values()))

    async def repair(self, queue: RedisQueue) -> None:
        """Add what is open when Redis may have forgotten something, or lost an answer."""
        while self.left:
            try:
                for record, chunks in self.open.items():
                    await queue.add(record, MODEL, sorted(chunks))
                for _ in range(20):
                    await asyncio.sleep(0.05)
                    if None in [await queue.state(record) for record in self.open]:
                        break
            except QueueDown:
                await up(queue)

    async def work(self, queue: RedisQueue) -> None:
        """Close the logs of chunks, whoever else has them."""
        while self.left:
            try:
                for key in await queue.keys():
                    held = await queue.take(key, 4)
                    lost = await queue.renew(held, {key: len(held)})
                    await asyncio.sleep(0.01)
                    for each in held:
                        if each not in lost and each.chunk in self.open[each.batch]:
                            self.open[each.batch].discard(each.chunk)
                            self.closed += 1
                        await queue.done(each)
                await asyncio.sleep(0.05)
            except QueueDown:
                await asyncio.sleep(0.01)


async def resets(world: World, truth: Truth, kept: Path, choices: random.Random) -> None:
    """Reset Redis each time when some more chunks are closed."""
    files = world.redis.directory / "appendonlydir"
    for number in range(RESETS):
        seen = truth.closed
        await until(lambda seen=seen: truth.closed >= seen + 40 or not truth.left, "work goes on")  # type: ignore[misc]
        how = choices.choice(["flushed", "emptied", "set back"]) if number else "killed"
        if how == "flushed":
            with world.redis.client() as client:
                client.flushall()
            continue
        world.redis.kill()
        if how == "killed":
            shutil.copytree(files, kept)
        else:
            shutil.rmtree(files)
        if how == "set back":
            shutil.copytree(kept, files)
        world.redis.start()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
async def test_every_chunk_is_done_whatever_ends(world: World, tmp_path: Path, seed: int) -> None:
    truth, choices = Truth(), random.Random(seed)
    lifecycle = await world.queue("lifecycle", idle_s=0.3)
    queues = [await world.queue(f"worker-{number}") for number in range(4)]
    async with asyncio.timeout(GUARD_S), asyncio.TaskGroup() as group:
        group.create_task(truth.repair(lifecycle))
        works = [group.create_task(truth.work(queue)) for queue in queues]
        group.create_task(resets(world, truth, tmp_path / "kept", choices))
        await until(lambda: truth.closed >= 50, "work has begun")
        for number in (0, 1):  # ends without notice, with what it holds
            works[number].cancel()
            await world.end(queues[number])
    assert truth.closed == sum(CHUNKS.values())

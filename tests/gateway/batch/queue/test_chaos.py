"""Processes that work at the same time, while Redis is killed, emptied and set back again and again."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetkeeper_gateway.batch.interfaces import QueueDown
from fleetkeeper_gateway.batch.queue import RedisQueue
from tests.gateway.batch.queue.world import GUARD_S, World, until

LINES = (1500, 40, 700)
RESETS = 12


async def works(world: World, queue: RedisQueue, ended: Callable[[], bool]) -> None:
    """Take lines, write results, and commit them until Redis does it, as a process does."""
    while not ended():
        try:
            taken = await queue.take({"*": 16}, 0.05)
        except QueueDown:
            continue
        for commits in await world.write(taken):
            while True:
                try:
                    await queue.commit(commits)
                    break
                except QueueDown:
                    await queue.until_up(GUARD_S)


async def resets(world: World, kept: Path, choices: random.Random) -> None:
    """Reset Redis each time when some more results were written."""
    files = world.redis.directory / "appendonlydir"
    is_kept = False
    for _ in range(RESETS):
        written = sum(map(len, world.batches.segments.values()))
        await until(
            lambda seen=written: sum(map(len, world.batches.segments.values())) >= seen + 8,  # type: ignore[misc]
            "results are written",
        )
        how = choices.choice(["kept", "emptied", "set back"])
        world.redis.kill()
        if how == "emptied":
            shutil.rmtree(files)
        elif how == "set back" and is_kept:
            shutil.rmtree(files)
            shutil.copytree(kept, files)
        else:
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(files, kept)
            is_kept = True
        world.redis.start()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2])
async def test_every_line_ends_with_one_result(world: World, tmp_path: Path, seed: int) -> None:
    queues = [await world.queue(f"process-{number}") for number in range(3)]
    records = [await world.submit(queues[0], count, f"key-{n}") for n, count in enumerate(LINES)]
    is_over = False
    workers = [asyncio.create_task(works(world, queue, lambda: is_over)) for queue in queues]
    await resets(world, tmp_path / "kept", random.Random(seed))

    async def left() -> int:
        await queues[0].until_up(GUARD_S)
        try:
            found = [await queues[0].outstanding(each) for each in records]
        except QueueDown:
            return 1
        return sum(1 if each is None else each for each in found)

    async with asyncio.timeout(GUARD_S):
        while await left():  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.05)
    is_over = True
    await asyncio.gather(*workers)
    fences: list[int] = []
    for record, count in zip(records, LINES, strict=True):
        segments = world.batches.segments[record.id]
        done = world.done(record)
        assert sorted(map(int, done)) == list(range(count))
        for line, value in done.items():
            name, _, position = value.partition(":")
            assert segments[name][int(position)].line == int(line)
        fences += [result.fence for results in segments.values() for result in results]
    assert len(set(fences)) == len(fences), "two leases had the same fence"
    assert world.rebuilds() >= RESETS / 2

"""At most 200 bytes of Redis for each chunk, and 6 KiB for a batch that has few: a stream begins with 4."""

from __future__ import annotations

import pytest

from tests.gateway.batch.queue.memory import MAX_BYTES, memory_of_states
from tests.gateway.batch.queue.world import World

MAX_BATCH_BYTES = 6144


@pytest.mark.parametrize(
    ("batches", "count"),
    [(30, 196), pytest.param(100, 200, marks=pytest.mark.slow), pytest.param(1, 20_000, marks=pytest.mark.slow), pytest.param(1000, 1, marks=pytest.mark.slow)],
)  # fmt: skip
async def test_a_chunk_takes_at_most_200_bytes_in_every_state(
    world: World, batches: int, count: int
) -> None:
    found = await memory_of_states(world, await world.queue(), batches, count)
    print(f"{batches} batches of {count} chunks, bytes of Redis a chunk: {found}")
    most = MAX_BYTES if count > 1 else MAX_BATCH_BYTES
    assert all(0 < each <= most for each in found.values()), found

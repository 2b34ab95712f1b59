"""At most 200 bytes of Redis for each line, in every state."""

from __future__ import annotations

import pytest

from tests.gateway.batch.queue.memory import MOST_BYTES, memory_of_states
from tests.gateway.batch.queue.world import World


@pytest.mark.exhaustive
async def test_a_line_takes_at_most_200_bytes_in_every_state(world: World) -> None:
    found = await memory_of_states(world, await world.queue(), 50_000)
    assert set(found) == {"queued", "running", "done"}
    assert all(0 < each <= MOST_BYTES for each in found.values()), found

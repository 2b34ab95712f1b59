"""Bytes of Redis for each line of a batch, while its lines wait, run, and are done."""

from __future__ import annotations

from dataclasses import dataclass

from fleetkeeper_gateway.batch.queue import RedisQueue
from tests.gateway.batch.queue.world import World
from tests.support.redis_server import RedisServer

MOST_BYTES = 200
SLOTS = 500


@dataclass(frozen=True, slots=True)
class LineMemory:
    """Bytes for each line."""

    keys: float
    """By MEMORY USAGE of the batch's keys."""
    server: float
    """By what the server uses more than before, without buffers of connections and of its file."""


async def memory_of_states(world: World, queue: RedisQueue, count: int) -> dict[str, LineMemory]:
    """Return the memory of a batch of so many lines in each state."""
    before = used(world.redis)
    record = await world.submit(queue, count)

    def measured() -> LineMemory:
        with world.redis.client() as client:
            keys = [
                f"fleetkeeper:batch:{{{record.id}}}:{part}" for part in ("lines", "done", "meta")
            ]
            found = [client.memory_usage(key, samples=0) or 0 for key in keys]
        total = sum(int(each) for each in found)  # type: ignore[arg-type]
        return LineMemory(total / count, (used(world.redis) - before) / count)

    states = {"queued": measured()}
    taken = []
    while part := await queue.take({"*": SLOTS}, 0):
        taken += part
    assert len(taken) == count
    assert not await queue.renew(taken)
    states["running"] = measured()
    for start in range(0, count, SLOTS):
        assert await world.finish(queue, taken[start : start + SLOTS])
    assert await queue.outstanding(record) == 0
    states["done"] = measured()
    return states


def used(server: RedisServer) -> int:
    """Return the bytes that a server uses for data."""
    with server.client() as client:
        found = client.info("memory")
    buffers = ("mem_clients_normal", "mem_clients_slaves", "mem_aof_buffer")
    return int(found["used_memory"]) - sum(int(found.get(each, 0)) for each in buffers)  # type: ignore[index, union-attr]

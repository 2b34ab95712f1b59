"""Bytes of Redis for each line of a batch, while its lines wait, run, and are done."""

from __future__ import annotations

from fleetkeeper_gateway.batch.interfaces import Taken
from fleetkeeper_gateway.batch.queue import RedisQueue
from tests.gateway.batch.queue.world import GUARD_S, World
from tests.support.redis_server import RedisServer

MOST_BYTES = 200
SLOTS = 500


async def memory_of_states(world: World, queue: RedisQueue, count: int) -> dict[str, float]:
    """Return the bytes for each line of a batch of so many lines, in each state.

    It is what the server uses more than before. MEMORY USAGE does not serve: for the entries of a
    stream that are under a lease it does not count, but multiplies by a guess (four times too much).
    """
    # The scripts, which the server keeps, are no part of a line.
    first = await world.submit(queue, 1)
    one = await queue.take({"*": 1}, GUARD_S)
    await queue.renew(one)
    await world.finish(queue, one)
    await queue.outstanding(first)
    await queue.remove(first)
    before = used(world.redis)

    def bytes_a_line() -> float:
        return (used(world.redis) - before) / count

    record = await world.submit(queue, count)
    states = {"queued": bytes_a_line()}
    taken: list[Taken] = []
    while part := await queue.take({"*": SLOTS}, 0):
        taken += part
    assert len(taken) == count
    assert not await queue.renew(taken)
    states["running"] = bytes_a_line()
    for start in range(0, count, SLOTS):
        assert await world.finish(queue, taken[start : start + SLOTS])
    assert await queue.outstanding(record) == 0
    states["done"] = bytes_a_line()
    return states


def used(server: RedisServer) -> int:
    """Return the bytes that a server uses, without buffers of connections and of its file."""
    with server.client() as client:
        found = client.info("memory")
    buffers = ("mem_clients_normal", "mem_clients_slaves", "mem_aof_buffer")
    return int(found["used_memory"]) - sum(int(found.get(each, 0)) for each in buffers)

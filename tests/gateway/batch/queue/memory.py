"""Bytes of Redis for each chunk, while chunks wait and are held."""

from __future__ import annotations

from fleetkeeper_gateway.batch.interfaces import Held
from fleetkeeper_gateway.batch.queue import RedisQueue
from tests.gateway.batch.queue.world import KEY, World
from tests.support.services.redis_server import RedisServer

MAX_BYTES = 200


async def memory_of_states(
    world: World, queue: RedisQueue, batches: int, count: int
) -> dict[str, float]:
    """Return the bytes for each chunk of so many batches with so many chunks, in each state.

    It is what the server uses more than before. MEMORY USAGE does not serve: for the entries of a
    stream that are held it does not count, but multiplies by a guess.
    """
    # The scripts, which the server keeps, are no part of a chunk.
    first = await world.submit(queue, 1)
    one = await queue.take(KEY, 1)
    await queue.renew(one, {KEY: 1})
    await queue.done(one[0])
    await queue.remove(first)
    before = used(world.redis)
    for _ in range(batches):
        await world.submit(queue, count)
    found = {"waiting": used(world.redis)}
    held: list[Held] = []
    while taken := await queue.take(KEY, 500):
        held += taken
    assert len(held) == batches * count
    assert not await queue.renew(held, {KEY: 256})
    found["held"] = used(world.redis)
    return {state: (after - before) / (batches * count) for state, after in found.items()}


def used(server: RedisServer) -> int:
    """Return the bytes that a server uses, without buffers of connections and of its file."""
    with server.client() as client:
        found = client.info("memory")
    buffers = ("mem_clients_normal", "mem_clients_slaves", "mem_aof_buffer")
    return int(found["used_memory"]) - sum(int(found.get(each, 0)) for each in buffers)

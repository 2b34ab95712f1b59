"""Any one key of Redis may be gone: a DEL by hand, or a server that dropped it."""

from __future__ import annotations

from fleetkeeper_gateway.batch.model import BatchRecord
from fleetkeeper_gateway.batch.queue import RedisQueue
from tests.gateway.batch.queue.world import MODEL, World

KEYS = ("key-a", "key-a", "key-b")
CHUNKS = 6


class Truth:
    """What the store knows: which chunks of which batches are open."""

    def __init__(self) -> None:
        self.open: dict[BatchRecord, set[int]] = {}

    async def busy(self, world: World, queue: RedisQueue, dead: RedisQueue) -> None:
        """Leave chunks in every state."""
        for key in KEYS:
            record = await world.submit(queue, CHUNKS, key)
            self.open[record] = set(range(CHUNKS))
        ended = await world.submit(queue, 1, "key-c")
        self.open[ended] = set()
        await queue.done((await queue.take("key-c", 1))[0])
        for key in ("key-a", "key-b"):
            await self.work(queue, key, 1)
            await dead.take(key, 2)
        await queue.renew([], {"key-a": 2})
        assert await queue.leads("a task")

    async def work(self, queue: RedisQueue, key: str, most: int) -> None:
        """Take chunks and close their logs."""
        for each in await queue.take(key, most):
            self.open[each.batch].discard(each.chunk)
            await queue.done(each)

    async def look(self, queue: RedisQueue) -> None:
        """Look at all batches, as the process that leads does, and work until nothing waits."""
        for record in self.open:
            await queue.state(record)
        while keys := await queue.keys():
            for key in keys:
                await self.work(queue, key, 4)

    async def repair(self, queue: RedisQueue) -> None:
        """Add all chunks that are open, and let those wait that a process held which ended."""
        for record, open_chunks in self.open.items():
            await queue.add(record, MODEL, sorted(open_chunks))
        await queue.release("dead")


def kind_of(name: str, records: list[BatchRecord]) -> str:
    """Return a name that is the same each time."""
    for number, record in enumerate(records):
        name = name.replace(record.id, f"batch-{number}")
    return name


async def test_any_one_key_may_be_gone(world: World) -> None:
    queue, dead = await world.queue("one"), await world.queue("dead")
    kinds: list[str] = []
    for number in range(100):
        truth = Truth()
        await truth.busy(world, queue, dead)
        records = list(truth.open)
        names = {kind_of(name, records): name for name in world.names()}
        if not number:
            kinds = list(names)
            assert len(kinds) == len(set(kinds)) == 4 + 4 + 4  # all have meta and a stream
        if number == len(kinds):
            return
        name = names[kinds[number]]
        with world.redis.client() as client:
            client.delete(name)
        await truth.look(queue)
        for record, left in truth.open.items():
            if record.id not in name:
                assert len(left) <= 2, f"{name}: waiting chunks of another batch were not taken"
        await truth.repair(queue)
        await truth.look(queue)
        assert not any(truth.open.values()), f"{kinds[number]}: {truth.open}"
        for record in records:
            await queue.remove(record)
        with world.redis.client() as client:
            client.delete(*world.names())
    raise AssertionError("there are more kinds of keys than expected")

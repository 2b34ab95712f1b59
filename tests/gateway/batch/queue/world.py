"""Queues of several processes against a real Redis."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from dataclasses import replace as changed

from prometheus_client import REGISTRY
from pydantic import SecretStr

from fleetkeeper_gateway.batch.interfaces import Held
from fleetkeeper_gateway.batch.model import BatchRecord
from fleetkeeper_gateway.batch.queue import RedisQueue, Timing, create_queue
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.limits import LimitSettings
from tests.support.guards import GUARD_S
from tests.support.services.redis_server import RedisServer

PREFIX = "fleetkeeper:batch2:"
KEY = "key-a"
MODEL = "org/tiny ü"
PATIENT = Timing(
    idle_s=3600, settle_s=0, check_s=0.05, retry_s=0.02, connect_s=GUARD_S, call_s=GUARD_S
)
"""Redis answers, however busy the machine is, and chunks are idle when the test says so."""
_numbers = itertools.count(1)


def batch_of(key_id: str = KEY, *, expires: int = 86_400) -> BatchRecord:
    """Return a new batch."""
    name = f"batch_{next(_numbers):032x}"
    return BatchRecord(name, key_id, "file-1", "/v1/chat/completions", "24h", 0, expires)


def chunks(held: Iterable[Held]) -> list[int]:
    """Return the numbers of chunks."""
    return [each.chunk for each in held]


def metric(name: str) -> float:
    """Return the value of a metric of the queue."""
    return REGISTRY.get_sample_value(f"fleetkeeper_gateway_batch_queue_{name}") or 0.0


@dataclass
class World:
    """One Redis, and the queues of several processes."""

    redis: RedisServer
    running: list[tuple[RedisQueue, asyncio.Task[None]]] = field(default_factory=list)

    def begin(self, name: str = "one", timing: Timing = PATIENT, **settings: str) -> RedisQueue:
        """Start the queue of a process."""
        values = {"redis_url": SecretStr(self.redis.url)} | settings
        limits = LimitSettings(**values)  # type: ignore[arg-type]
        queue = create_queue(BatchSettings(), limits, name, timing)
        self.running.append((queue, asyncio.get_running_loop().create_task(queue.run())))
        return queue

    async def queue(self, name: str = "one", **times: float) -> RedisQueue:
        """Start the queue of a process, and wait until it is up."""
        return await up(self.begin(name, changed(PATIENT, **times)))

    async def end(self, queue: RedisQueue) -> None:
        """End a process without notice."""
        (task,) = [task for each, task in self.running if each is queue]
        self.running.remove((queue, task))
        assert not task.done(), "it ended by itself"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """End all processes."""
        for queue, _ in list(self.running):
            await self.end(queue)

    async def submit(
        self, queue: RedisQueue, count: int, key_id: str = KEY, *, model: str = MODEL, expires: int = 86_400
    ) -> BatchRecord:  # fmt: skip
        """Queue a batch with so many chunks."""
        record = batch_of(key_id, expires=expires)
        await queue.add(record, model, range(count))
        return record

    async def counts(self, queue: RedisQueue, record: BatchRecord) -> tuple[int, int]:
        """Return how many chunks of a batch there are in Redis, and how many of them are held."""
        found = await queue.state(record)
        assert found is not None
        with self.redis.client() as client:
            return int(client.xlen(f"{PREFIX}{{{record.id}}}:chunks")), found.held

    def idle(self, held: Iterable[Held], process: str = "one", seconds: float = 3601) -> None:
        """Let time pass in which chunks were not renewed."""
        with self.redis.client() as client:
            for each in held:
                client.xclaim(
                    f"{PREFIX}{{{each.batch.id}}}:chunks", "w", process, 0, [each.entry],
                    idle=int(seconds * 1000), justid=True,
                )  # fmt: skip

    def names(self) -> list[str]:
        """Return the keys of the queue in Redis."""
        with self.redis.client() as client:
            return sorted(client.scan_iter(f"{PREFIX}*"))


async def up(queue: RedisQueue) -> RedisQueue:
    """Wait until a queue is up."""
    await until(lambda: queue.up, "it is up")
    return queue


async def until(ask: Callable[[], bool], what: str) -> None:
    """Wait until something is true."""
    end = asyncio.get_running_loop().time() + GUARD_S
    while not ask():
        assert asyncio.get_running_loop().time() < end, f"never true: {what}"
        await asyncio.sleep(0.01)

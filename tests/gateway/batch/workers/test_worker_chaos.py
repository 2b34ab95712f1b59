"""Workers beside a store, a queue and services that fail in every way, and that are killed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from fleetkeeper_gateway.batch.interfaces import Answer, NotAnswered
from fleetkeeper_gateway.batch.model import BatchRecord
from fleetkeeper_gateway.batch.workers import attempt as attempt_module
from fleetkeeper_gateway.batch.workers import chunk_run as chunk_module
from fleetkeeper_gateway.batch.workers import taker as taker_module
from fleetkeeper_gateway.batch.workers import worker as worker_module
from fleetkeeper_gateway.batch.workers.places import Places
from tests.gateway.batch.workers.memory import MemoryQueue, ScriptedSender, ok
from tests.gateway.batch.workers.working import Running, working

pytestmark = pytest.mark.usefixtures("short_pauses")
PROCESSES = 3
ROUNDS = 200
LINES = 200


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_module, "AGAIN_S", 0.0)
    monkeypatch.setattr(chunk_module, "PART_S", 0.02)
    monkeypatch.setattr(worker_module, "RENEWAL_S", 0.02)
    monkeypatch.setattr(attempt_module, "MAX_REST_S", 0.02)
    monkeypatch.setattr(attempt_module, "UNKNOWN_REST_S", 0.02)
    monkeypatch.setattr(attempt_module, "_UNREAD_S", 0.02)
    monkeypatch.setattr(taker_module, "UNREAD_S", 0.02)


class Services:
    """Answers, refuses, fails and breaks; never so often that a line would run out of attempts."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._failures: dict[tuple[str, int], int] = {}
        self.is_calm = False

    async def __call__(self, key: str, model: str, number: int) -> Answer:
        await asyncio.sleep(self._chance.choice((0.0, 0.01, 0.05)))
        found = 1.0 if self.is_calm else self._chance.random()
        failures = self._failures.setdefault((f"{key}/{model}", number), 0)
        if found < 0.02 and failures < 4:
            self._failures[f"{key}/{model}", number] += 1
            raise NotAnswered("the connection broke", sent=True)
        if found < 0.03:
            raise NotAnswered("cannot connect", sent=False)
        if found < 0.05:
            return Answer(self._chance.choice((429, 503)), b"", "r", 0.001)
        if found < 0.06:
            return Answer(429, b"", "r", 0.01, refused="rate_limit_exceeded")
        return ok(number)


class Chaos:
    """What happens to a pod."""

    def __init__(self, running: Running, records: list[BatchRecord], chance: random.Random) -> None:
        self._running = running
        self._records = records
        self._chance = chance

    async def step(self) -> None:
        """Let one thing happen."""
        steps: list[Callable[[], None]] = [
            lambda: self._running.batches.failing.add(
                self._chance.choice(("append", "read", "index"))
            ),
            self._running.batches.failing.clear,
            lambda: setattr(self._running.objects, "failing", True),
            lambda: setattr(self._running.objects, "failing", False),
            lambda: self._down(is_down=True),
            lambda: self._down(is_down=False),
            self._running.queue.expire,
            self._running.queued.batches.clear,
        ]
        self._chance.choice(steps)()
        if self._chance.random() < 0.1:
            await self._kill()
        await self.repair()

    def _down(self, *, is_down: bool) -> None:
        for queue in self._running.queues:
            queue.down = is_down

    async def _kill(self) -> None:
        """End a process without notice, and start another one."""
        number = self._chance.randrange(PROCESSES)
        self._running.tasks[number].cancel()
        await asyncio.gather(self._running.tasks[number], return_exceptions=True)
        Places(self._running.rows, number, self._running.places).clear()
        self._running.restart(number)

    async def repair(self) -> None:
        """Queue the chunks whose logs are not closed, as the leader does."""
        queue = MemoryQueue(self._running.queued)
        for record in self._records:
            chunks = self._running.batches.open_chunks(record)
            if chunks:
                await queue.add(record, record.metadata["model"], chunks)

    async def end(self) -> None:
        """Let everything work again."""
        self._running.batches.failing.clear()
        self._running.objects.failing = False
        self._down(is_down=False)
        self._running.queue.expire()
        await self.repair()


@pytest.mark.parametrize("seed", range(3))
async def test_each_line_has_one_result_and_none_failed(sender: ScriptedSender, seed: int) -> None:
    chance = random.Random(seed)
    services = sender.script = Services(chance)
    async with working(sender, processes=PROCESSES, places=24, end_s=0.01) as running:
        records = [
            await running.batch(
                LINES,
                number,
                chunk=8,
                key_id=f"key-{number % 4}",
                model=f"m-{number}",
                metadata={"model": f"m-{number}"},
            )
            for number in range(8)
        ]
        chaos = Chaos(running, records, chance)
        for _ in range(ROUNDS):
            await chaos.step()
            await asyncio.sleep(0.005)
        services.is_calm = True
        await chaos.end()
        await running.done(*records)
        for record in records:
            lines = running.lines(record)
            assert [one.line for one in lines] == list(range(LINES))
            assert all(one.ok for one in lines)
        assert len(sender.sent) > len(records) * LINES, "nothing was lost"
        await running.stop()
        assert [worker.held for worker in running.workers] == [0] * PROCESSES
        assert Places(running.rows, 0, 24).running == 0

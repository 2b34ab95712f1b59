"""The queue against a naive one, over random steps of several processes and resets of Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fleetkeeper_gateway.batch.interfaces import Held, flow_of
from fleetkeeper_gateway.batch.model import BatchRecord
from fleetkeeper_gateway.batch.queue import RedisQueue
from tests.gateway.batch.queue.world import World, batch_of
from tests.support.lanes import examples
from tests.support.services.redis_server import RedisServer, redis_server

T = TypeVar("T")
NAMES = ("one", "two")
processes = st.sampled_from(NAMES)
keys = st.sampled_from(["a", "b"])
models = st.sampled_from(["m", "n/o"])
choices = st.integers(0, 10_000)


@dataclass
class Batch:
    """A batch in the naive queue."""

    record: BatchRecord
    model: str
    chunks: dict[int, tuple[str, Held] | None]
    """The process that holds each chunk, and what it was given; None: it waits."""

    @property
    def waiting(self) -> list[int]:
        return [chunk for chunk, holder in self.chunks.items() if holder is None]


class QueueMachine(RuleBasedStateMachine):
    """Two processes and one Redis."""

    server: ClassVar[RedisServer]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.batches: dict[str, Batch] = {}
        self.given: list[Held] = []
        """All that was ever taken."""
        self.emptied: set[str] = set()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @initialize()
    def begin(self) -> None:
        with self.server.client() as client:
            client.flushall()
        self.world = World(self.server)
        self.run(self._begin())

    async def _begin(self) -> None:
        self.queues = {name: await self.world.queue(name) for name in NAMES}

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.run(self.world.close())
        self.runner.close()

    def queue(self, process: str) -> RedisQueue:
        return self.queues[process]

    def holder(self, held: Held) -> str | None:
        """Return the process that holds it, if one still does."""
        batch = self.batches.get(held.batch.id)
        found = batch and batch.chunks.get(held.chunk)
        return found[0] if found and found[1] == held else None

    def held(self, process: str | None = None) -> Iterator[tuple[Batch, int, Held]]:
        for batch in self.batches.values():
            for chunk, found in batch.chunks.items():
                if found and process in {None, found[0]}:
                    yield batch, chunk, found[1]

    def chosen(self, which: list[int]) -> list[Held]:
        return list({self.given[each % len(self.given)]: None for each in which})

    # Steps.

    @rule(process=processes, key=keys, model=models, expires=st.integers(0, 3), count=st.integers(1, 5))  # fmt: skip
    def submit(self, process: str, key: str, model: str, expires: int, count: int) -> None:
        record = batch_of(key, expires=expires)
        self.batches[record.id] = Batch(record, model, dict.fromkeys(range(count)))
        self.run(self.queue(process).add(record, model, range(count)))

    @precondition(lambda self: self.batches)
    @rule(process=processes, which=choices, numbers=st.sets(st.integers(0, 6), min_size=1))
    def add_again(self, process: str, which: int, numbers: set[int]) -> None:
        batch = list(self.batches.values())[which % len(self.batches)]
        self.run(self.queue(process).add(batch.record, batch.model, numbers))
        for number in numbers:
            batch.chunks.setdefault(number, None)

    @rule(process=processes, key=keys, most=st.integers(1, 6), skipped=st.sets(models), before=st.none() | st.integers(0, 4))  # fmt: skip
    def take(
        self, process: str, key: str, most: int, skipped: set[str], before: int | None
    ) -> None:
        skip = [flow_of(key, model) for model in skipped]
        taken = self.run(self.queue(process).take(key, most, skip, before=before))
        fit = [
            batch
            for batch in self.batches.values()
            if batch.record.key_id == key
            and batch.model not in skipped
            and (before is None or batch.record.expires < before)
        ]
        fit.sort(key=lambda batch: (batch.record.expires, batch.record.id))
        expected = [batch.record.id for batch in fit for _ in batch.waiting][:most]
        assert [each.batch.id for each in taken] == expected
        for each in taken:
            batch = self.batches[each.batch.id]
            assert batch.chunks[each.chunk] is None, f"taken twice: {each}"
            assert (each.batch, each.model) == (batch.record, batch.model)
            batch.chunks[each.chunk] = process, each
        self.given += taken

    @precondition(lambda self: self.given)
    @rule(process=processes, which=st.lists(choices, min_size=1, max_size=6))
    def renew(self, process: str, which: list[int]) -> None:
        chosen = self.chosen(which)
        lost = self.run(self.queue(process).renew(chosen, {}))
        assert lost == {each for each in chosen if self.holder(each) != process}

    @precondition(lambda self: self.given)
    @rule(process=processes, which=st.lists(choices, min_size=1, max_size=6))
    def give_back(self, process: str, which: list[int]) -> None:
        chosen = self.chosen(which)
        self.run(self.queue(process).give_back(chosen))
        for each in chosen:
            if self.holder(each) == process:
                self.batches[each.batch.id].chunks[each.chunk] = None

    @precondition(lambda self: self.given)
    @rule(process=processes, which=choices)
    def done(self, process: str, which: int) -> None:
        (held,) = self.chosen([which])
        self.run(self.queue(process).done(held))
        if self.holder(held) == process:
            batch = self.batches[held.batch.id]
            del batch.chunks[held.chunk]
            if not batch.chunks:
                self.emptied.add(held.batch.id)

    @rule(which=st.sets(st.integers(0, 5)))
    def revive(self, which: set[int]) -> None:
        """Some of what is held was not renewed. The invariant's `state` lets it wait."""
        idle = [each for number, each in enumerate(self.held()) if number in which]
        for batch, chunk, held in idle:
            self.world.idle([held], self.holder(held) or "")
            batch.chunks[chunk] = None

    @rule(process=processes, ended=processes)
    def release(self, process: str, ended: str) -> None:
        self.run(self.queue(process).release(ended))
        for batch, chunk, _ in list(self.held(ended)):
            batch.chunks[chunk] = None

    @precondition(lambda self: self.batches)
    @rule(process=processes, which=choices)
    def remove(self, process: str, which: int) -> None:
        name = list(self.batches)[which % len(self.batches)]
        self.run(self.queue(process).remove(self.batches.pop(name).record))
        self.emptied.discard(name)

    @rule(process=processes)
    def ask_emptied(self, process: str) -> None:
        assert set(self.run(self.queue(process).emptied())) == self.emptied
        self.emptied.clear()

    @rule()
    def flush(self) -> None:
        with self.server.client() as client:
            client.flushall()
        self.batches.clear()
        self.emptied.clear()

    # What always holds.

    @invariant()
    def each_chunk_waits_or_is_held_once(self) -> None:
        if not hasattr(self, "queues"):
            return
        queue = self.queues["two"]
        for batch in self.batches.values():
            count = len(batch.chunks)
            expected = count, count - len(batch.waiting)
            assert self.run(self.world.counts(queue, batch.record)) == expected
        waiting = {each.record.key_id for each in self.batches.values() if each.waiting}
        assert self.run(queue.keys()) == dict.fromkeys(waiting, 0)


@pytest.mark.slow
def test_the_queue_does_what_a_naive_one_does(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        QueueMachine.server = server
        run_state_machine_as_test(
            QueueMachine,
            settings=settings(
                examples(60), stateful_step_count=40, suppress_health_check=list(HealthCheck)
            ),
        )

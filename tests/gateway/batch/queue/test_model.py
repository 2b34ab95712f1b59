"""The queue against a naive one, over random steps of several processes and resets of Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
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

from fleetkeeper_gateway.batch.interfaces import Commit, QueueDown, Taken
from fleetkeeper_gateway.batch.model import BatchRecord
from fleetkeeper_gateway.batch.queue import RedisQueue
from tests.gateway.batch.queue.test_resets import kept_by, set_back
from tests.gateway.batch.queue.world import LEASE_S, World, until
from tests.support.lanes import examples
from tests.support.redis_server import RedisServer, redis_server

T = TypeVar("T")
Line = tuple[str, int]
processes = st.integers(0, 1)
choices = st.integers(0, 10_000)


@dataclass
class Naive:
    """A line in the naive queue."""

    attempts: int = 0
    """That count, without the one that runs."""
    lease: Taken | None = None
    written: bool = False
    """Whether a segment has a result of it."""
    done: bool = False
    counted: int = 0


class QueueMachine(RuleBasedStateMachine):
    """Two processes and one Redis."""

    server: ClassVar[RedisServer]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.lines: dict[Line, Naive] = {}
        self.records: list[BatchRecord] = []
        self.leases: list[Taken] = []
        """All that were ever given out."""
        self.written: list[list[Commit]] = []
        """Results in segments that may be committed at any time."""
        self.fence = 0
        self.kept: dict[bytes, bytes] | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @initialize()
    def begin(self) -> None:
        with self.server.client() as client:
            client.flushall()
        self.world = World(self.server)
        self.run(self._begin())

    async def _begin(self) -> None:
        for name in ("one", "two"):
            await self.world.queue(name)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.run(self._finish_all())
            finally:
                self.run(self.world.close())
        self.runner.close()

    def queue(self, process: int) -> RedisQueue:
        return self.world.queues[process]

    # Steps.

    @rule(process=processes, count=st.integers(1, 5), key=st.sampled_from(["a", "b"]))
    def submit(self, process: int, count: int, key: str) -> None:
        record = self.run(self.world.submit(self.queue(process), count, key))
        self.records.append(record)
        self.lines |= {(record.id, number): Naive() for number in range(count)}

    @precondition(lambda self: self.records)
    @rule(process=processes, which=choices)
    def add_again(self, process: int, which: int) -> None:
        record = self.records[which % len(self.records)]
        self.run(self.queue(process).add(record, *self.world.batches.found[record.id]))

    @rule(process=processes, most=st.integers(1, 6))
    def take(self, process: int, most: int) -> None:
        self.took(self.run(self.queue(process).take({"*": most}, 0)), most)

    def took(self, taken: Sequence[Taken], most: int) -> None:
        assert len(taken) <= most
        for each in taken:
            line = self.lines[each.batch.id, each.line.number]
            assert not line.done, f"a line with a result was taken: {each}"
            assert line.lease is None, f"a line was taken twice: {each}"
            assert each.attempt == line.attempts + 1
            assert each.fence > self.fence
            self.fence = each.fence
            line.lease = each
            self.leases.append(each)
        if len(taken) < most:
            waiting = [key for key, line in self.lines.items() if not line.done and not line.lease]
            assert not waiting, f"lines were lost: {waiting}"

    @precondition(lambda self: self.leases)
    @rule(process=processes, which=st.lists(choices, min_size=1, max_size=5))
    def renew(self, process: int, which: list[int]) -> None:
        chosen = [self.leases[number % len(self.leases)] for number in which]
        lost = self.run(self.queue(process).renew(chosen))
        assert lost == {each for each in chosen if not self.ours(each)}

    @precondition(lambda self: self.leases)
    @rule(process=processes, which=choices, counts=st.booleans())
    def give_back(self, process: int, which: int, counts: bool) -> None:
        taken = self.leases[which % len(self.leases)]
        self.run(self.queue(process).give_back([taken], attempt_counts=counts))
        if self.ours(taken):
            line = self.line(taken)
            line.lease, line.attempts = None, taken.attempt - (not counts)

    @precondition(lambda self: self.leases)
    @rule(which=st.lists(choices, min_size=1, max_size=4), ok=st.booleans())
    def write(self, which: list[int], ok: bool) -> None:
        """Results become durable. Whether they are ever committed is open."""
        chosen = {self.leases[number % len(self.leases)] for number in which}
        # A process knows that a lease was lost in a reset before it writes another result.
        chosen = {each for each in chosen if self.line(each).lease == each}
        if not chosen:
            return
        self.written += self.run(self.world.write(sorted(chosen, key=lambda e: e.fence), ok=ok))
        for each in chosen:
            self.line(each).written = True

    @precondition(lambda self: self.written)
    @rule(process=processes, which=choices)
    def commit(self, process: int, which: int) -> None:
        """Also what was committed before, or is late."""
        commits = self.written[which % len(self.written)]
        recorded = {
            each.taken.line.number
            for each in commits
            if self.world.done(each.taken.batch).get(str(each.taken.line.number))
            == f"{each.segment}:{each.offset}"
        }
        current = {each.taken.line.number for each in commits if self.ours(each.taken)}
        counted = self.run(self.queue(process).commit(commits))
        assert counted == current | recorded
        for each in commits:
            if each.taken.line.number in current:
                line = self.line(each.taken)
                line.lease, line.done = None, True
                line.counted += 1

    @rule(process=processes)
    def expire(self, process: int) -> None:
        self.world.clock.advance(LEASE_S + 1)
        self.run(self.queue(process).check())
        for line in self.lines.values():
            if line.lease is not None:
                line.attempts, line.lease = line.lease.attempt, None

    @rule()
    def keep(self) -> None:
        self.kept = kept_by(self.world)

    @rule(how=st.sampled_from(["kill", "flush", "set back"]), step=st.sampled_from(["take", "renew", "commit"]), process=processes)  # fmt: skip
    def reset(self, how: str, step: str, process: int) -> None:
        """Redis loses data, and the next call finds out before it does anything."""
        self.run(self._reset(how, step, self.queue(process)))
        for line in self.lines.values():
            line.done = line.done or line.written
            line.lease, line.attempts = None, 0

    async def _reset(self, how: str, step: str, queue: RedisQueue) -> None:
        epoch = max(each._link.epoch for each in self.world.queues)
        if how == "set back" and self.kept is not None:
            # Twice: a call that was sent before the first answer may hide one lost tick (guard.lua).
            for each in (*self.world.queues, *self.world.queues):
                await each.check()
            set_back(self.world, self.kept)
        elif how == "kill":
            self.server.kill()
            self.server.start()
        else:
            with self.server.client() as client:
                client.flushall()
        self.kept = None
        calls: dict[str, Awaitable[object]] = {
            "take": queue.take({"*": 3}, 0),
            "renew": queue.renew(self.leases[-3:]),
            "commit": queue.commit(self.written[-1] if self.written else []),
        }
        chosen = calls.pop(step)
        for other in calls.values():
            other.close()  # type: ignore[attr-defined]
        if (
            step == "take"
            or (self.leases and step == "renew")
            or (self.written and step == "commit")
        ):
            try:
                found = await chosen
            except QueueDown:
                pass
            else:
                raise AssertionError(f"{step} was done after {how}: {found}")
        else:
            await chosen
        await until(
            lambda: all(each.up and each._link.epoch > epoch for each in self.world.queues),
            "all processes work in the next epoch",
        )

    # What always holds.

    @invariant()
    def progress_is_known(self) -> None:
        if not self.records:
            return
        found = self.run(self._outstanding())
        for record, outstanding in zip(self.records, found, strict=True):
            mine = [line for (name, _), line in self.lines.items() if name == record.id]
            assert outstanding == sum(not line.done for line in mine)
            assert all(line.counted <= 1 for line in mine)

    async def _outstanding(self) -> list[int | None]:
        return [await self.queue(0).outstanding(record) for record in self.records]

    async def _finish_all(self) -> None:
        """Every line ends with exactly one result that is in a segment."""
        queue = self.queue(1)
        self.world.clock.advance(LEASE_S + 1)
        await queue.check()
        drained = {(each.batch.id, each.line.number) for each in await self.world.drain(queue)}
        assert drained == {key for key, line in self.lines.items() if not line.done}
        for record in self.records:
            done = self.world.done(record)
            total = self.world.batches.found[record.id][0].lines
            assert sorted(map(int, done)) == list(range(total))
            for number, value in done.items():
                segment, _, position = value.partition(":")
                result = self.world.batches.segments[record.id][segment][int(position)]
                assert result.line == int(number)
            assert await queue.outstanding(record) == 0

    # Helpers.

    def line(self, taken: Taken) -> Naive:
        return self.lines[taken.batch.id, taken.line.number]

    def ours(self, taken: Taken) -> bool:
        return self.line(taken).lease == taken


@pytest.mark.slow
def test_every_line_gets_exactly_one_result(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        QueueMachine.server = server
        run_state_machine_as_test(
            QueueMachine,
            settings=settings(
                examples(30),
                stateful_step_count=40,
                suppress_health_check=list(HealthCheck),
            ),
        )

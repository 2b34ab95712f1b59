"""The parent of worker processes, with real ones."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from fleetkeeper_gateway.batch.going_on import happens_within
from fleetkeeper_gateway.batch.interfaces import QueueDown, Route, StorageError
from fleetkeeper_gateway.batch.metrics import OfAllProcesses
from fleetkeeper_gateway.batch.model import Attempt, BatchRecord, Result, Trouble
from fleetkeeper_gateway.batch.processes import pool as module
from fleetkeeper_gateway.batch.processes.pool import Pool, Slot
from tests.support.batch import worker_children as children
from tests.support.guards import GUARD_S


class MemoryLog:
    """A log of a chunk that keeps attempts."""

    def __init__(self, done: AbstractSet[int] = frozenset()) -> None:
        self.done, self.closed = done, False
        self.reads = 0
        self.attempts: list[Attempt] = []

    async def read(self) -> None:
        self.reads += 1

    async def append(
        self, results: Sequence[Result], attempts: Sequence[Attempt], *, close: bool = False
    ) -> AbstractSet[int]:
        assert (list(results), close, self.reads > 0) == ([], False, True)
        self.attempts += attempts
        return frozenset()


class World:
    """A pool, and the store and the queue as it knows them."""

    def __init__(self, *slots: Slot, stop_s: float = 30.0) -> None:
        self.slots = slots
        self.record = BatchRecord(children.BATCH, "key-1", "file-1", "/v1/x", "24h", 0, 9)
        self.logs = {0: MemoryLog(), 1: MemoryLog()}
        self.events: list[str] = []
        self.store_fails = 0
        self.queue_is_down = False
        counters = CollectorRegistry()
        self.own = Counter("fleetkeeper_gateway_batch_lines", "-", ("outcome",), registry=counters)
        Gauge("fleetkeeper_gateway_batch_running_lines", "-", registry=counters)
        self.shown = OfAllProcesses(counters)
        self.pool = Pool(
            slots,
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            route=lambda key_id, model: Route(f"service {key_id}/{model}"),
            shown=self.shown,
            stop_s=stop_s,
        )
        self.task: asyncio.Task[None]

    # as Batches

    async def active(self) -> list[BatchRecord]:
        if self.store_fails:
            self.store_fails -= 1
            raise StorageError("the test says so")
        return [self.record]

    async def index(self, _record: BatchRecord) -> Any:
        class Index:
            chunks = (range(3), range(3, 5))

        return Index

    def log(self, _record: BatchRecord, chunk: int, lines: range) -> MemoryLog:
        assert lines == (range(3), range(3, 5))[chunk]
        return self.logs[chunk]

    # as Queue

    async def release(self, process: str) -> None:
        self.events.append(f"release {process} {len(self.logs[1].attempts)}")
        if self.queue_is_down:
            raise QueueDown("the test says so")

    # as a test

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(GUARD_S):
            while not holds():
                assert not self.task.done(), self.task
                await asyncio.sleep(0.01)
        assert what

    def value(self, name: str) -> float:
        return sum(
            sample.value
            for metric in self.shown.collect()
            for sample in metric.samples
            if sample.name == f"fleetkeeper_gateway_batch_{name}"
        )


@asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    world.task = asyncio.create_task(world.pool.run())
    try:
        yield world
    finally:
        world.pool.stop()
        await asyncio.wait_for(world.task, GUARD_S)


@pytest.mark.parametrize("store_fails", [0, 2])
async def test_a_process_that_dies_over_an_answer_blames_exactly_that_line(
    monkeypatch: pytest.MonkeyPatch, store_fails: int
) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    world = World(children.slot_of(children.die_while_handling))
    world.store_fails, world.queue_is_down = store_fails, bool(store_fails)
    async with running(world):
        await world.until("it died", lambda: len(world.events) >= 1)
    assert world.logs[1].attempts[:1] == [Attempt(children.LINE, Trouble.KILLED)]
    assert world.logs[0].attempts == []
    # The attempt is noted before others can take the chunk.
    assert world.events[0] == "release w-0 1"


async def test_a_process_that_dies_otherwise_blames_no_line_and_is_replaced_ever_more_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it counted stays, and what it runs goes with it."""
    pauses: list[float] = []

    async def noted(event: asyncio.Event, seconds: float) -> bool:
        if seconds != module._LISTEN_S:
            pauses.append(seconds)
        # The last pause is a real one, so no further process begins.
        return await happens_within(event, 0.0 if len(pauses) in {1, 2} else GUARD_S)

    monkeypatch.setattr(module, "_LISTEN_S", 60.0)
    monkeypatch.setattr(module, "happens_within", noted)
    world = World(children.slot_of(children.count_and_die))
    world.own.labels("ok").inc(2)
    async with running(world):
        await world.until("it died often", lambda: len(pauses) == 3)
        assert world.value("lines_total") == 2 + 5 * 4
    assert (len(world.events), pauses) == (4, [0.5, 1.0, 2.0])
    assert world.logs[1].attempts == []
    assert world.value("running_lines") == 0


async def test_a_line_that_has_a_result_is_not_blamed() -> None:
    world = World(children.slot_of(children.die_while_handling))
    world.logs[1].done = frozenset({children.LINE})
    async with running(world):
        await world.until("it died", lambda: len(world.events) >= 1)
    assert (world.logs[1].attempts, world.logs[1].reads > 0) == ([], True)


async def test_a_process_that_needs_too_much_memory_ends_alone() -> None:
    slots = children.slot_of(children.need_too_much), children.slot_of(children.listen, "w-1")
    async with running(World(*slots)) as world:
        await world.until("it died", lambda: bool(world.logs[1].attempts))
        await world.until("the other lives", lambda: slots[1].process is not None)
        assert "release w-1" not in " ".join(world.events)


async def test_processes_drain_at_the_end() -> None:
    slots = children.slot_of(children.listen), children.slot_of(children.listen, "w-1")
    async with running(World(*slots)) as world:
        # They say something once they handle SIGTERM.
        await world.until("they run", lambda: world.value("lines_total") == 2)
        processes = [slot.process for slot in slots if slot.process is not None]
    assert [process.exitcode for process in processes] == [0, 0]


async def test_a_process_that_does_not_end_is_killed_and_its_line_is_not_to_blame() -> None:
    slot = children.slot_of(children.handle_until_the_end)
    async with running(World(slot, stop_s=0.1)) as world:
        await world.until("it handles", lambda: slot.handling.read() is not None)
        await world.until("it said so", lambda: world.value("lines_total") == 1)
        process = slot.process
    assert process is not None
    assert process.exitcode == -signal.SIGKILL
    assert world.logs[1].attempts == []


async def test_a_process_that_cannot_be_understood_is_replaced_and_its_line_is_not_to_blame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_EXIT_S", 0.01)
    async with running(World(children.slot_of(children.say_nonsense), stop_s=0)) as world:
        await world.until("it was replaced", lambda: len(world.events) >= 2)
    assert world.logs[1].attempts == []


@pytest.mark.parametrize("is_broken", [False, True])
async def test_a_process_is_named_the_service_of_its_lines_or_their_flow(
    monkeypatch: pytest.MonkeyPatch, *, is_broken: bool
) -> None:
    def broken(_key_id: str, _model: str) -> str:
        raise ValueError("a defect")

    world = World(children.slot_of(children.ask_for_a_route), stop_s=0)
    if is_broken:
        monkeypatch.setattr(world.pool, "_route", broken)
    length = len("key-1/m" if is_broken else "service key-1/m")
    async with running(world):
        await world.until("it got the answer", lambda: world.value("running_lines") == length)


async def test_a_process_that_is_frozen_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds places that no other process can use."""
    monkeypatch.setattr(module, "_LISTEN_S", 0.02)
    monkeypatch.setattr(module, "_MAX_SILENT", 1_000_000)
    slot = children.slot_of(children.listen)
    async with running(World(slot)) as world:
        await world.until("it says something", lambda: world.value("lines_total") == 1)
        process = slot.process
        assert process is not None
        assert process.pid is not None
        psutil.Process(process.pid).suspend()
        monkeypatch.setattr(module, "_MAX_SILENT", 5)
        await world.until("it was killed", lambda: len(world.events) >= 1)
        assert process.exitcode == -signal.SIGKILL


async def test_what_is_loaded_before_a_fork_starts_no_thread() -> None:
    """A fork has none of the threads, and may wait for ever for what they held."""
    code = "import os, fleetkeeper_gateway.batch.processes.child as _; print(len(os.listdir('/proc/self/task')))"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), GUARD_S)
    assert output == b"1\n"


async def test_processes_end_with_their_parent() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.batch.worker_children", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        line = b""
        while not line.startswith(b"pids "):
            line = await asyncio.wait_for(parent.stdout.readline(), GUARD_S)
            assert line, "it ended"
        processes = [psutil.Process(int(pid)) for pid in line.split()[1:]]
        assert len(processes) == 2
    finally:
        parent.kill()
        await parent.wait()
    ends = time.monotonic() + GUARD_S
    while any(process.is_running() for process in processes):
        assert time.monotonic() < ends
        await asyncio.sleep(0.01)

"""A chunk while its log is written in more than one part."""

from __future__ import annotations

import asyncio

from fleetkeeper_gateway.batch.interfaces import Held
from fleetkeeper_gateway.batch.model import LineRef, Result
from fleetkeeper_gateway.batch.storage.chunk_log import ChunkLog
from fleetkeeper_gateway.batch.workers.attempt import GivenBack
from fleetkeeper_gateway.batch.workers.chunk_run import ChunkRun
from tests.gateway.batch.workers.memory import batch_record, until


class TwoParts:
    """A store whose second part waits."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.second = asyncio.Event()

    async def create(self, path: str, content: bytes) -> bool:
        if self.data:
            await self.second.wait()
        self.data[path] = content
        return True

    async def read(self, path: str) -> bytes | None:
        return self.data.get(path)


async def test_a_line_whose_attempts_are_being_written_is_not_sent() -> None:
    """Until the last part is written, they are in the log and in memory, and would count twice."""
    store, lines = TwoParts(), range(5)
    log = ChunkLog(store, lambda number: f"c/{number}", lines)  # type: ignore[arg-type]
    held = Held(batch_record(), "m", 0, "1")
    run = ChunkRun(held, log, {line: LineRef(line, 0, 1) for line in lines}, "route")
    await run.load()
    for line in lines:
        run.next(0.0)
        run.running[line] = asyncio.get_running_loop().create_future()  # type: ignore[assignment]
    run.ended(0, GivenBack(attempt_counts=True), 0.0)
    for line in (1, 2, 3):
        run.ended(line, Result(line, ok=True, text=b"x" * 6_000_000), 0.0)
    assert run.waiting(1000.0) == 1
    run.is_writing = True
    writing = asyncio.create_task(run.write(1000.0))
    await until("the first part is written", lambda: len(store.data) == 1)
    await asyncio.sleep(0)
    assert run.waiting(1000.0) == 0
    store.second.set()
    await writing
    run.is_writing = False
    assert (run.waiting(1000.0), run.tried(0)) == (1, (1, 0))

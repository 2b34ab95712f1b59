"""The chunks that this process holds: decides when their results are written, and when they are released."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import structlog

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import Held, Queue, QueueDown, StorageError
from fleetkeeper_gateway.batch.workers.chunk_run import ChunkRun
from fleetkeeper_gateway.batch.workers.pace import Paces

log = structlog.get_logger(__name__)

RESULT_BYTES: Final = 67_108_864
"""Maximum bytes of unwritten results: beyond it, no lines are sent and no large answers are read. From half of
it on, the largest chunk is written."""
LEAVE_S: Final = 5.0
"""Maximum rest of a key or service for which its chunks are kept. Beyond it, they are given back."""
FIRST_PAUSE_S: Final = 0.2
_MAX_PAUSE_S: Final = 10.0


class Holding:
    """The chunks of a process. A chunk that cannot be written stops the lines of its key only."""

    def __init__(
        self,
        queue: Queue,
        paces: Paces,
        changed: Callable[[], None],
        may_read: asyncio.Event,
        monotonic: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._paces = paces
        self._changed = changed
        self._may_read = may_read
        self._monotonic = monotonic
        self.held: dict[Held, ChunkRun | None] = {}
        """All held chunks, and the lines of each once it is loaded."""
        self._writing: set[asyncio.Task[None]] = set()
        self._rests: dict[str, float] = {}
        """Resting keys, each with the end of its rest."""

    @property
    def runs(self) -> Sequence[ChunkRun]:
        """Return the loaded chunks, the earliest deadline first."""
        return sorted(self._loaded, key=lambda run: run.held.batch.expires)

    @property
    def _loaded(self) -> Sequence[ChunkRun]:
        return [run for run in self.held.values() if run is not None]

    def add(self, run: ChunkRun) -> None:
        """Add a chunk that was taken and loaded."""
        if run.held in self.held:
            self.held[run.held] = run
            self._changed()

    def drop(self, held: Held) -> None:
        """Stop holding a chunk. Unless the queue is informed, the chunk waits again after a minute."""
        run = self.held.pop(held, None)
        if run is not None:
            run.cancel()

    def of_key(self, key: str | None) -> int:
        """Return the number of chunks of a key."""
        return sum(held.batch.key_id == key for held in self.held)

    # -- lines ------------------------------------------------------------------------------------

    def stops(self, key: str, now: float) -> bool:
        """Return whether no line of a key may be sent now."""
        runs = self._loaded
        is_full = sum(run.bytes for run in runs) > RESULT_BYTES
        is_failing = any(run.is_failing and run.key == key for run in runs)
        return is_full or is_failing or self._rests.get(key, 0.0) > now

    def rest(self, key: str, until: float) -> None:
        """Stop the lines of a key until a time."""
        self._rests[key] = max(until, self._rests.get(key, 0.0))

    def wakes(self, now: float) -> float:
        """Return the time at which a chunk must be checked again without an event."""
        dues = [run.wakes(now) for run in self._loaded if not run.is_writing]
        return min(
            [*dues, *(until for until in self._rests.values() if until > now)], default=now + 1
        )

    # -- results ----------------------------------------------------------------------------------

    def tend(self, now: float) -> None:
        """Start to write the parts that are due, and to give back chunks that do not continue."""
        runs = self._loaded
        idle = [run for run in runs if not run.is_writing]
        if sum(run.bytes for run in runs) > RESULT_BYTES:
            self._may_read.clear()
        else:
            self._may_read.set()
        is_much = sum(run.bytes for run in idle) > RESULT_BYTES / 2
        largest = max(idle, key=lambda run: run.bytes, default=None) if is_much else None
        for run in idle:
            run.is_ending |= not run.running and self._rests_long(run, now)
            if run.is_over or run is largest or run.part_is_due(now):
                run.is_writing = True
                task = asyncio.create_task(self._settle(run))
                self._writing.add(task)
                task.add_done_callback(self._writing.discard)

    def _rests_long(self, run: ChunkRun, now: float) -> bool:
        key_s = self._rests.get(run.key, 0.0) - now
        return max(key_s, self._paces.of(run.route).rests(now)) > LEAVE_S

    async def _settle(self, run: ChunkRun) -> None:
        """Write the results of a chunk, and release it if its log is closed or it does not continue."""
        held = run.held
        try:
            await self._write(run)
            if run.log.closed:
                await self.let_go([held], self._queue.done(held))
            elif run.is_over and not run.has_news:
                await self.let_go([held], self._queue.give_back([held]))
        except Exception:
            metrics.DEFECTS.labels("part").inc()
            log.exception("results cannot be kept", batch=held.batch.id, chunk=held.chunk)
            self.drop(held)
        finally:
            run.is_writing = run.is_failing = False
            self._changed()

    async def _write(self, run: ChunkRun) -> None:
        pause_s = FIRST_PAUSE_S
        while run.has_news or (run.is_complete and not run.log.closed):
            try:
                await run.write(self._monotonic())
            except StorageError as error:
                metrics.STORE_FAILURES.labels("part").inc()
                log.warning("results cannot be written; trying again", error=str(error))
                run.is_failing = True
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
                pause_s = min(_MAX_PAUSE_S, pause_s * 2)
            else:
                return

    async def let_go(self, held: Iterable[Held], call: Awaitable[None]) -> None:
        """Stop holding chunks, and inform the queue by `call`."""
        # Before the call: a chunk that is given back may be taken again at once.
        runs = [self.held.pop(chunk, None) for chunk in held]
        try:
            await call
        except QueueDown as error:
            metrics.QUEUE_FAILURES.labels("let_go").inc()
            log.info("chunks cannot be let go", reason=str(error))
        for run in runs:
            if run is not None:
                run.cancel()

    async def end(self, timeout_s: float) -> None:
        """Write all results, within a bounded time, and give all chunks back."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*self._writing)
                await asyncio.gather(*map(self._settle, self._loaded))
        except TimeoutError:
            left = sum(run.bytes for run in self._loaded)
            log.warning("results are lost, and computed again later", bytes=left)
        held = list(self.held)
        await self.let_go(held, self._queue.give_back(held))

"""The chunks that this process holds: what is written of them when, and when they are let go."""

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
"""Of all results that are not written, after which no more lines are sent and no large answers read. From half
of it on the largest chunk is written."""
LEAVE_S: Final = 5.0
"""A chunk whose key or service rests for longer is given back."""
FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 10.0


class Holding:
    """The chunks of one process. A failure of one of them stops the lines of its key alone."""

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
        """All of them from their taking on, and their lines once they are loaded."""
        self._writing: set[asyncio.Task[None]] = set()
        self._rests: dict[str, float] = {}
        """Keys at a limit of their own, until when."""

    @property
    def runs(self) -> Sequence[ChunkRun]:
        """Return the chunks that were loaded, the earliest deadline first."""
        return sorted(self._loaded, key=lambda run: run.held.batch.expires)

    @property
    def _loaded(self) -> Sequence[ChunkRun]:
        return [run for run in self.held.values() if run is not None]

    def add(self, run: ChunkRun) -> None:
        """Run the lines of a chunk that was taken and loaded."""
        if run.held in self.held:
            self.held[run.held] = run
            self._changed()

    def drop(self, held: Held) -> None:
        """Hold a chunk no more. If nobody said so to the queue, it waits again after a minute."""
        run = self.held.pop(held, None)
        if run is not None:
            run.cancel()

    def of_key(self, key: str | None) -> int:
        """Return the number of chunks of a key."""
        return sum(one.batch.key_id == key for one in self.held)

    # -- what may be sent -------------------------------------------------------------------------

    def stops(self, key: str, now: float) -> bool:
        """Return whether no line of a key may be sent now."""
        runs = self._loaded
        is_full = sum(run.bytes for run in runs) > RESULT_BYTES
        is_failing = any(run.is_failing and run.key == key for run in runs)
        return is_full or is_failing or self._rests.get(key, 0.0) > now

    def rest(self, key: str, until: float) -> None:
        """Send no line of a key until a time."""
        self._rests[key] = max(until, self._rests.get(key, 0.0))

    def wakes(self, now: float) -> float:
        """Return when something is to be done without an event."""
        dues = [run.wakes(now) for run in self._loaded if not run.is_writing]
        return min(
            [*dues, *(until for until in self._rests.values() if until > now)], default=now + 1
        )

    # -- what is written --------------------------------------------------------------------------

    def tend(self, now: float) -> None:
        """Begin to write parts that are due, and to give back chunks that do not continue."""
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
        """Write what a chunk has, and let it go if its log is closed or it does not continue."""
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
                pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)
            else:
                return

    async def let_go(self, held: Iterable[Held], call: Awaitable[None]) -> None:
        """Hold chunks no more, and say so to the queue."""
        # Before the call: what is given back may be taken again at once.
        runs = [self.held.pop(one, None) for one in held]
        try:
            await call
        except QueueDown as error:
            metrics.QUEUE_FAILURES.labels("let_go").inc()
            log.info("chunks cannot be let go", reason=str(error))
        for run in runs:
            if run is not None:
                run.cancel()

    async def end(self, timeout_s: float) -> None:
        """Write what is here, for a bounded time, and give all chunks back."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*self._writing)
                await asyncio.gather(*map(self._settle, self._loaded))
        except TimeoutError:
            left = sum(run.bytes for run in self._loaded)
            log.warning("results are lost, and computed again later", bytes=left)
        held = list(self.held)
        await self.let_go(held, self._queue.give_back(held))

"""The life of a batch, from its state in the store to its end.

    validate -> queue, until all lines ran or it ends early -> finalize -> forget

The store holds the state of a batch. Redis only signals that something may have changed. So any process can
continue a batch, two may do so at the same time, and a process may end in between.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final as Const

import structlog

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.going_on import happens_within, noted
from fleetkeeper_gateway.batch.interfaces import Batches, Index, ObjectMissing, Queue
from fleetkeeper_gateway.batch.key_turns import KeyTurns
from fleetkeeper_gateway.batch.lifecycle.finalize import Finalizer
from fleetkeeper_gateway.batch.model import BatchRecord, Counts, Final, LineRef, Status, Validated
from fleetkeeper_gateway.batch.storage import BrokenObject

log = structlog.get_logger(__name__)

NOTICE_S: Const = 15.0
"""Time for workers to notice the end of a batch, in addition to the time for its lines."""
_RETRY_S: Const = 5.0
_PERIOD_S: Const = 0.5
_LOOKS_PER_S: Const = 100
"""Maximum checks of all batches per second. With more batches, each is checked less often."""
_MAX_PERIOD_S: Const = 15.0
_REFRESH_S: Const = 15.0
"""Period in which the progress of a running batch is read."""
_IDLE_S: Const = 60.0
"""Time without a running line after which Redis may have lost a part of the batch."""
_READS_PER_S: Const = 10
"""Maximum readings of logs of all batches per second. With more batches, each is read less often."""


@dataclass(frozen=True, slots=True)
class Left:
    """The unfinished lines of a running batch."""

    record: BatchRecord
    validated: Validated
    lines: int
    """Lines without a result at the last reading of the logs."""


@dataclass(slots=True)
class Shared:
    """The parts that the lives of all batches of a process share."""

    batches: Batches
    queue: Queue
    validate: Callable[[BatchRecord], Awaitable[tuple[Validated, Sequence[LineRef]]]]
    finalizer: Finalizer
    end_s: float
    """Time for running lines to end after their batch was cancelled or expired."""
    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    lives: int = 0
    """Number of batches."""
    validations: KeyTurns = field(default_factory=lambda: KeyTurns(2))
    reads: KeyTurns = field(default_factory=lambda: KeyTurns(16))
    finalizations: KeyTurns = field(default_factory=lambda: KeyTurns(8))

    @property
    def period_s(self) -> float:
        """Return the period of the checks of a batch."""
        return min(_MAX_PERIOD_S, max(_PERIOD_S, self.lives / _LOOKS_PER_S))


class Life:
    """The life of one batch."""

    def __init__(self, record: BatchRecord, shared: Shared) -> None:
        self.record = record
        self.left: Left | None = None
        """Unfinished lines; None unless lines may run."""
        self.changed = asyncio.Event()
        """Set if the last chunk is done, or the batch may have ended. Then the logs are read at once."""
        self._shared = shared
        self._batches, self._queue = shared.batches, shared.queue
        self._ends: Status | None = None
        """cancelled or expired, once no line may start anymore. Kept, because a clock may be set back."""
        self._server: int | None = None
        """Number of the Redis that has got all open chunks; None before."""
        self._stopped: float | None = None
        """Time from which running lines have `end_s` to end."""

    async def run(self) -> None:
        """Drive the batch until it has ended and is forgotten. After a failure, start again from the store."""
        while True:
            with noted("batch", "batch cannot go on now", batch=self.record.id):
                await self._live()
                return
            await asyncio.sleep(max(_RETRY_S, self._shared.period_s))

    async def _live(self) -> None:
        record = self.record
        async with self._shared.reads.turn(record.key_id):
            final = await self._batches.final(record)
        if final is None:
            final = await self._end()
            metrics.BATCHES.labels(final.status.value).inc()
            log.info(
                "batch ended",
                batch=record.id,
                status=final.status.value,
                lines=final.counts.total,
                completed=final.counts.completed,
                failed=final.counts.failed,
            )
        await self._shared.finalizer.settle(record, final)
        # The marker goes last: if we end before, the next leader finds it.
        await self._queue.remove(record)
        await self._batches.forget_active(record)

    async def _end(self) -> Final:
        """Bring the batch to its end, and return the end that counts."""
        found = await self._validated()
        if isinstance(found, Status):
            return await self._batches.put_final(
                self.record, Final(found, int(self._shared.wall()), Counts())
            )
        if self.left is None:
            self.left = Left(self.record, found, found.lines)
        status = await self._lines_end(found)
        self.left = None
        return await self._finalized(found, status)

    async def _ending(self) -> Status | None:
        """Return the status with which the batch ends before all lines ran; None if it continues."""
        if self._ends is None:
            async with self._shared.reads.turn(self.record.key_id):
                if await self._batches.cancelled_at(self.record) is not None:
                    self._ends = Status.CANCELLED
                elif self._shared.wall() >= self.record.expires:
                    self._ends = Status.EXPIRED
        return self._ends

    # -- its input file ---------------------------------------------------------------------------

    async def _validated(self) -> Validated | Status:
        """Return the validation of the input file, or the status of a batch that ends before any line."""
        found = await self._batches.validated(self.record) or await self._first_found()
        if isinstance(found, Status):
            # Another leader may have validated it meanwhile, and its lines may have run.
            found = await self._batches.validated(self.record) or found
        return Status.FAILED if isinstance(found, Validated) and found.mistakes else found

    async def _first_found(self) -> Validated | Status:
        """Validate the input file. If the batch ends first, return its status."""
        if (ends := await self._ending()) is not None:
            return ends
        work = asyncio.create_task(self._validate())
        try:
            # Validation may wait long, but a cancelled batch ends at once.
            while not (await asyncio.wait([work], timeout=self._shared.period_s))[0]:
                with noted("batch", "batch cannot be read", batch=self.record.id):
                    if (ends := await self._ending()) is not None:
                        return ends
            return work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _validate(self) -> Validated:
        record = self.record
        async with self._shared.validations.turn(record.key_id):
            began = self._shared.monotonic()
            found, lines = await self._shared.validate(record)
            await self._batches.put_validated(record, found, lines)
        log.info(
            "batch validated",
            batch=record.id,
            lines=found.lines,
            mistakes=len(found.mistakes),
            seconds=round(self._shared.monotonic() - began, 3),
        )
        return await self._batches.validated(record) or found

    # -- its lines --------------------------------------------------------------------------------

    async def _lines_end(self, validated: Validated) -> Status:
        """Keep open chunks queued, until all are closed or the batch ends. Return the status of its end."""
        shared = self._shared
        read_at = busy_at = -math.inf
        while (ends := await self._ending()) is None:
            waiting = await self._queue.state(self.record)
            now, rarely_s = shared.monotonic(), shared.lives / _READS_PER_S
            runs = waiting is not None and waiting.held > 0
            if runs:
                busy_at = now
                next_read = read_at + max(_REFRESH_S, rarely_s)
            else:
                next_read = busy_at + max(_IDLE_S, rarely_s)
            may_lack = waiting is None or self._server != self._queue.server
            if may_lack or self.changed.is_set() or now >= next_read:
                self.changed.clear()
                ended = await self._read(validated, add=may_lack or not runs)
                if ended is not None:
                    return ended
                read_at = busy_at = shared.monotonic()
            await happens_within(self.changed, shared.period_s)
        await self._stop(ends)
        return ends

    async def _read(self, validated: Validated, *, add: bool) -> Status | None:
        """Read the logs, and queue open chunks if requested. Return the status of the end; None if it continues."""
        record, server = self.record, self._queue.server
        async with self._shared.reads.turn(record.key_id):
            if self._server is None and await self._index() is None:
                return Status.FAILED
            progress = await self._batches.progress(record, validated)
            counts, chunks = progress.counts, sorted(progress.open)
            self.left = Left(record, validated, validated.lines - counts.completed - counts.failed)
            if not chunks:
                return Status.COMPLETED
            if not add:
                return None
            await self._queue.add(record, validated.model, chunks)
        self._server = server
        log.info("batch queued", batch=record.id, chunks=len(chunks))
        # Another process, which led too, may have ended it meanwhile.
        is_over = await self._batches.final(record) is not None
        return Status.COMPLETED if is_over else None

    async def _stop(self, status: Status) -> None:
        """Let no further line start, and give the running lines time to end."""
        self.left = None
        end_s = self._shared.end_s + NOTICE_S
        if self._stopped is None:
            waiting = await self._queue.state(self.record)
            # If Redis lost the batch, its running lines are unknown.
            runs = self._server is not None if waiting is None else waiting.held > 0
            await self._queue.remove(self.record)
            self._stopped = self._shared.monotonic() - (0.0 if runs else end_s)
            log.info("batch ends early", batch=self.record.id, status=status.value)
        while self._shared.monotonic() < self._stopped + end_s:  # noqa: ASYNC110 - a time
            await asyncio.sleep(self._shared.period_s)

    # -- its end ----------------------------------------------------------------------------------

    async def _finalized(self, validated: Validated, status: Status) -> Final:
        record = self.record
        async with self._shared.finalizations.turn(record.key_id):
            index = await self._index()
            final = await self._batches.final(record)
            if final is not None:
                return final  # by another process, which may have removed the index
            if index is None:
                index = await self._index_of_input(validated)
            return await self._shared.finalizer.finalize(record, index, status)

    async def _index(self) -> Index | None:
        """Return the index of the batch; None if it is damaged, or removed because the batch has ended."""
        try:
            return await self._batches.index(self.record)
        except (BrokenObject, ObjectMissing) as error:
            log.warning(
                "the index of a batch cannot be read", batch=self.record.id, reason=str(error)
            )
            return None

    async def _index_of_input(self, validated: Validated) -> Index:
        """Rebuild a damaged index from the input file. Without the file, its lines have no text."""
        async with self._shared.validations.turn(self.record.key_id):
            found, lines = await self._shared.validate(self.record)
        if (found.lines, found.model) != (validated.lines, validated.model):
            lines = [LineRef(number, 0, 0) for number in range(validated.lines)]
        return await self._batches.index(self.record, lines)

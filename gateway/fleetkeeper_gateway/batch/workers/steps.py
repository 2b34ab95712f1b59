"""What comes next for one batch, and doing it.

    validate -> queue -> finalize -> forget, or: stop, wait for the lines that run, finalize, forget

What comes next is read from what the store and the queue have of the batch. So it does not matter which
process does it, or whether one ended in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Final as Const

import structlog

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import (
    Batches,
    ObjectMissing,
    Queue,
    QueueDown,
    StorageError,
)
from fleetkeeper_gateway.batch.model import (
    BatchRecord,
    Counts,
    Final,
    LineRef,
    Status,
    Validated,
)
from fleetkeeper_gateway.batch.storage import BrokenObject
from fleetkeeper_gateway.batch.workers.finalize import Finalizer

log = structlog.get_logger(__name__)

RETRY_S: Const = 5.0
_VALIDATIONS: Const = 2
_FINALIZATIONS: Const = 2
_SMALL_FINALIZATIONS: Const = 8
_SMALL_LINES: Const = 1000
"""Batches with at most so many lines do not wait for the large ones."""
RENEWAL_S: Const = 10.0

Validate = Callable[[BatchRecord], Awaitable[tuple[Validated, Sequence[LineRef]]]]


@dataclass(slots=True)
class Known:
    """What the process that leads knows of an active batch."""

    record: BatchRecord
    validated: Validated | None = None
    outstanding: int | None = None
    """Lines without a result, when the queue was last asked."""
    ends: Status | None = None
    """cancelled or expired, once no more lines are taken."""
    is_checked: bool = False
    """Whether it is known that it had not ended when we began to lead."""
    is_over: bool = False
    """Whether it ended and its objects are gone. A list that was read before may still name it."""
    next_look: float = 0.0
    task: asyncio.Task[None] | None = None
    """A validation or finalization."""
    stopped: float | None = None
    """When the queue was told to forget it, by the monotonic clock."""


@dataclass(slots=True)
class Parts:
    """What the lifecycle needs of others."""

    batches: Batches
    queue: Queue
    finalizer: Finalizer
    validate: Validate
    looked: Callable[[Sequence[Known]], None] = field(default=lambda _known: None)
    """Called with all batches after each round, and with none while another process leads."""


class Steps:
    """The steps of all batches of a process that leads."""

    def __init__(
        self,
        parts: Parts,
        *,
        wall: Callable[[], float],
        end_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the steps; `look` takes the next one.

        Args:
            parts: what others made.
            wall: Unix seconds that do not go back.
            end_s: time that lines which run have after their batch was cancelled or expired.
            monotonic: the time of pauses.
        """
        self._batches = parts.batches
        self._queue = parts.queue
        self._finalizer = parts.finalizer
        self._validate = parts.validate
        self._wall = wall
        self._monotonic = monotonic
        self._end_s = end_s
        self._validations = asyncio.Semaphore(_VALIDATIONS)
        self._finalizations = asyncio.Semaphore(_FINALIZATIONS)
        self._small_finalizations = asyncio.Semaphore(_SMALL_FINALIZATIONS)
        self.go_on = asyncio.Event()
        """Set when a batch can go on at once."""

    async def look(self, known: Known) -> None:
        """Do what comes next for a batch."""
        record = known.record
        if known.task is not None or known.is_over:
            return
        if not known.is_checked:
            if await self._batches.final(record) is not None:
                await self._forget(known)
                return
            known.is_checked = True
        ends = await self._ends(known)
        if known.validated is None:
            known.validated = await self._batches.validated(record)
        if known.validated is None:
            if ends is not None:
                await self._end(known, Final(ends, int(self._wall()), Counts()))
            else:
                self._begin(known, self._validated(known))
        elif known.validated.mistakes:
            await self._end(known, Final(Status.FAILED, int(self._wall()), Counts()))
        elif ends is not None:
            await self._stop(known, ends)
        else:
            await self._continue(known, known.validated)

    async def _ends(self, known: Known) -> Status | None:
        """Return the status to which a batch ends before its lines do. It stays once it was decided."""
        if known.ends is None:
            if await self._batches.cancelled_at(known.record) is not None:
                known.ends = Status.CANCELLED
            elif self._wall() >= known.record.expires:
                known.ends = Status.EXPIRED
        return known.ends

    async def _continue(self, known: Known, validated: Validated) -> None:
        record = known.record
        known.outstanding = await self._queue.outstanding(record)
        if known.outstanding is None:
            try:
                lines = await self._batches.lines(record)
            except (BrokenObject, ObjectMissing):
                self._begin(known, self._recovered(known, validated))
                return
            await self._queue.add(record, validated, lines)
            if await self._batches.final(record) is not None:
                # Another process, which led too, ended it meanwhile.
                await self._forget(known)
                return
            log.info("batch queued", batch=record.id, lines=len(lines), model=validated.model[:64])
        elif known.outstanding == 0:
            self._begin(known, self._finalized(known, Status.COMPLETED))

    async def _stop(self, known: Known, status: Status) -> None:
        """Take no more lines of a batch. Those that run get some time; then the batch ends."""
        now = self._monotonic()
        if known.stopped is None:
            running = await self._queue.remove(known.record)
            known.outstanding = None
            known.stopped = now if running else now - self._end_s
            log.info("batch ends early", batch=known.record.id, status=status.value)
        if now >= known.stopped + self._end_s:
            self._begin(known, self._finalized(known, status))

    async def _end(self, known: Known, final: Final) -> None:
        kept = await self._batches.put_final(known.record, final)
        await self._ended(known, kept)

    async def _ended(self, known: Known, final: Final) -> None:
        metrics.BATCHES.labels(final.status.value).inc()
        counts = final.counts
        log.info(
            "batch ended",
            batch=known.record.id,
            status=final.status.value,
            lines=counts.total,
            completed=counts.completed,
            failed=counts.failed,
        )
        # If what follows fails, the next look goes on from here.
        known.is_checked = False
        await self._forget(known)

    async def _forget(self, known: Known) -> None:
        # The marker goes last: if we end before, the next process that leads finds it.
        await self._queue.remove(known.record)
        await self._batches.forget_active(known.record)
        known.is_over = True

    # -- tasks ------------------------------------------------------------------------------------

    def _begin(self, known: Known, work: Coroutine[None, None, None]) -> None:
        """Do something that takes long, beside the looks at other batches."""

        async def run() -> None:
            try:
                await work
            except (StorageError, QueueDown) as error:
                log.warning("batch cannot go on now", batch=known.record.id, error=str(error))
                known.next_look = self._monotonic() + RETRY_S
            except Exception:
                metrics.DEFECTS.labels("batch").inc()
                log.exception("batch cannot go on", batch=known.record.id)
                known.next_look = self._monotonic() + RETRY_S
            else:
                known.next_look = 0.0
                self.go_on.set()
            finally:
                known.task = None

        known.task = asyncio.create_task(run())

    async def _validated(self, known: Known) -> None:
        async with self._validations:
            began = self._monotonic()
            validated, lines = await self._validate(known.record)
            await self._batches.put_validated(known.record, validated, lines)
        log.info(
            "batch validated",
            batch=known.record.id,
            lines=validated.lines,
            mistakes=len(validated.mistakes),
            seconds=round(self._monotonic() - began, 3),
        )

    async def _recovered(self, known: Known, validated: Validated) -> None:
        """Queue a batch without its index, or end it."""
        lines = await self._lines(known, validated)
        if lines is None:
            await self._finalized(known, Status.FAILED)
        else:
            await self._queue.add(known.record, validated, lines)

    async def _lines(self, known: Known, validated: Validated) -> Sequence[LineRef] | None:
        """Return where the lines are; None if nothing tells it any more."""
        record = known.record
        try:
            return await self._batches.lines(record)
        except (BrokenObject, ObjectMissing) as error:
            if await self._batches.final(record) is not None:
                # Another process ended it, and the index is gone for that.
                known.is_checked = False
                raise
            log.warning("the input file is read again", batch=record.id, reason=str(error))
        async with self._validations:
            found, lines = await self._validate(record)
        is_same = (found.lines, found.model) == (validated.lines, validated.model)
        return lines if is_same else None

    async def _finalized(self, known: Known, status: Status) -> None:
        record, validated = known.record, known.validated
        assert validated is not None  # noqa: S101 - only batches with lines are finalized
        what = f"finalize:{record.id}"
        is_small = validated.lines <= _SMALL_LINES
        async with self._small_finalizations if is_small else self._finalizations:
            if not await self._queue.leads(what):
                # Another process does it, which led before us. Its lease ends with it.
                raise QueueDown(f"{what} is led by another process")
            renewal = asyncio.create_task(self.renew(what))
            try:
                lines = await self._lines(known, validated)
                if lines is None:
                    log.error("a batch is damaged, and fails", batch=record.id)
                    status = Status.FAILED
                    lines = [LineRef(number, 0, 0) for number in range(validated.lines)]
                final = await self._finalizer.finalize(record, lines, status)
            finally:
                renewal.cancel()
                await asyncio.gather(renewal, return_exceptions=True)
        if final is None:
            # The store lost results that were durable. Which lines they are of is known to nobody who
            # could give them out, so all lines are queued again; results that are there still count.
            await self._queue.remove(record)
            return
        await self._ended(known, final)

    async def renew(self, what: str) -> None:
        """Keep a lease until cancelled."""
        while True:
            await asyncio.sleep(RENEWAL_S)
            try:
                await self._queue.leads(what)
            except QueueDown as error:
                log.info("lease cannot be renewed", lease=what, reason=str(error))
            except Exception:
                # A defect must not end the renewal without a word.
                log.exception("lease cannot be renewed", lease=what)

"""Restores the queue of one epoch from the store.

Batches that have not ended are read: their lines, and all results in their segments. Of several
results of a line the one with the lowest fence counts (of equal ones, the first by segment and
position). A line with a result is done; every other line waits, as if nobody had tried it: segments
say nothing of attempts that ended without a result.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import Batches, StorageError
from fleetkeeper_gateway.batch.model import BatchRecord, LineRef, Validated
from fleetkeeper_gateway.batch.queue.names import EPOCH, PREFIX, fence_base
from fleetkeeper_gateway.batch.queue.records import (
    as_answer,
    as_list,
    as_text,
    batch_arguments,
    line_arguments,
)
from fleetkeeper_gateway.batch.queue.scripts import BEGIN, CLEAR, FINISH, RESTORE
from fleetkeeper_gateway.batch.queue.server import Unfit
from fleetkeeper_gateway.batch.queue.timing import Timing
from fleetkeeper_gateway.limits.pipe import Arguments, Pipe
from fleetkeeper_gateway.limits.scripts import Script

log = structlog.get_logger(__name__)

READERS = 8
"""Batches that are read at the same time."""
ATTEMPTS = 5
"""To read one batch while the store answers otherwise. Then it is taken for damaged."""
PART = 500
"""Lines and results of one call."""
SCAN_COUNT = 1000


@dataclass(frozen=True, slots=True, order=True)
class _Recorded:
    """A result, ordered by which one counts."""

    fence: int
    segment: str
    position: int
    ok: bool


_Found = tuple[Validated, Sequence[LineRef], dict[int, _Recorded]]


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What was restored."""

    batches: int
    lines: int
    results: int


class Rebuild:
    """The work of the process that makes an epoch."""

    def __init__(
        self, pipe: Pipe, batches: Batches, timing: Timing, epoch: int, run_id: str
    ) -> None:
        self._pipe = pipe
        self._batches = batches
        self._timing = timing
        self._epoch = epoch
        self._run_id = run_id
        self._builder = secrets.token_hex(8)
        self._highest = 0
        """Highest fence in any segment."""
        self._rebuilt = Rebuilt(0, 0, 0)

    async def prepare(self) -> Rebuilt:
        """Stop the earlier epoch, delete its keys, and restore batches. Nothing is taken yet.

        Raises:
            Unfit: another process makes a later epoch.
            StorageError: the store does not answer.
        """
        begun = await self._call(BEGIN, self._epoch, self._builder, self._run_id)
        if begun != 1:
            raise Unfit(f"epoch {self._epoch} is over; another process made a later one")
        beating = asyncio.create_task(self._beat())
        try:
            await self._clear()
            waiting = list(await self._batches.active())
            async with asyncio.TaskGroup() as group:
                for _ in range(READERS):
                    group.create_task(self._restore_all(waiting))
        except ExceptionGroup as errors:
            # One reader failed, and the others were cancelled.
            raise errors.exceptions[0] from errors
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
        return self._rebuilt

    async def open(self) -> None:
        """Open the epoch to all processes."""
        # Above every fence that was seen, even if the store lost the numbers of epochs.
        start = max(0, self._highest - fence_base(self._epoch))
        await self._built(FINISH, start)

    async def _beat(self) -> None:
        """Show the other processes that the work continues."""
        while True:
            await asyncio.sleep(self._timing.check_s)
            await self._built(RESTORE)

    async def _clear(self) -> None:
        cursor = "0"
        while True:
            words = (b"SCAN", cursor, b"MATCH", f"{PREFIX}*", b"COUNT", SCAN_COUNT)
            found: object = await self._pipe.command(*words, budget_s=self._timing.call_s)
            after, page = as_answer(found)
            names = [as_text(key) for key in as_list(page)]
            keys = tuple(name.encode() for name in names if name.encode() != EPOCH)
            if keys:
                await self._built(CLEAR, keys=keys)
            cursor = as_text(after)
            if cursor == "0":
                return

    async def _restore_all(self, waiting: list[BatchRecord]) -> None:
        while waiting:
            await self._restore_or_leave(waiting.pop())

    async def _restore_or_leave(self, record: BatchRecord) -> None:
        """Restore a batch. Leave it out if it has ended, or cannot be read although the store answers."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                found = None if await self._ends(record) else await self._read(record)
            except StorageError as error:
                # The objects of a batch go when it has ended. If the store is down, this fails too.
                if await self._ends(record):
                    return
                if attempt == ATTEMPTS:
                    log.error(  # noqa: TRY400 - the reason says what is wrong
                        "a batch cannot be read; it is left out of the queue until it can",
                        batch=record.id,
                        reason=str(error),
                    )
                else:
                    await asyncio.sleep(self._timing.retry_s)
            except Exception:
                # A defect that one batch brings about must not keep the queue from all others.
                metrics.DEFECTS.labels("rebuild").inc()
                log.exception("a batch cannot be read; it is left out", batch=record.id)
                return
            else:
                if found is not None:
                    await self._put(record, *found)
                return

    async def _ends(self, record: BatchRecord) -> bool:
        """Return whether no more lines of a batch run."""
        final = await self._batches.final(record)
        return final is not None or await self._batches.cancelled_at(record) is not None

    async def _read(self, record: BatchRecord) -> _Found | None:
        """Return what the store has of a batch; None if it has no lines to run."""
        validated = await self._batches.validated(record)
        if validated is None or validated.mistakes:
            return None
        lines = await self._batches.lines(record)
        return validated, lines, await self._recorded(record)

    async def _recorded(self, record: BatchRecord) -> dict[int, _Recorded]:
        """Return the result of each line that counts."""
        found: dict[int, _Recorded] = {}
        async for segment, results in self._batches.results(record):
            for position, result in enumerate(results):
                mine = _Recorded(result.fence, segment, position, result.ok)
                found[result.line] = min(mine, found.get(result.line, mine))
                self._highest = max(self._highest, result.fence)
        return found

    async def _put(
        self,
        record: BatchRecord,
        validated: Validated,
        lines: Sequence[LineRef],
        recorded: dict[int, _Recorded],
    ) -> None:
        """Write a batch, part by part. The first part makes it exist."""
        undone = [line for line in lines if line.number not in recorded]
        completed = sum(each.ok for each in recorded.values())
        batch = (*batch_arguments(record, validated), completed, len(recorded) - completed)
        results = sorted(recorded.items())
        for start in range(0, max(1, len(results)), PART):
            values: list[str | int] = []
            for number, each in results[start : start + PART]:
                values += (number, f"{each.segment}:{each.position}")
            await self._built(RESTORE, *batch, len(values) // 2, *values)
        for start in range(0, len(undone), PART):
            part = line_arguments(undone[start : start + PART])
            await self._built(RESTORE, *batch, 0, *part)
        before = self._rebuilt
        self._rebuilt = Rebuilt(
            before.batches + 1, before.lines + len(lines), before.results + len(recorded)
        )

    async def _built(
        self, script: Script, *arguments: bytes | str | int, keys: tuple[bytes, ...] = ()
    ) -> None:
        done = await self._call(script, self._epoch, self._builder, *arguments, keys=keys)
        if done != 1:
            raise Unfit(f"epoch {self._epoch} is over; Redis was reset, or another process goes on")

    async def _call(
        self, script: Script, *arguments: bytes | str | int, keys: tuple[bytes, ...] = ()
    ) -> object:
        words: Arguments = arguments
        return await self._pipe.script(script, (EPOCH, *keys), words, self._timing.call_s)

"""Keeps results: a segment, durably, then the commit. Results of a batch are written together."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import structlog

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import (
    Batches,
    Commit,
    NotAnswered,
    Queue,
    QueueDown,
    StorageError,
    Taken,
)
from fleetkeeper_gateway.batch.model import BatchRecord, Result
from fleetkeeper_gateway.batch.workers.lines import failed_line

log = structlog.get_logger(__name__)

TOGETHER: Final = 64
"""Results that are written without waiting for more."""
WAIT_S: Final = 0.5
"""Longest wait of a result for others."""
_SEGMENT_BYTES: Final = 8_388_608
"""Text after which a segment takes no more results."""
_BEHIND_BYTES: Final = 67_108_864
"""Text that is not written yet, after which no new lines are taken."""
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 10.0
_TRIES: Final = 5
"""Calls that end with a defect, after which the result is taken for one that can never be kept."""

Pair = tuple[Taken, Result]
Found = TypeVar("Found")


@dataclass(slots=True)
class _Group:
    """What waits of one batch."""

    record: BatchRecord
    pairs: list[Pair] = field(default_factory=list)
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Recorder:
    """Writes and commits results, again and again while the store or Redis fails."""

    def __init__(self, batches: Batches, queue: Queue, released: Callable[[Taken], None]) -> None:
        """Record results.

        Args:
            batches: where segments are written.
            queue: where they are committed.
            released: called for each line once its result is recorded, or not needed.
        """
        self._batches = batches
        self._queue = queue
        self._released = released
        self._groups: dict[str, _Group] = {}
        self._failing = 0
        self._bytes = 0
        self._is_closing = False

    @property
    def behind(self) -> bool:
        """Return whether no new lines should be taken: the store or Redis does not keep up."""
        return self._failing > 0 or self._bytes > _BEHIND_BYTES

    @property
    def held(self) -> int:
        """Return the number of bytes of results that are not recorded."""
        return self._bytes

    def add(self, taken: Taken, result: Result) -> None:
        """Record the result of a line. It returns at once."""
        batch_id = taken.batch.id
        group = self._groups.get(batch_id)
        if group is None:
            group = self._groups[batch_id] = _Group(taken.batch)
        group.pairs.append((taken, result))
        self._bytes += len(result.text)
        if len(group.pairs) >= TOGETHER or self._is_closing:
            group.enough.set()
        if group.task is None:
            group.task = asyncio.create_task(self._work(group))

    async def close(self, timeout_s: float) -> None:
        """Record what is there, for a bounded time. What is left is computed again by another process."""
        self._is_closing = True
        tasks = [group.task for group in self._groups.values() if group.task is not None]
        for group in self._groups.values():
            group.enough.set()
        if not tasks:
            return
        _, left = await asyncio.wait(tasks, timeout=timeout_s)
        for task in left:
            task.cancel()
        if left:
            log.warning("results are lost, and computed again later", bytes=self._bytes)
            await asyncio.wait(left)

    async def _work(self, group: _Group) -> None:
        while group.pairs:
            if len(group.pairs) < TOGETHER and not self._is_closing:
                await _set_within(group.enough, WAIT_S)
            group.enough.clear()
            pairs = _first(group.pairs)
            del group.pairs[: len(pairs)]
            await self._record(group.record, pairs)
            for taken, result in pairs:
                self._bytes -= len(result.text)
                self._released(taken)
        group.task = None
        del self._groups[group.record.id]

    async def _record(self, record: BatchRecord, pairs: list[Pair], *, again: bool = True) -> None:
        results = [result for _, result in pairs]
        try:
            segment = await self._until_done(
                "segment", lambda: self._batches.add_segment(record, results)
            )
        except Exception:
            metrics.DEFECTS.labels("segment").inc()
            log.exception("results cannot be kept", batch=record.id, lines=len(pairs))
            if again:
                await self._record_apart(record, pairs)
            return
        metrics.SEGMENTS.inc()
        commits = [
            Commit(taken, segment, offset, result.ok)
            for offset, (taken, result) in enumerate(pairs)
        ]
        try:
            counted = await self._until_done("commit", lambda: self._queue.commit(commits))
        except Exception:
            metrics.DEFECTS.labels("commit").inc()
            log.exception("results cannot be committed", batch=record.id, lines=len(pairs))
            return
        metrics.DUPLICATES.inc(len(pairs) - len(counted))

    async def _record_apart(self, record: BatchRecord, pairs: list[Pair]) -> None:
        """Record results one by one, and an error line instead of one that cannot be kept.

        If that cannot be kept either, the lease of the line runs out. Attempts are bounded.
        """
        for taken, result in pairs:
            if len(pairs) > 1:
                await self._record(record, [(taken, result)])
            else:
                await self._record(record, [(taken, unkept(taken))], again=False)

    async def _until_done(self, what: str, call: Callable[[], Awaitable[Found]]) -> Found:
        """Call until it succeeds. While the store or Redis fails, no lines are taken.

        Raises:
            Exception: a defect that stays. It is of these results, so other lines continue.
        """
        pause_s, defects = _FIRST_PAUSE_S, 0
        has_failed = False
        try:
            while True:
                try:
                    return await call()
                except (StorageError, QueueDown) as error:
                    _note_failure(what, error)
                    self._failing += not has_failed
                    has_failed = True
                except Exception:
                    metrics.STORE_FAILURES.labels(what).inc()
                    defects += 1
                    if defects >= _TRIES:
                        raise
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
                pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)
        finally:
            self._failing -= has_failed


def _note_failure(what: str, error: StorageError | QueueDown) -> None:
    if isinstance(error, StorageError):
        metrics.STORE_FAILURES.labels(what).inc()
        log.warning("results cannot be written; trying again", error=str(error))
    else:
        metrics.QUEUE_FAILURES.labels(what).inc()
        log.info("results cannot be committed; trying again", reason=str(error))


def unkept(taken: Taken) -> Result:
    """Return the error line of a line whose result cannot be kept."""
    why = NotAnswered("the result could not be kept", sent=True)
    number = taken.line.number
    text = failed_line(taken.batch, number, "", taken.attempt, why)
    return Result(number, taken.attempt, taken.fence, ok=False, text=text)


def _first(pairs: list[Pair]) -> list[Pair]:
    """Return the first results, as many as a segment takes."""
    size = 0
    for count, (_, result) in enumerate(pairs):
        size += len(result.text)
        if count and size > _SEGMENT_BYTES:
            return pairs[:count]
    return pairs[:]


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return

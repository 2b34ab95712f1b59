"""The progress of batches, read from their logs at most once a second."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from fleetkeeper_gateway.batch.interfaces import Batches
from fleetkeeper_gateway.batch.model import BatchRecord, Counts, Validated

KEPT_FOR_S: Final = 1.0
_KEPT: Final = 10_000
"""Maximum batches in memory. A dropped batch is read again, with no smaller counts: logs only grow."""


class BatchProgress:
    """The progress of running batches."""

    def __init__(
        self, batches: Batches, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._batches = batches
        self._monotonic = monotonic
        self._kept: OrderedDict[str, tuple[float, Counts]] = OrderedDict()
        """Time and counts of the last reading, by batch ID."""
        self._reading: dict[str, asyncio.Task[Counts]] = {}

    async def counts(self, record: BatchRecord, validated: Validated) -> Counts:
        """Return the counts of lines with a written result, which never decrease.

        Raises:
            StorageError: if the store fails, or if the batch ended and its logs were deleted.
        """
        kept = self._kept.get(record.id)
        if kept is not None and self._monotonic() - kept[0] < KEPT_FOR_S:
            return kept[1]
        reading = self._reading.get(record.id)
        if reading is None:
            reading = asyncio.create_task(self._read(record, validated))
            self._reading[record.id] = reading
            reading.add_done_callback(lambda _: self._reading.pop(record.id))
            # All waiters may have been cancelled.
            reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Others may wait for the same reading.
        return await asyncio.shield(reading)

    async def _read(self, record: BatchRecord, validated: Validated) -> Counts:
        began = self._monotonic()
        counts = (await self._batches.progress(record, validated)).counts
        _, before = self._kept.pop(record.id, (began, counts))
        # A store may list less than it did before.
        counts = max(before, counts, key=lambda each: each.completed + each.failed)
        self._kept[record.id] = began, counts
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return counts

"""The life of all batches, driven by the one process that leads.

Each batch is looked at again and again (`steps`). A process that begins to lead knows nothing, and
reads what there is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final as Const

import structlog

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import QueueDown, StorageError
from fleetkeeper_gateway.batch.workers.steps import RETRY_S, Known, Parts, Steps

log = structlog.get_logger(__name__)

LEASE: Const = "batches"
_PERIOD_S: Const = 0.5
_PER_SECOND: Const = 100
"""Batches that are looked at in a second. With more of them, each is looked at less often."""
_LONGEST_PERIOD_S: Const = 15.0
_LOOKS_TOGETHER: Const = 16


class Lifecycle:
    """Validates, queues, finalizes, cancels and expires batches while it leads."""

    def __init__(
        self,
        parts: Parts,
        *,
        wall: Callable[[], float],
        end_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the work; `run` does it. The arguments are those of `Steps`."""
        self._steps = Steps(parts, wall=wall, end_s=end_s, monotonic=monotonic)
        self._batches = parts.batches
        self._queue = parts.queue
        self._looked = parts.looked
        self._monotonic = monotonic
        self._known: dict[str, Known] = {}
        self._together = asyncio.Semaphore(_LOOKS_TOGETHER)
        self._leads = False

    def wake(self) -> None:
        """Look at new batches at once."""
        self._steps.go_on.set()

    async def run(self) -> None:
        """Look at the batches until cancelled."""
        try:
            while True:
                self._steps.go_on.clear()
                await self._round()
                try:
                    async with asyncio.timeout(_PERIOD_S):
                        await self._steps.go_on.wait()
                except TimeoutError:
                    continue
        finally:
            await self._resign()
            if self._leads:
                await self._give_lease_back()

    async def _round(self) -> None:
        try:
            self._leads = await self._queue.leads(LEASE)
            if not self._leads:
                await self._resign()
                return
            # With many batches, or a slow store, a round takes longer than the lease lasts.
            renewal = asyncio.create_task(self._steps.renew(LEASE))
            try:
                await self._look_at_all()
            finally:
                renewal.cancel()
                await asyncio.gather(renewal, return_exceptions=True)
        except StorageError as error:
            metrics.STORE_FAILURES.labels("batches").inc()
            log.warning("active batches cannot be read", error=str(error))
        except QueueDown as error:
            metrics.QUEUE_FAILURES.labels("lead").inc()
            log.info("no process can lead", reason=str(error))
        except Exception:
            log.exception("round failed")

    async def _resign(self) -> None:
        """End what runs: another process leads."""
        tasks = [known.task for known in self._known.values() if known.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._known.clear()
        self._looked(())

    async def _give_lease_back(self) -> None:
        """Let another process lead at once. Without Redis the lease runs out."""
        try:
            await self._queue.resign(LEASE)
        except QueueDown as error:
            log.info("the lease runs out by itself", reason=str(error))

    async def _look_at_all(self) -> None:
        active = {record.id: record for record in await self._batches.active()}
        for batch_id in self._known.keys() - active.keys():
            gone = self._known[batch_id]
            if gone.task is None:
                del self._known[batch_id]
        for batch_id, record in active.items():
            self._known.setdefault(batch_id, Known(record))
        now = self._monotonic()
        due = [known for known in self._known.values() if known.next_look <= now]
        await asyncio.gather(*map(self._look_safely, due))
        self._looked(tuple(self._known.values()))

    async def _look_safely(self, known: Known) -> None:
        batch_id = known.record.id
        async with self._together:
            pause_s = min(_LONGEST_PERIOD_S, len(self._known) / _PER_SECOND)
            known.next_look = self._monotonic() + pause_s
            try:
                await self._steps.look(known)
            except StorageError as error:
                metrics.STORE_FAILURES.labels("batch").inc()
                log.warning("batch cannot be read", batch=batch_id, error=str(error))
            except QueueDown as error:
                metrics.QUEUE_FAILURES.labels("batch").inc()
                log.info("batch cannot be queued", batch=batch_id, reason=str(error))
            except Exception:
                metrics.DEFECTS.labels("batch").inc()
                log.exception("look at a batch failed", batch=batch_id)
                known.next_look = self._monotonic() + RETRY_S

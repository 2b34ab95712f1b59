"""Finds the epoch that this process may work in, or makes the next one.

An epoch of the queue is a time in which Redis forgot nothing. It is over if its key is absent (Redis was
emptied), if the server has another `run_id` (a restart or a failover, after which the last writes may
be missing), or if the server forgot a tick that it told this process (a rollback under the same
`run_id`). Then one process makes the next epoch from the store, and the others wait for it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import structlog

from fleetkeeper_gateway.batch.interfaces import Batches
from fleetkeeper_gateway.batch.queue.epochs import Claims, Epochs, Patience
from fleetkeeper_gateway.batch.queue.metrics import QueueMetrics
from fleetkeeper_gateway.batch.queue.names import tick_key
from fleetkeeper_gateway.batch.queue.rebuild import Rebuild
from fleetkeeper_gateway.batch.queue.server import ServerEpoch, epoch_of
from fleetkeeper_gateway.batch.queue.timing import Timing
from fleetkeeper_gateway.limits.pipe import Pipe

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Known:
    """What this process knows of the epoch that it worked in."""

    epoch: int = 0
    tick: int = 0
    """Highest tick that Redis told it."""


class Recovery:
    """Decides whether a server can be used as it is."""

    def __init__(
        self,
        epochs: Epochs,
        batches: Batches,
        process: str,
        timing: Timing,
        metrics: QueueMetrics,
    ) -> None:
        self._epochs = epochs
        self._batches = batches
        self._process = process
        self._timing = timing
        self._metrics = metrics
        self._patience = Patience(timing.patience_s)
        self._mine = 0
        """An epoch that this process claimed and nobody worked in yet."""

    async def ready_epoch(self, pipe: Pipe, run_id: str, known: Known) -> int:
        """Return the epoch to work in. Make one, or wait until another process has made it.

        Raises:
            Unfit: another process continues the work.
            StorageError: the store does not answer.
        """
        while True:
            # First the store: if nobody claims an epoch after this, nobody made one either, and
            # what Redis says now is of the latest.
            claims = await self._epochs.read()
            server = await epoch_of(pipe, self._timing.call_s)
            latest = max(claims.latest, server.number)
            whole = server.ready and server.run_id == run_id and server.number == latest
            if whole and not await self._rolled_back(pipe, server, known):
                if not claims.ready or claims.latest < latest:
                    await self._epochs.made(latest)
                return latest
            if self._may_claim(claims, server):
                number = await self._claimed(latest)
                if number is not None:
                    await self._make(pipe, run_id, number)
                    continue
            await asyncio.sleep(self._timing.check_s)

    async def _rolled_back(self, pipe: Pipe, server: ServerEpoch, known: Known) -> bool:
        if server.number != known.epoch:
            return False
        words = (b"GET", tick_key(self._process))
        return int(await pipe.command(*words, budget_s=self._timing.call_s) or 0) < known.tick

    def _may_claim(self, claims: Claims, server: ServerEpoch) -> bool:
        over = self._patience.ended(claims, server)
        # Redis knows a later epoch than the store: the store lost it, so nobody works on a claim.
        nobody_claimed = claims.latest == 0 or claims.ready or claims.latest < server.number
        return nobody_claimed or claims.latest == self._mine or over

    async def _claimed(self, latest: int) -> int | None:
        """Return the number of the epoch that this process may make; None if another one does."""
        if self._mine and self._mine == latest:
            return latest
        if not await self._epochs.claim(latest + 1):
            return None
        self._mine = latest + 1
        return self._mine

    async def _make(self, pipe: Pipe, run_id: str, number: int) -> None:
        log.warning("Redis was reset; the queue is rebuilt from the store", epoch=number)
        begin = time.monotonic()
        rebuild = Rebuild(pipe, self._batches, self._timing, number, run_id)
        rebuilt = await rebuild.prepare()
        # Once others may work in it, this number is never used again.
        self._mine = 0
        await rebuild.open()
        seconds = time.monotonic() - begin
        self._metrics.rebuilds.inc()
        self._metrics.rebuild_seconds.observe(seconds)
        log.info(
            "the queue is rebuilt",
            epoch=number,
            batches=rebuilt.batches,
            lines=rebuilt.lines,
            results=rebuilt.results,
            seconds=round(seconds, 3),
        )
        await self._epochs.made(number)

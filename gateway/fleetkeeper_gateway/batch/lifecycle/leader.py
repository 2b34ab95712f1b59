"""The lives of all batches, in the leader.

A new leader has no state of its own, and reads the store. Two leaders do the same work twice, without harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from fleetkeeper_gateway.batch.going_on import happens_within, noted
from fleetkeeper_gateway.batch.lifecycle.life import Left, Life, Shared

LEASE: Final = "batches"
_RENEWAL_S: Final = 10.0
_PERIOD_S: Final = 0.5
_MAX_UNREAD_S: Final = 60.0
"""Maximum time without a list of the active batches. After it, another process may lead."""


class Lifecycle:
    """Validates, queues, finalizes, cancels and expires batches while this process leads."""

    def __init__(self, shared: Shared, show: Callable[[Sequence[Left]], None]) -> None:
        """Take the parts; `run` does the work.

        Args:
            shared: parts that the lives share.
            show: gets the unfinished lines of all batches periodically; none while another process leads.
        """
        self._shared = shared
        self._queue = shared.queue
        self._show = show
        self._lives: dict[str, tuple[Life, asyncio.Task[None]]] = {}
        """Lives by batch ID. Ended lives stay until a newer list, which cannot name them again."""
        self._changed = asyncio.Event()
        self._leads = False
        self._read_at = 0.0
        """Time of the last list of active batches, or of the start of leading."""

    def wake(self) -> None:
        """List new batches at once."""
        self._changed.set()

    async def run(self) -> None:
        """Acquire the lead, and drive the batches while leading, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._lead())
                tasks.create_task(self._keep_lives())
        finally:
            await self._end_lives()
            if self._leads:  # another process may lead at once
                with noted("lead", "the lease runs out by itself"):
                    await self._queue.resign(LEASE)

    async def _lead(self) -> None:
        """Renew the lease, independently of the lives."""
        while True:
            # If renewal fails, all lives continue. A second leader does no harm.
            with noted("lead", "the lease cannot be renewed"):
                leads = await self._queue.leads(LEASE)
                if leads and not self._leads:
                    self._read_at = self._shared.monotonic()
                    self._changed.set()
                self._leads = leads
                if leads and self._shared.monotonic() >= self._read_at + _MAX_UNREAD_S:
                    # The lives continue: if no other process takes the lease, this one leads again.
                    await self._queue.resign(LEASE)
            await asyncio.sleep(_RENEWAL_S if self._leads else _PERIOD_S)

    async def _keep_lives(self) -> None:
        while True:
            self._changed.clear()
            if self._leads:
                with noted("batches", "active batches cannot be read"):
                    await self._begin_lives()
                with noted("emptied", "finished batches are not known"):
                    await self._note_emptied()
            else:
                await self._end_lives()
            await happens_within(self._changed, _PERIOD_S)

    async def _begin_lives(self) -> None:
        active = {record.id: record for record in await self._shared.batches.active()}
        self._read_at = self._shared.monotonic()
        for batch_id in self._lives.keys() - active.keys():
            life, task = self._lives[batch_id]
            if task.done():
                del self._lives[batch_id]
            else:
                life.changed.set()  # another leader has ended it
        for batch_id, record in active.items():
            if batch_id not in self._lives:
                life = Life(record, self._shared)
                self._lives[batch_id] = life, asyncio.create_task(life.run())
        self._shared.lives = len(self._lives)
        self._show([life.left for life, _ in self._lives.values() if life.left is not None])

    async def _note_emptied(self) -> None:
        """Wake batches whose last chunk is done. If the message is lost, their periodic check finds it."""
        for batch_id in await self._queue.emptied():
            if batch_id in self._lives:
                self._lives[batch_id][0].changed.set()

    async def _end_lives(self) -> None:
        tasks = [task for _, task in self._lives.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lives.clear()
        self._show(())

"""The lives of all batches, in the process that leads.

A process that begins to lead knows nothing, and reads what there is. Two that lead do the same work, without
harm.
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
"""Time without a list of the active batches, after which another process may lead."""


class Lifecycle:
    """Validates, queues, finalizes, cancels and expires batches while it leads."""

    def __init__(self, shared: Shared, show: Callable[[Sequence[Left]], None]) -> None:
        """Describe the work; `run` does it.

        Args:
            shared: what the lives use.
            show: takes what is left of all batches, again and again, and nothing while another process leads.
        """
        self._shared = shared
        self._queue = shared.queue
        self._show = show
        self._lives: dict[str, tuple[Life, asyncio.Task[None]]] = {}
        """Also those that have ended, as long as a list that was read before may name them."""
        self._changed = asyncio.Event()
        self._leads = False
        self._read_at = 0.0
        """When active batches were last read, or this process began to lead."""

    def wake(self) -> None:
        """Take up new batches at once."""
        self._changed.set()

    async def run(self) -> None:
        """Lead, and let the batches live, until cancelled."""
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
        """Renew the lease, whatever the lives wait for."""
        while True:
            # If it fails, all lives continue. Another process that leads too does no harm.
            with noted("lead", "the lease cannot be renewed"):
                leads = await self._queue.leads(LEASE)
                if leads and not self._leads:
                    self._read_at = self._shared.monotonic()
                    self._changed.set()
                self._leads = leads
                if leads and self._shared.monotonic() >= self._read_at + _MAX_UNREAD_S:
                    # Its lives continue: if no other takes the lease meanwhile, it leads again.
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
                life.changed.set()  # another process, which led too, has ended it
        for batch_id, record in active.items():
            if batch_id not in self._lives:
                life = Life(record, self._shared)
                self._lives[batch_id] = life, asyncio.create_task(life.run())
        self._shared.lives = len(self._lives)
        self._show([life.left for life, _ in self._lives.values() if life.left is not None])

    async def _note_emptied(self) -> None:
        """Wake batches whose last chunk was done. If the message is lost, they find out later."""
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

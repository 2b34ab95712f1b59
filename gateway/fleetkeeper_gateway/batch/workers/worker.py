"""Runs lines: takes chunks, has their lines answered, and has their results written."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.going_on import noted
from fleetkeeper_gateway.batch.interfaces import (
    Batches,
    Held,
    Queue,
    Sender,
    flow_of,
)
from fleetkeeper_gateway.batch.model import LineRef, Result
from fleetkeeper_gateway.batch.workers.attempt import Attempts, GivenBack
from fleetkeeper_gateway.batch.workers.chunk_run import ChunkRun
from fleetkeeper_gateway.batch.workers.handling import Handling
from fleetkeeper_gateway.batch.workers.holding import Holding
from fleetkeeper_gateway.batch.workers.inputs import Inputs
from fleetkeeper_gateway.batch.workers.pace import Paces, Slot
from fleetkeeper_gateway.batch.workers.places import Places
from fleetkeeper_gateway.batch.workers.taker import Taker

log = structlog.get_logger(__name__)

RENEWAL_S: Final = 10.0
_WAIT_S: Final = 1.0
"""Longest pause of the loop that sends lines."""
_SHORT_WAIT_S: Final = 0.1
"""The same while lines wait for places, which other processes may give back at any moment."""
_LEAST_WAIT_S: Final = 0.005
_TAKING_S: Final = 5.0
"""Time to take a last chunk once the process ends."""
_WRITE_S: Final = 20.0
"""Time to write results at the end of the process."""


class Worker:
    """Runs lines in one process until it is stopped."""

    def __init__(
        self,
        queue: Queue,
        batches: Batches,
        inputs: Inputs,
        sender: Sender,
        *,
        places: Places,
        handling: Handling,
        drain_s: float,
        end_s: float,
        may_read: asyncio.Event,
        route: Callable[[str, str], str] = flow_of,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the worker; `run` works.

        Lines have `drain_s` to end after `stop`, and `end_s` after their batch was cancelled or expired.
        `may_read` is set while there is room for the results of large answers. `route` names the service
        that answers the lines of a key for a model, by whose answers they are paced.
        """
        self._queue = queue
        self._places = places
        self._drain_s, self._end_s = drain_s, end_s
        self._monotonic = monotonic
        self._attempts = Attempts(inputs, sender, handling, monotonic)
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self.paces = Paces(places.total)
        self._holding = Holding(queue, self.paces, self._changed.set, may_read, monotonic)
        self._taker = Taker(
            queue,
            batches,
            places,
            self.paces,
            self._holding,
            route=route,
            monotonic=monotonic,
        )
        self._tasks: dict[asyncio.Task[Result | GivenBack], tuple[ChunkRun, Slot]] = {}
        """Lines that run."""

    @property
    def held(self) -> int:
        """Return the number of chunks that this process holds."""
        return len(self._holding.held)

    @property
    def running(self) -> int:
        """Return the number of lines of this process that run."""
        return len(self._tasks)

    def stop(self) -> None:
        """Take no more chunks and send no more lines, and end `run` after those that run."""
        self._stopping.set()
        self._changed.set()

    async def run(self) -> None:
        """Work until `stop`. Then let running lines end for a bounded time, write, and give chunks back."""
        self._places.clear()
        renewal = asyncio.create_task(self._keep_chunks())
        taking = asyncio.create_task(self._taker.run(self._stopping))
        try:
            await self._send_lines()
            self._taker.wake()
            _, late = await asyncio.wait({taking}, timeout=_TAKING_S)
            if late:
                taking.cancel()
            else:
                taking.result()
            await self._drain()
        finally:
            left = [renewal, taking, *self._tasks]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            self._places.clear()

    # -- lines ------------------------------------------------------------------------------------

    async def _send_lines(self) -> None:
        while not self._stopping.is_set():
            self._changed.clear()
            now = self._monotonic()
            self.paces.forget(now)
            lacks_places = self._start_lines(now)
            self._holding.tend(now)
            self._taker.wake()
            metrics.RUNNING.set(self.running)
            metrics.CONCURRENCY.set(min(self.paces.limit, self._places.total))
            wakes = min(self.paces.wakes(now), self._holding.wakes(now)) - now
            wait_s = min(_SHORT_WAIT_S if lacks_places else _WAIT_S, wakes)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(_LEAST_WAIT_S, wait_s)):
                    await self._changed.wait()

    def _start_lines(self, now: float) -> bool:
        """Send the lines that may be sent. Return whether more would be sent if there were places."""
        left: Counter[str] = Counter()
        runs = self._holding.runs
        stopped = {key for key in {run.key for run in runs} if self._holding.stops(key, now)}
        full: set[str] = set()
        for run in runs:
            key, pace = run.key, self.paces.of(run.route)
            could = 0 if key in stopped else min(run.waiting(now), pace.free(now))
            # Each line that begins takes room of all keys, so room is asked for again.
            room = self._places.room(key) if could and key not in full else 0
            for _ in range(min(could, room)):
                self._start(run, run.next(now), pace.slot(now))
            if could > room:
                full.add(key)
                left[key] += could - room
        self._places.ready(left)
        return left.total() > 0

    def _start(self, run: ChunkRun, line: LineRef, slot: Slot) -> None:
        attempt = self._attempts.make(run.held.batch, line, run.tried(line.number), slot)
        task = run.running[line.number] = asyncio.create_task(attempt)
        self._tasks[task] = run, slot
        self._places.start(run.key)
        task.add_done_callback(partial(self._ended, line.number))

    def _ended(self, line: int, task: asyncio.Task[Result | GivenBack]) -> None:
        """Give back the place of a line, however it ended. One that was cancelled has no result."""
        now = self._monotonic()
        run, slot = self._tasks.pop(task)
        slot.pace.ended(now)
        self._places.end(run.key)
        if task.cancelled():
            metrics.LINES.labels("stopped").inc()
            outcome: Result | GivenBack = GivenBack(attempt_counts=False)
        else:
            outcome = task.result()
        run.ended(line, outcome, now)
        if isinstance(outcome, GivenBack) and outcome.key_rests_s:
            self._holding.rest(run.key, now + outcome.key_rests_s)
        self._changed.set()

    # -- chunks -----------------------------------------------------------------------------------

    async def _keep_chunks(self) -> None:
        async with asyncio.TaskGroup() as ends:
            while True:
                await asyncio.sleep(RENEWAL_S)
                running = Counter(run.key for run, _ in self._tasks.values())
                with noted("renew", "chunks cannot be renewed", chunks=self.held):
                    lost = await self._queue.renew(list(self._holding.held), running)
                    await self._note_lost(lost, ends)

    async def _note_lost(self, lost: set[Held], ends: asyncio.TaskGroup) -> None:
        """End the lines of batches that have ended, after a time.

        A chunk of a batch that goes on is worked on to its end, although another process may have it: what
        it writes first counts.
        """
        ended: dict[str, bool] = {}
        for held in lost:
            batch = held.batch
            if batch.id not in ended:
                ended[batch.id] = await self._queue.state(batch) is None
            run = self._holding.held.get(held)
            if ended[batch.id] and run is not None and not run.is_ending:
                log.info("the batch of a chunk has ended", batch=batch.id, chunk=held.chunk)
                run.is_ending = True
                ends.create_task(self._end(run))
                self._changed.set()

    async def _end(self, run: ChunkRun) -> None:
        """End the lines of a chunk after a time, unless its batch is known again.

        The leader adds a batch again that only Redis lost.
        """
        await asyncio.sleep(self._end_s)
        with noted("renew", "the end of a batch is not known", batch=run.held.batch.id):
            if await self._queue.state(run.held.batch) is None:
                run.cancel()
            else:
                run.is_ending = False
                self._changed.set()

    async def _drain(self) -> None:
        for run in self._holding.runs:
            run.is_ending = True
        # A task that did not begin is cancelled without a trace.
        await asyncio.sleep(0)
        unsent = [task for task, (_, slot) in self._tasks.items() if not slot.is_sent]
        for task in unsent:
            task.cancel()
        log.info("worker drains", unsent=len(unsent), running=len(self._tasks) - len(unsent))
        until = self._monotonic() + self._drain_s
        while self._tasks and (now := self._monotonic()) < until:
            # A drain may last an hour, and the process may be killed in it.
            self._holding.tend(now)
            await asyncio.wait(list(self._tasks), timeout=min(_WAIT_S, until - now))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        await self._holding.end(_WRITE_S)

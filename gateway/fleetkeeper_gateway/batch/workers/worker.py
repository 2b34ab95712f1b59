"""Runs lines: takes chunks, sends their lines, and has the results written."""

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
from fleetkeeper_gateway.batch.model import BatchRecord, LineRef, Result
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
"""Maximum pause of the loop that sends lines."""
_SHORT_WAIT_S: Final = 0.1
"""Maximum pause while lines wait for places, which other processes may release at any time."""
_MIN_WAIT_S: Final = 0.005
_TAKING_S: Final = 5.0
"""Time for a last chunk to be taken once the process ends."""
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
        wake: Callable[[BatchRecord, str], str | None] = lambda _batch, _model: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the parts; `run` does the work.

        Lines have `drain_s` to end after `stop`, and `end_s` after their batch was cancelled or expired.
        `may_read` is set while there is room for the results of large answers. `route` returns the service
        that answers the lines of a key for a model. Its answers set their pace. `wake` returns the wake header
        of the lines of a batch for a model.
        """
        self._queue = queue
        self._places = places
        self._drain_s, self._end_s = drain_s, end_s
        self._wake = wake
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
        """Running lines."""

    @property
    def held(self) -> int:
        """Return the number of chunks that this process holds."""
        return len(self._holding.held)

    @property
    def running(self) -> int:
        """Return the number of running lines of this process."""
        return len(self._tasks)

    def stop(self) -> None:
        """Take no further chunks, send no further lines, and end `run` after the running lines."""
        self._stopping.set()
        self._changed.set()

    async def run(self) -> None:
        """Work until `stop`. Then wait for running lines for a bounded time, write results, and give chunks back."""
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
                async with asyncio.timeout(max(_MIN_WAIT_S, wait_s)):
                    await self._changed.wait()

    def _start_lines(self, now: float) -> bool:
        """Send the lines that may be sent. Return whether free places would allow further lines."""
        left: Counter[str] = Counter()
        runs = self._holding.runs
        stopped = {key for key in {run.key for run in runs} if self._holding.stops(key, now)}
        full: set[str] = set()
        for run in runs:
            key, pace = run.key, self.paces.of(run.route)
            could = 0 if key in stopped else min(run.waiting(now), pace.free(now))
            # Each started line takes room from all keys, so room is computed again.
            room = self._places.room(key) if could and key not in full else 0
            for _ in range(min(could, room)):
                self._start(run, run.next(now), pace.slot(now))
            if could > room:
                full.add(key)
                left[key] += could - room
        self._places.ready(left)
        return left.total() > 0

    def _start(self, run: ChunkRun, line: LineRef, slot: Slot) -> None:
        batch = run.held.batch
        wake = self._wake(batch, run.held.model)
        attempt = self._attempts.make(batch, line, run.tried(line.number), slot, wake)
        task = run.running[line.number] = asyncio.create_task(attempt)
        self._tasks[task] = run, slot
        self._places.start(run.key)
        task.add_done_callback(partial(self._ended, line.number))

    def _ended(self, line: int, task: asyncio.Task[Result | GivenBack]) -> None:
        """Release the place of an ended line. A cancelled line has no result."""
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
        """End the lines of ended batches after a time.

        A lost chunk of an active batch is finished here, although another process may have taken it: the
        first writer of a result counts.
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
        """End the lines of a chunk after a time, unless Redis knows its batch again.

        If only Redis lost a batch, the leader adds it again.
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
        # A task that has not started is cancelled without a trace.
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

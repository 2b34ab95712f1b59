"""Takes lines, has them answered, and has their results recorded."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

import structlog

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import (
    Batches,
    Queue,
    QueueDown,
    Sender,
    Taken,
    flow_of,
)
from fleetkeeper_gateway.batch.model import Result
from fleetkeeper_gateway.batch.workers.attempt import Attempts, GivenBack, broken
from fleetkeeper_gateway.batch.workers.inputs import Inputs
from fleetkeeper_gateway.batch.workers.pace import Paces, Slot
from fleetkeeper_gateway.batch.workers.recorder import Recorder

log = structlog.get_logger(__name__)

RENEWAL_S: Final = 10.0
_WAIT_S: Final = 1.0
"""Longest wait for lines, or for a place for them."""
_SHORT_WAIT_S: Final = 0.1
"""The same while some routes have a place and others may get one at any moment."""
_LEAST_WAIT_S: Final = 0.02
_DOWN_PAUSE_S: Final = 0.5
_REST_S: Final = 1.0
"""Pause after a look at the queue that found mostly lines of keys at a limit of their own."""
_AGAIN_S: Final = 2.0
"""Pause of a line after its first attempt that counts. Each further one is four times as long, so five
attempts take almost three minutes: an engine that answers 500 until it is replaced costs no line."""
_RECORD_S: Final = 20.0
"""Time to record results at the end of the process."""


class Worker:
    """Runs lines until it is stopped."""

    def __init__(
        self,
        queue: Queue,
        batches: Batches,
        inputs: Inputs,
        sender: Sender,
        *,
        concurrency: int,
        drain_s: float,
        end_s: float,
        route: Callable[[str, str], str] = flow_of,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the worker; `run` works.

        Args:
            queue: where lines are taken from.
            batches: where results are kept.
            inputs: where lines are read.
            sender: where they are sent.
            concurrency: most lines that run at the same time.
            drain_s: time that lines have to end after `stop`.
            end_s: time that lines have to end after their batch was cancelled or expired.
            route: names the service that answers lines of a key for a model, by whose answers they
                are paced.
            monotonic: the time.
        """
        self._queue = queue
        self._recorder = Recorder(batches, queue, self._release)
        self._attempts = Attempts(inputs, sender, monotonic)
        self._drain_s, self._end_s = drain_s, end_s
        self._monotonic = monotonic
        self._running = asyncio.Semaphore(concurrency)
        self.paces = Paces(concurrency)
        self._route = route
        self._routes: dict[str, str] = {}
        """Of the flows that have a pace."""
        self._held: dict[Taken, asyncio.Task[None]] = {}
        """Lines under a lease, from their taking until their result is recorded."""
        self._slots: dict[Taken, Slot] = {}
        """Of the lines that have no result yet."""
        self._ending: set[Taken] = set()
        """Lines whose batch is gone, which end by a timer."""
        self._rests: dict[str, float] = {}
        """Keys at a limit of their own, until when."""
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()

    @property
    def held(self) -> int:
        """Return the number of lines under a lease."""
        return len(self._held)

    def stop(self) -> None:
        """Take no more lines, and end `run` after those that run."""
        self._stopping.set()
        self._changed.set()

    async def run(self) -> None:
        """Work until `stop`. Then give back what was not sent, and wait for the rest a bounded time."""
        renewal = asyncio.create_task(self._keep_leases())
        try:
            await self._take_lines()
            await self._drain()
        finally:
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)

    # -- taking -----------------------------------------------------------------------------------

    async def _take_lines(self) -> None:
        while not self._stopping.is_set():
            self._changed.clear()
            now = self._monotonic()
            self._show()
            free = {} if self._recorder.behind else self.paces.free(now)
            if not any(free.values()):
                await self._change_within(min(_WAIT_S, self.paces.wakes(now) - now))
                continue
            is_partly_full = not all(free.values())
            self._routes = {flow: one for flow, one in self._routes.items() if one in free}
            wait_s = 0.0 if is_partly_full else _WAIT_S
            try:
                taken = await self._queue.take(free, wait_s, self._routes)
            except QueueDown as error:
                metrics.QUEUE_FAILURES.labels("take").inc()
                log.info("no lines can be taken", reason=str(error))
                await self._change_within(_DOWN_PAUSE_S)
                continue
            await self._start(taken)
            if is_partly_full and not taken:
                await self._change_within(_SHORT_WAIT_S)

    async def _start(self, taken: Iterable[Taken]) -> None:
        """Begin with lines, except those of keys that rest."""
        now = self._monotonic()
        self._rests = {key: until for key, until in self._rests.items() if until > now}
        resting = [one for one in taken if one.batch.key_id in self._rests]
        started = [one for one in taken if one.batch.key_id not in self._rests]
        for one in started:
            if self._stopping.is_set():
                resting.append(one)
            else:
                slot = self._slots[one] = self.paces.of(self._route_of(one)).slot(now)
                self._held[one] = asyncio.create_task(self._work(one, slot))
        if resting:
            await self._give_back(resting, attempt_counts=False)
        if len(resting) > len(started):
            await self._change_within(_REST_S)

    def _route_of(self, taken: Taken) -> str:
        """Return the route of a line, and keep it for its flow."""
        try:
            route = self._route(taken.batch.key_id, taken.model)
        except Exception:
            metrics.DEFECTS.labels("route").inc()
            log.exception("the service of a line cannot be found", batch=taken.batch.id)
            route = taken.flow
        self._routes[taken.flow] = route
        return route

    async def _change_within(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(_LEAST_WAIT_S, seconds)):
                await self._changed.wait()
        except TimeoutError:
            return

    # -- one line ---------------------------------------------------------------------------------

    async def _work(self, taken: Taken, slot: Slot) -> None:
        outcome: Result | GivenBack
        try:
            async with self._running:
                outcome = await self._attempts.make(taken, slot)
        except asyncio.CancelledError:
            metrics.LINES.labels("stopped").inc()
            outcome = GivenBack(attempt_counts=False)
        except Exception:
            metrics.DEFECTS.labels("line").inc()
            log.exception("line failed", batch=taken.batch.id, line=taken.line.number)
            outcome = broken(taken)
        slot.end(self._monotonic())
        del self._slots[taken]
        if isinstance(outcome, Result):
            self._recorder.add(taken, outcome)
            self._changed.set()
            return
        if outcome.key_rests_s is not None:
            self._rests[taken.batch.key_id] = self._monotonic() + outcome.key_rests_s
        if outcome.attempt_counts:
            await self._pause(_AGAIN_S * 4.0 ** (taken.attempt - 1))
        self._release(taken)
        await self._give_back([taken], attempt_counts=outcome.attempt_counts)

    async def _pause(self, seconds: float) -> None:
        """Wait, but not for a line whose batch is gone, nor at the end of the process."""
        with suppress(TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _release(self, taken: Taken) -> None:
        self._held.pop(taken, None)
        self._ending.discard(taken)
        self._changed.set()

    async def _give_back(self, taken: list[Taken], *, attempt_counts: bool) -> None:
        try:
            await self._queue.give_back(taken, attempt_counts=attempt_counts)
        except QueueDown as error:
            # Their leases run out, or the queue is rebuilt without them.
            metrics.QUEUE_FAILURES.labels("give_back").inc()
            log.info("lines cannot be given back", lines=len(taken), reason=str(error))

    # -- leases -----------------------------------------------------------------------------------

    async def _keep_leases(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL_S)
            try:
                lost = await self._queue.renew(list(self._held))
                await self._note_lost(lost)
            except QueueDown as error:
                metrics.QUEUE_FAILURES.labels("renew").inc()
                log.info("leases cannot be renewed", lines=len(self._held), reason=str(error))
            except Exception:
                # A defect must not end the leases of all other lines.
                log.exception("leases cannot be renewed", lines=len(self._held))

    async def _note_lost(self, lost: set[Taken]) -> None:
        """End lines whose batch is gone, after a time.

        A line of a batch that goes on is computed to its end, although another process may have it:
        its result may well be the first, and it costs nothing to keep it.
        """
        gone: dict[str, bool] = {}
        for taken in lost - self._ending:
            batch = taken.batch
            if batch.id not in gone:
                gone[batch.id] = await self._queue.counts(batch) is None
            task = self._held.get(taken)
            if gone[batch.id] and task is not None:
                self._ending.add(taken)
                asyncio.get_running_loop().call_later(self._end_s, task.cancel)

    # -- the end ----------------------------------------------------------------------------------

    async def _drain(self) -> None:
        # A task that did not begin could not give its line back.
        await asyncio.sleep(0)
        waiting = [self._held[taken] for taken, slot in self._slots.items() if not slot.is_sent]
        running = [task for task in self._held.values() if not task.done()]
        for task in waiting:
            task.cancel()
        log.info("worker drains", waiting=len(waiting), running=len(running) - len(waiting))
        if running:
            await asyncio.wait(running, timeout=self._drain_s)
        late = [task for task in self._held.values() if not task.done()]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
        await self._recorder.close(_RECORD_S)

    def _show(self) -> None:
        paces = self.paces.all().values()
        metrics.RUNNING.set(sum(pace.running for pace in paces))
        metrics.CONCURRENCY.set(sum(math.floor(pace.limit) for pace in paces))

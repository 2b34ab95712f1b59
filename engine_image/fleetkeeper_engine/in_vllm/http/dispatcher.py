"""Movement of the admission queue on the event loop: releases, ticks, the end of a drain, publication."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from fleetkeeper_engine.in_vllm.http.admission.queue import Admission
from fleetkeeper_engine.in_vllm.http.admission.tickets import Ticket
from fleetkeeper_engine.in_vllm.http.asgi import Inbox
from fleetkeeper_engine.in_vllm.http.bodies import BodyBudget
from fleetkeeper_engine.in_vllm.http.grants.gate import GrantGate
from fleetkeeper_engine.in_vllm.http.shared_state import SharedState

logger = logging.getLogger("vllm.fleetkeeper")

_TICK_S = 0.05
"""Period of the queue's tick while something waits in it."""
_REST_S = 0.25
"""Period while nothing waits, for closing bins and ending drains. A tick takes time from the engine
beside it."""
_PUBLISH_EVERY_S = 0.2


class Dispatcher:
    """The requests that wait for their release, and those inside vLLM."""

    def __init__(
        self,
        admission: Admission,
        shared_state: SharedState,
        bodies: BodyBudget,
        grants: GrantGate,
        clock: Callable[[], float],
    ) -> None:
        self._admission = admission
        self._shared_state = shared_state
        self._bodies = bodies
        self._grants = grants
        self._clock = clock
        self.running: dict[Ticket, asyncio.Task[object]] = {}
        self.aborted: set[Ticket] = set()
        """Requests that the end of a drain ended."""
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._something_waits = asyncio.Event()
        self._publishes = False
        self._publish_due = 0.0

    def start(self) -> None:
        """Start the tick, once. It needs the event loop, which does not run yet at construction."""
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick())

    def is_cancelled(self, ticket: Ticket) -> bool:
        """Return whether the end of a drain cancelled the task of this request."""
        return ticket in self.aborted and ticket in self.running

    async def released(self, ticket: Ticket, inbox: Inbox) -> int | None:
        """Wait for the ticket's release and return its priority; None after a hang-up or the drain's end."""
        self._pump()
        if ticket.priority is not None:
            return ticket.priority
        loop = asyncio.get_running_loop()
        release: asyncio.Future[None] = loop.create_future()
        self._waiters[ticket] = release
        self._something_waits.set()
        gone = loop.create_task(inbox.gone())
        try:
            await asyncio.wait((release, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiters.pop(ticket, None)
            left = gone.done()
            gone.cancel()
        return None if left else ticket.priority

    def finish(self, ticket: Ticket) -> None:
        """End a request that vLLM answered, or that did not reach it."""
        self.running.pop(ticket, None)
        self.aborted.discard(ticket)
        self._admission.finish(ticket, self._clock())
        self._pump()
        if not self._admission.unfinished:
            # Publish now, because the next request may be hours away.
            self._shared_state.publish()

    def publish_before_end(self, timed: bool) -> None:
        """Publish counters before the final frame, so that scrapers see the completed request.

        Args:
            timed: the frames of the response were counted, maybe after the last publication.
        """
        if (self._publishes or timed) and self._admission.unfinished <= 1:
            self._shared_state.publish()

    def _pump(self) -> None:
        """Release the requests that may be released, and publish the new state."""
        if self._admission.waiting:
            self._shared_state.refresh()
            for ticket in self._admission.release_ready(self._clock()):
                waiter = self._waiters.get(ticket)
                if waiter is not None and not waiter.done():
                    waiter.set_result(None)
        self.publish_soon()

    def publish_soon(self) -> None:
        """Write shared memory in this iteration of the event loop, or 200 ms after the last such write."""
        if self._publishes:
            return
        self._publishes = True
        loop = asyncio.get_running_loop()
        if loop.time() >= self._publish_due:
            loop.call_soon(self._publish, loop)
        else:
            loop.call_at(self._publish_due, self._publish, loop)

    def _publish(self, loop: asyncio.AbstractEventLoop) -> None:
        self._publishes = False
        self._publish_due = loop.time() + _PUBLISH_EVERY_S
        self._shared_state.publish()

    async def _tick(self) -> None:
        """Do what must happen without a request: leases end, limits rise, bins close, drains end, grants."""
        while True:
            try:
                now = self._clock()
                self._shared_state.refresh()
                if self._grants.refresh():
                    self._shared_state.publish()
                self._admission.tick(self._shared_state.engine_oldest(), now)
                self._pump()
                self._bodies.abort_slow(now)
                if self._shared_state.drain_is_over(now):
                    self._end_drain(now)
            except Exception:
                # Every request moves the queue too; the next tick tries again.
                logger.exception("a tick of the admission queue failed")
            await self._until_next_tick()

    async def _until_next_tick(self) -> None:
        if self._waiters:
            await asyncio.sleep(_TICK_S)
            return
        self._something_waits.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._something_waits.wait(), _REST_S)

    def _end_drain(self, now: float) -> None:
        for ticket in self._admission.flush(now):
            self.aborted.add(ticket)
            waiter = self._waiters.get(ticket)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        for ticket, task in list(self.running.items()):
            if ticket not in self.aborted:
                self.aborted.add(ticket)
                task.cancel()

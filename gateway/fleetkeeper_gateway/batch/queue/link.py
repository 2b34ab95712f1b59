"""The link to Redis: a connection to a server whose epoch this process may work in.

A connection ends with its first failure, and with the first sign that Redis was reset. Every call
names the epoch and the highest tick that Redis told this process; the scripts refuse if either does
not fit. So nothing is taken or committed between a reset and its discovery.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from fleetkeeper_gateway.batch.interfaces import QueueDown, StorageError
from fleetkeeper_gateway.batch.queue.metrics import QueueMetrics
from fleetkeeper_gateway.batch.queue.names import EPOCH, tick_key
from fleetkeeper_gateway.batch.queue.records import Answer, as_answer, as_number, as_text
from fleetkeeper_gateway.batch.queue.recovery import Known, Recovery
from fleetkeeper_gateway.batch.queue.scripts import CHECK
from fleetkeeper_gateway.batch.queue.server import Unfit, run_id_of
from fleetkeeper_gateway.batch.queue.timing import Timing
from fleetkeeper_gateway.limits.pipe import Pipe, PipeEnded
from fleetkeeper_gateway.limits.scripts import Script

log = structlog.get_logger(__name__)

FAILURES = (RedisError, PipeEnded, Unfit, StorageError, OSError, TimeoutError, ValueError)


@dataclass(slots=True)
class _Session:
    """A connection that is in use."""

    pipe: Pipe
    epoch: int
    over: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""

    def end(self, reason: str) -> None:
        """Take it out of use."""
        self.reason = self.reason or reason
        self.over.set()


class Link:
    """The connection, while there is one that works."""

    def __init__(
        self,
        connect: Callable[[], AbstractConnection],
        recovery: Recovery,
        process: str,
        timing: Timing,
        metrics: QueueMetrics,
    ) -> None:
        self._connect = connect
        self._recovery = recovery
        self._timing = timing
        self._metrics = metrics
        self._keys = (EPOCH, tick_key(process))
        self._known = Known()
        self._session: _Session | None = None
        self._reason = "it is not connected yet"
        self._came_up = asyncio.Event()
        self._told = False
        """Whether the log says that the queue is down."""
        self._lines_wait: Callable[[], None] = lambda: None

    @property
    def up(self) -> bool:
        """Return whether Redis can be asked."""
        return self._came_up.is_set()

    @property
    def epoch(self) -> int:
        """Return the epoch that this process works in, or worked in last."""
        return self._known.epoch

    def on_lines_wait(self, tell: Callable[[], None]) -> None:
        """Call this at each check that finds lines that wait."""
        self._lines_wait = tell

    async def until_up(self, wait_s: float) -> None:
        """Wait until Redis can be asked.

        Raises:
            QueueDown: it cannot after this time.
        """
        try:
            async with asyncio.timeout(wait_s):
                await self._came_up.wait()
        except TimeoutError:
            raise QueueDown(f"the queue is down: {self._reason}") from None

    def send(self, script: Script, *arguments: bytes | str | int) -> asyncio.Future[Answer]:
        """Run a script, and return the task of its answer.

        It ends with QueueDown if Redis refuses, or does not answer. Nobody has to wait for it.
        """
        task = asyncio.ensure_future(self.call(script, *arguments))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def call(self, script: Script, *arguments: bytes | str | int) -> Answer:
        """Run a script and return its answer. The first value is a tick.

        Raises:
            QueueDown: Redis refused, or did not answer. It may have done it if it did not answer.
        """
        session = self._session
        if session is None:
            raise QueueDown(f"the queue is down: {self._reason}")
        words = (session.epoch, self._known.tick, *arguments)
        try:
            found: object = await session.pipe.script(
                script, self._keys, words, self._timing.call_s
            )
        except (PipeEnded, RedisError) as error:
            raise QueueDown(f"Redis did not do it: {_text(error)}") from error
        answer = as_answer(found)
        tick = as_number(answer[0])
        if tick < 0:
            reason = f"Redis was reset ({as_text(answer[1])})"
            self._down(session, reason)
            raise QueueDown(reason)
        if session.epoch == self._known.epoch:
            self._known.tick = max(self._known.tick, tick)
        return answer

    async def run(self) -> None:
        """Keep a connection. Runs until it is cancelled."""
        while True:
            try:
                await self._once()
            except FAILURES as error:
                self._lost(_text(error))
            await asyncio.sleep(self._timing.retry_s)

    async def _once(self) -> None:
        """Connect, and stay until the connection ends."""
        connection = self._connect()
        pipe: Pipe | None = None
        try:
            async with asyncio.timeout(self._timing.connect_s):
                await connection.connect()  # type: ignore[no-untyped-call]
            pipe = Pipe(connection, self._ended)
            run_id = await run_id_of(pipe, self._timing.call_s)
            epoch = await self._recovery.ready_epoch(pipe, run_id, self._known)
            await self._use(_Session(pipe, epoch), run_id)
        finally:
            if self._session is not None:
                self._down(self._session, "it is closed")
            await (connection.disconnect(nowait=True) if pipe is None else pipe.close())

    async def _use(self, session: _Session, run_id: str) -> None:
        if session.epoch != self._known.epoch:
            self._known = Known(session.epoch)
        self._session = session
        await self._check(session, run_id)
        if not session.over.is_set():
            self._found(session)
        while not session.over.is_set():
            try:
                async with asyncio.timeout(self._timing.check_s):
                    await session.over.wait()
            except TimeoutError:
                await self._check(session, run_id)
        raise Unfit(session.reason)

    async def check(self) -> None:
        """Count a tick, and put lines back whose leases ran out.

        Raises:
            QueueDown: Redis refused, or did not answer.
        """
        timing = self._timing
        idle_ms = int(timing.lease_s * 1000) + timing.age_ms()
        answer = await self.call(CHECK, idle_ms, int(timing.process_s * 1000))
        if answer[1]:
            self._lines_wait()

    async def _check(self, session: _Session, run_id: str) -> None:
        found = await run_id_of(session.pipe, self._timing.call_s)
        if found != run_id:
            raise Unfit("the server's run_id changed")
        try:
            await self.check()
        except QueueDown as error:
            self._down(session, str(error))

    def _ended(self, pipe: Pipe, reason: str) -> None:
        if self._session is not None and self._session.pipe is pipe:
            self._down(self._session, reason)

    def _found(self, session: _Session) -> None:
        self._told = False
        self._metrics.up.set(1)
        self._metrics.epoch.set(session.epoch)
        self._came_up.set()
        log.info("the queue is up", epoch=session.epoch)

    def _down(self, session: _Session, reason: str) -> None:
        session.end(reason)
        if self._session is session:
            self._session = None
            self._came_up.clear()
            self._reason = reason
            self._metrics.up.set(0)

    def _lost(self, reason: str) -> None:
        self._reason = reason
        self._metrics.failures.inc()
        if not self._told:
            self._told = True
            log.warning("the queue is down", reason=reason)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__

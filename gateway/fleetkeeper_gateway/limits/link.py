"""The link to Redis: opened and tested in the background, closed at the first failure.

A request never opens a connection and never waits for a server that has failed. While the link is
down, a task opens a connection every second and tests it as requests use it: by a script that writes.
So a full server or a read-only replica does not count as working.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

import structlog
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from fleetkeeper_gateway.limits.metrics import LimitMetrics
from fleetkeeper_gateway.limits.names import names_of
from fleetkeeper_gateway.limits.pipe import Arguments, Pipe, PipeEnded
from fleetkeeper_gateway.limits.scripts import ADMIT, SCRIPTS, Script

log = structlog.get_logger(__name__)

CONNECT_S = 5.0
"""Maximum time for name lookup, TCP, TLS and AUTH. No request waits for it."""
STEADY_S = 10.0
"""Age from which a lost connection is replaced at once, because a server may close idle connections."""
PROBE = names_of(":probe", "standard")
"""Redis keys of the test. No Secret can have this name."""


class Unavailable(Exception):
    """A call to Redis failed. `asked`: the call was sent, so Redis may have executed it or still may."""

    def __init__(self, *, asked: bool) -> None:
        super().__init__("Redis is not available")
        self.asked = asked


@dataclass(frozen=True, slots=True)
class Timing:
    """Time constants of the limits."""

    budget_s: float = 0.04
    """Maximum wait of a request for Redis, so that it continues within 50 ms."""
    settle_budget_s: float = 2.0
    """Maximum wait of settling, which delays no client."""
    retry_s: float = 1.0
    window_s: int = 60
    """Window of the limit of requests."""
    lease_s: float = 30.0
    """Time after which the concurrency slots of a dead replica are released."""
    renew_s: float = 10.0
    orphan_s: float = 600.0
    """Time after which the tokens of a request are released that was neither ended nor settled."""


class _Phase(Enum):
    STARTING = "starting"
    SHARED = "shared"
    LOCAL = "local"


class Link:
    """The connection to Redis, while it works."""

    def __init__(
        self,
        connect: Callable[[], AbstractConnection],
        timing: Timing,
        metrics: LimitMetrics,
        on_up: Callable[[], None],
    ) -> None:
        self._connect = connect
        self._timing = timing
        self._metrics = metrics
        self._on_up = on_up
        self._pipe: Pipe | None = None
        self._phase = _Phase.STARTING
        self._tried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        """Return whether calls are sent to Redis."""
        return self._pipe is not None

    def start(self) -> None:
        """Start to connect."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep())

    async def first_attempt(self, budget_s: float) -> None:
        """Wait for the end of the first attempt to connect, within the budget."""
        if self._phase is not _Phase.STARTING:
            return
        self.start()
        try:
            async with asyncio.timeout(budget_s):
                await self._tried.wait()
        except TimeoutError:
            self._lost("no connection in time")

    def send(
        self,
        script: Script,
        keys: tuple[bytes, ...],
        arguments: Arguments,
        budget_s: float,
    ) -> asyncio.Future[bytes]:
        """Send a script call, and return the future of its reply.

        A failure closes the link, also if the future is never awaited.

        Raises:
            Unavailable: there is no connection. Nothing was sent.
        """
        if self._pipe is None:
            raise Unavailable(asked=False)
        answer = self._pipe.script(script, keys, arguments, budget_s)
        answer.add_done_callback(partial(_end_if_refused, self._pipe))
        return answer

    async def run(
        self,
        script: Script,
        keys: tuple[bytes, ...],
        arguments: Arguments,
        budget_s: float,
    ) -> bytes:
        """Run a script and return its reply.

        Raises:
            Unavailable: there is no connection, or it failed and was closed.
        """
        try:
            return await self.send(script, keys, arguments, budget_s)
        except (PipeEnded, RedisError) as error:
            raise Unavailable(asked=True) from error

    async def close(self) -> None:
        """Close the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begin = loop.time()
            pipe = await self._opened()
            if pipe is not None:
                try:
                    await pipe.ended.wait()
                finally:
                    self._pipe = None  # closed on purpose: nothing was lost
                    await pipe.close()
            if pipe is None or loop.time() - begin < STEADY_S:
                await asyncio.sleep(self._timing.retry_s)

    async def _opened(self) -> Pipe | None:
        """Open and test a connection. Return None if either fails."""
        connection = self._connect()
        pipe: Pipe | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                await connection.connect()  # type: ignore[no-untyped-call]
            pipe = Pipe(connection, self._ended)
            await self._probe(pipe)
        except (RedisError, PipeEnded, OSError, TimeoutError, ValueError) as error:
            self._lost(_reason(error))
            return None
        else:
            self._found(pipe)
            return pipe
        finally:
            self._tried.set()
            if self._pipe is None:
                await (connection.disconnect(nowait=True) if pipe is None else pipe.close())

    async def _probe(self, pipe: Pipe) -> None:
        """Load the scripts, and write as requests do."""
        budget_s = self._timing.budget_s
        for script in SCRIPTS:
            await pipe.command(b"SCRIPT", b"LOAD", script.text, budget_s=budget_s)
        arguments: Arguments = ("probe", 1_000_000_000, -1, -1, 0, self._timing.window_s, 1, 1)
        await pipe.script(ADMIT, PROBE.admit, arguments, budget_s)

    def _found(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._phase = _Phase.SHARED
        self._metrics.shared.set(1)
        log.info("limits are shared: Redis answers")
        self._on_up()

    def _ended(self, pipe: Pipe, reason: str) -> None:
        if pipe is self._pipe:
            self._pipe = None
            self._lost(reason)

    def _lost(self, reason: str) -> None:
        self._metrics.failures.inc()
        if self._phase is _Phase.LOCAL:
            return
        self._phase = _Phase.LOCAL
        self._metrics.shared.set(0)
        log.warning("limits are local to this replica: Redis does not answer", reason=reason)


def _end_if_refused(pipe: Pipe, answer: asyncio.Future[bytes]) -> None:
    if not answer.cancelled() and isinstance(error := answer.exception(), RedisError):
        pipe.end(_reason(error))


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__

"""The connection to Redis, closed at its first failure, and the checks of the server."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import structlog
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import QueueDown
from fleetkeeper_gateway.limits.pipe import Pipe, PipeEnded
from fleetkeeper_gateway.limits.scripts import Script

log = structlog.get_logger(__name__)

PREFIX = "fleetkeeper:batch2:"
MAX_USED = 0.6
"""Maximum share of `maxmemory` at which chunks are added. The limits of keys need the rest."""
_TEXT = f"local PREFIX = '{PREFIX}'\n".encode() + (files(__package__) / "queue.lua").read_bytes()
_SCRIPT = Script(_TEXT, hashlib.sha1(_TEXT, usedforsecurity=False).hexdigest().encode())
_FAILURES = (RedisError, PipeEnded, QueueDown, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of the queue, in seconds. No setting changes them; tests do."""

    idle_s: float = 60.0  # after which a chunk waits again that its process does not renew
    settle_s: float = 15.0  # of a new connection, in which others renew what they hold
    running_s: float = 30.0  # for which the running lines of a process count
    lead_s: float = 30.0  # of the lease of a task that one process does
    check_s: float = 1.0  # between two checks of the server
    retry_s: float = 1.0  # between two attempts to connect
    connect_s: float = 5.0  # for the name, TCP, TLS and AUTH
    call_s: float = 10.0  # of one call at most; then the connection is given up


class Link:
    """The connection for calls, while it works."""

    def __init__(self, connect: Callable[[], AbstractConnection], timing: Timing) -> None:
        self._connect = connect
        self._timing = timing
        self._pipe: Pipe | None = None
        """None while Redis cannot be called."""
        self._began = 0.0
        """Monotonic time at which the connection was opened."""
        self._reason = "it is not connected yet"
        self._is_logged = False
        """True if it was logged that the queue is down."""
        self._run_id = ""
        self._no_room = ""
        self.server = 0
        """Number that grows with the first connection and with each restart of Redis."""

    @property
    def up(self) -> bool:
        """Return whether Redis can be called."""
        return self._pipe is not None

    @property
    def _is_settled(self) -> bool:
        """Return whether processes had time to renew their chunks since the server was last unavailable."""
        return time.monotonic() >= self._began + self._timing.settle_s

    async def run(self) -> None:
        """Keep a connection open until cancelled."""
        while True:
            connection = self._connect()
            try:
                async with asyncio.timeout(self._timing.connect_s):
                    await connection.connect()  # type: ignore[no-untyped-call]
                await self._use(connection)
            except _FAILURES as error:
                self._failed(_text(error))
            finally:
                await connection.disconnect(nowait=True)
            await asyncio.sleep(self._timing.retry_s)

    async def _call(self, name: str, *arguments: bytes | str | int) -> list[Any]:
        """Run a function of queue.lua. Return its reply, or an empty list without one.

        Raises:
            QueueDown: Redis refused, or did not answer. In the second case it may have executed the call.
        """
        if self._pipe is None:
            raise QueueDown(f"the queue is down: {self._reason}")
        if name == "add" and self._no_room:
            raise QueueDown(self._no_room)
        words = (name, *arguments)
        try:
            found: Any = await self._pipe.script(_SCRIPT, (), words, self._timing.call_s)
        except (PipeEnded, RedisError) as error:
            raise QueueDown(f"Redis did not do it: {_text(error)}") from error
        return found or []

    async def _use(self, connection: AbstractConnection) -> None:
        """Open a connection to calls, and check the server periodically, until it ends."""
        pipe = Pipe(connection, self._on_end)
        try:
            await self._check(pipe)
            self._begin(pipe)
            while pipe.reason is None:
                try:
                    async with asyncio.timeout(self._timing.check_s):
                        await pipe.ended.wait()
                except TimeoutError:
                    await self._check(pipe)
            raise PipeEnded(pipe.reason)
        finally:
            await pipe.close()

    async def _check(self, pipe: Pipe) -> None:
        """Check that the server is suitable, has room, and is the same as before."""
        found: Any = await pipe.script(_SCRIPT, (), ("info",), self._timing.call_s)
        lines = found.decode().splitlines()
        info = dict(line.split(":", 1) for line in lines if ":" in line)
        _assert_fit(info)
        self._no_room = _no_room(info)
        if self._run_id != info["run_id"]:
            self._run_id = info["run_id"]
            self.server += 1

    def _begin(self, pipe: Pipe) -> None:
        self._pipe, self._is_logged = pipe, False
        self._began = time.monotonic()
        metrics.QUEUE_UP.set(1)
        log.info("the queue is up", server=self.server)

    def _on_end(self, pipe: Pipe, reason: str) -> None:
        if self._pipe is pipe:
            self._pipe, self._reason = None, reason
            metrics.QUEUE_UP.set(0)

    def _failed(self, reason: str) -> None:
        metrics.QUEUE_ENDS.inc()
        if self._pipe is None:
            self._reason = reason
            if not self._is_logged:
                self._is_logged = True
                log.warning("the queue is down", reason=reason)


def _assert_fit(info: dict[str, str]) -> None:
    """Raise QueueDown if the server is a replica of another, or evicts keys when it is full."""
    role, policy = info.get("role"), info.get("maxmemory_policy")
    if role != "master":
        raise QueueDown(f"the server's role is {role}; BATCH_REDIS_URL must lead to the primary")
    if info.get("maxmemory") != "0" and policy != "noeviction":
        raise QueueDown(
            f"the server's maxmemory-policy is {policy}, so it drops keys when it is full; "
            "set it to noeviction"
        )


def _no_room(info: dict[str, str]) -> str:
    """Return the reason why chunks must not be added; an empty text if they may."""
    used, most = int(info["used_memory"]), int(info["maxmemory"])
    if not most or used <= MAX_USED * most:
        return ""
    return (
        f"Redis uses {used} of the {most} bytes of its maxmemory, and no chunks are added above "
        f"{MAX_USED:.0%}; raise maxmemory, or give batches a Redis of their own (BATCH_REDIS_URL)"
    )


def _text(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    if "permissions" in text or "can't access" in text:
        text += f"; give the user the rights for {PREFIX}* (docs/gateway-install.md)"
    return text

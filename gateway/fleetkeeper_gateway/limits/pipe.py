"""A pipelined connection to Redis: calls are sent without waiting for earlier replies.

A request calls Redis twice. Over a pool, each call would take a connection (or open one, in the
request's time) and pass through the client library's layers: about 55 us of CPU time here, against
20 to 40 us over this pipe. One connection also keeps calls in order: a request's release arrives before
the admission of the next request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoScriptError, RedisError, ResponseError

from fleetkeeper_gateway.limits.scripts import Script

Arguments = tuple[bytes | str | int, ...]

TICK_S = 0.005
"""Maximum time that one turn of the event loop counts. A longer turn shows a busy loop, which reads no replies
meanwhile, and not a slow server."""


class PipeEnded(Exception):
    """The connection has ended. The message states the reason."""


@dataclass(slots=True)
class _Call:
    words: Arguments
    script: Script | None
    """The script that the command names by its digest; None for other commands."""
    answer: asyncio.Future[bytes]
    budget_s: float
    deadline: float
    """Deadline in the pipe's time."""


class Pipe:
    """An open connection. It ends at the first failure, and is never reopened."""

    def __init__(self, connection: AbstractConnection, on_end: Callable[[Pipe, str], None]) -> None:
        self._connection = connection
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._calls: deque[_Call] = deque()
        self._unsent: list[bytes] = []
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._waited_s = 0.0
        """The pipe's time at the last tick: the time in which replies could be read."""
        self._ticked = 0.0
        """Time of the last tick, in the event loop's time."""
        self.reason: str | None = None
        """Reason of the end; None while the connection is open."""
        self.ended = asyncio.Event()
        self._tasks = (
            self._loop.create_task(self._guarded(self._write())),
            self._loop.create_task(self._guarded(self._read())),
        )

    def command(self, *words: bytes | str | int, budget_s: float) -> asyncio.Future[bytes]:
        """Send a command, and return the future of its reply.

        Raises:
            PipeEnded: the connection has ended.
        """
        return self._send(words, None, self._loop.create_future(), budget_s)

    def script(
        self,
        script: Script,
        keys: tuple[bytes, ...],
        arguments: Arguments,
        budget_s: float,
    ) -> asyncio.Future[bytes]:
        """Send a script call, and return the future of its reply.

        Raises:
            PipeEnded: the connection has ended.
        """
        words = (b"EVALSHA", script.digest, len(keys), *keys, *arguments)
        return self._send(words, script, self._loop.create_future(), budget_s)

    def _send(
        self,
        words: Arguments,
        script: Script | None,
        answer: asyncio.Future[bytes],
        budget_s: float,
    ) -> asyncio.Future[bytes]:
        if self.reason is not None:
            raise PipeEnded(self.reason)
        if self._timer is None:
            self._ticked = self._loop.time()
        call = _Call(words, script, answer, budget_s, self._time() + budget_s)
        self._unsent.extend(self._connection.pack_command(*words))
        # Replies come in order, so this call also waits for the earlier ones, and has at least their time.
        for earlier in reversed(self._calls):
            if earlier.deadline <= call.deadline:
                break
            earlier.deadline, earlier.budget_s = call.deadline, budget_s
        self._calls.append(call)
        self._wake.set()
        if self._timer is None:
            self._timer = self._loop.call_later(TICK_S, self._tick)
        return answer

    def _time(self) -> float:
        """Return the time in which replies could be read. Each turn of the loop adds at most TICK_S."""
        return self._waited_s + min(self._loop.time() - self._ticked, TICK_S)

    def end(self, reason: str) -> None:
        """Close the connection. All waiting calls fail."""
        if self.reason is not None:
            return
        self.reason = reason
        if self._timer is not None:
            self._timer.cancel()
        for call in self._calls:
            _fail(call.answer, PipeEnded(reason))
        self._calls.clear()
        for task in self._tasks:
            task.cancel()
        self._on_end(self, reason)
        self.ended.set()

    async def close(self) -> None:
        """Close the connection and wait until it is closed."""
        self.end("closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connection.disconnect(nowait=True)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (RedisError, OSError) as error:
            self.end(str(error) or type(error).__name__)

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            packed, self._unsent = self._unsent, []
            await self._connection.send_packed_command(packed, check_health=False)

    async def _read(self) -> None:
        while True:
            try:
                found = await self._connection.read_response(disable_decoding=True)
            except ResponseError as error:
                self._refused(self._calls.popleft(), error)
            else:
                answer = self._calls.popleft().answer
                if not answer.done():
                    answer.set_result(found)

    def _refused(self, call: _Call, error: ResponseError) -> None:
        if isinstance(error, NoScriptError) and call.script is not None:
            # The server lost its scripts. The full text loads the script again.
            words = (b"EVAL", call.script.text, *call.words[2:])
            self._send(words, None, call.answer, call.budget_s)
        else:
            _fail(call.answer, error)

    def _tick(self) -> None:
        """Close the connection if the oldest call has waited too long."""
        self._timer = None
        self._waited_s, self._ticked = self._time(), self._loop.time()
        if not self._calls:
            return
        left_s = self._calls[0].deadline - self._waited_s
        if left_s <= 0:
            self.end("no answer in time")
            return
        self._timer = self._loop.call_later(min(left_s, TICK_S), self._tick)


def _fail(answer: asyncio.Future[bytes], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)

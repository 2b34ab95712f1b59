"""One connection to Redis, on which calls follow one another without waiting for answers.

A request asks Redis twice. Over a pool, each call would take a connection (or open one, in the
request's time) and pass through the client's own layers: about 55 us of the processor here, against
20 to 40 us over this pipe. One connection also keeps calls in order: what a request gives back arrives
before what the next one asks.
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

LATE_S = 0.01
"""A timer that fires later than this shows a busy event loop, not a slow server."""


class PipeEnded(Exception):
    """The connection is gone. The text says why."""


@dataclass(slots=True)
class _Call:
    words: Arguments
    script: Script | None
    """The script that the words name by its digest."""
    answer: asyncio.Future[bytes]
    budget_s: float
    deadline: float
    excused: bool = False
    """Whether its time was extended once because the event loop was busy."""


class Pipe:
    """An open connection. It ends with the first failure, and is never repaired."""

    def __init__(self, connection: AbstractConnection, on_end: Callable[[Pipe, str], None]) -> None:
        self._connection = connection
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._calls: deque[_Call] = deque()
        self._unsent: list[bytes] = []
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """When the timer fires."""
        self.reason: str | None = None
        """Why it ended."""
        self.ended = asyncio.Event()
        self._tasks = (
            self._loop.create_task(self._guarded(self._write())),
            self._loop.create_task(self._guarded(self._read())),
        )

    def command(self, *words: bytes | str | int, budget_s: float) -> asyncio.Future[bytes]:
        """Send a command, and return the future of its answer.

        Raises:
            PipeEnded: the connection is gone.
        """
        return self._send(words, None, self._loop.create_future(), budget_s)

    def script(
        self,
        script: Script,
        keys: tuple[bytes, ...],
        arguments: Arguments,
        budget_s: float,
    ) -> asyncio.Future[bytes]:
        """Run a script, and return the future of its answer.

        Raises:
            PipeEnded: the connection is gone.
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
        call = _Call(words, script, answer, budget_s, self._loop.time() + budget_s)
        self._unsent.extend(self._connection.pack_command(*words))
        # Answers come in order, so this call waits for those before it, and its time is theirs too.
        for earlier in reversed(self._calls):
            if earlier.deadline <= call.deadline:
                break
            earlier.deadline, earlier.budget_s = call.deadline, budget_s
        self._calls.append(call)
        self._wake.set()
        if self._timer is None or call.deadline < self._due:
            self._check_at(call.deadline)
        return answer

    def _check_at(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_at(due, self._check, due)

    def end(self, reason: str) -> None:
        """Close the connection. Every call that waits fails."""
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
            # The server was emptied. It learns the script from the text.
            words = (b"EVAL", call.script.text, *call.words[2:])
            self._send(words, None, call.answer, call.budget_s)
        else:
            _fail(call.answer, error)

    def _check(self, due: float) -> None:
        """End the connection if the oldest call has waited too long."""
        self._timer = None
        if not self._calls:
            return
        oldest, now = self._calls[0], self._loop.time()
        if now >= oldest.deadline and now - due > LATE_S and not oldest.excused:
            oldest.excused = True
            oldest.deadline = now + oldest.budget_s
        if now >= oldest.deadline:
            self.end("no answer in time")
            return
        self._check_at(oldest.deadline)


def _fail(answer: asyncio.Future[bytes], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)

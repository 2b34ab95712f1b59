"""The load of the gateway's benchmark: a thin HTTP client, open and closed loops, and streams.

It costs less than what it measures, which `fleetkeeper_local.load` does not: a gateway adds a millisecond.
Times are those of `perf_counter`: uvloop's own clock has whole milliseconds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final, Self, cast

import httptools

PROMPT: Final = "The quick brown fox jumps over the lazy dog. " * 20
"""About a kilobyte, as a short chat has."""
PATIENCE_S: Final = 60.0


@dataclass
class Answer:
    """What came back, and when."""

    status: int = 0
    frames: list[float] = field(default_factory=list)
    """When each frame of a stream came (seconds)."""
    ended: bool = False


class Connection(asyncio.Protocol):
    """A kept-alive connection for one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser: httptools.HttpResponseParser | None = None
        self._answer = Answer()
        self._done: asyncio.Future[Answer] | None = None
        self._transport: asyncio.Transport | None = None
        self.flowing = asyncio.Event()
        """Set once two frames of a stream came, or the connection ended."""

    @property
    def open(self) -> bool:
        """Return whether it can take another request."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # A transport of uvloop is a subclass of none of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's name
        """End the request that is waiting, without an answer."""
        self._transport = None
        self.flowing.set()
        self._finish()

    def send(self, request: bytes) -> asyncio.Future[Answer]:
        """Send a request; the future is done when its answer has ended, or the connection has."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._answer = Answer()
        self._done = self._loop.create_future()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        """Close it, with what is still coming."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        if self._parser is not None:
            self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        """Note the status."""
        assert self._parser is not None
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Note when frames came; those of one packet came together."""
        self._answer.frames += [perf_counter()] * body.count(b"data: ")
        if len(self._answer.frames) >= 2:
            self.flowing.set()

    def on_message_complete(self) -> None:
        """End the answer."""
        self._answer.ended = True
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._answer)


@dataclass(frozen=True)
class Target:
    """Where requests go."""

    port: int
    headers: Mapping[str, str]
    model: str = "tiny"

    def request(self, **fields: object) -> bytes:
        """Return a chat completion as bytes."""
        message = {"role": "user", "content": PROMPT}
        body = json.dumps({"model": self.model, "messages": [message], **fields}).encode()
        head = [
            "POST /v1/chat/completions HTTP/1.1",
            "Host: gateway",
            "Content-Type: application/json",
        ]
        head += [f"{name}: {value}" for name, value in self.headers.items()]
        head.append(f"Content-Length: {len(body)}")
        return "\r\n".join(head).encode() + b"\r\n\r\n" + body

    async def connect(self) -> Connection:
        """Return a new connection."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self.port)
        return connection


@dataclass
class Latencies:
    """Seconds from the intended point in time of each request to its whole answer."""

    seconds: list[float] = field(default_factory=list)
    failed: int = 0

    def add(self, answer: Answer, took_s: float) -> None:
        """Count one request."""
        if answer.ended and answer.status == 200:
            self.seconds.append(took_s)
        else:
            self.failed += 1


async def open_loop(target: Target, rate: float, seconds: float, seed: int) -> Latencies:
    """Send requests at random points in time, independently of earlier requests."""
    dice = random.Random(seed)
    request = target.request(max_tokens=3)
    idle: deque[Connection] = deque()
    found = Latencies()
    connections: list[Connection] = []

    async def one(due: float) -> None:
        while idle and not idle[-1].open:
            idle.pop()
        try:
            connection = idle.pop() if idle else await target.connect()
        except OSError:
            found.failed += 1
            return
        connections.append(connection)
        answer = await connection.send(request)
        found.add(answer, perf_counter() - due)
        if connection.open:
            idle.append(connection)

    try:
        async with asyncio.timeout(seconds + PATIENCE_S), asyncio.TaskGroup() as group:
            due = end = perf_counter()
            end += seconds
            while (due := due + dice.expovariate(rate)) < end:
                await asyncio.sleep(due - perf_counter())
                group.create_task(one(due))
    finally:
        for connection in connections:
            connection.close()
    return found


async def closed_loop(target: Target, clients: int, seconds: float) -> Latencies:
    """Let so many clients send one request after another."""
    request = target.request(max_tokens=3)
    found = Latencies()
    end = perf_counter() + seconds

    async def client() -> None:
        connection = await target.connect()
        while (began := perf_counter()) < end:
            if not connection.open:
                connection = await target.connect()
            found.add(await connection.send(request), perf_counter() - began)
        connection.close()

    async with asyncio.timeout(seconds + PATIENCE_S), asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return found


@dataclass
class Streams:
    """Gaps between the frames of all streams, and the time to the first one, in seconds."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    failed: int = 0

    def add(self, answer: Answer, sent: float, tokens: int) -> None:
        """Count one stream; one with too few frames has failed."""
        if not answer.ended or answer.status != 200 or len(answer.frames) < tokens:
            self.failed += 1
            return
        frames = answer.frames[:tokens]
        self.first.append(frames[0] - sent)
        self.gaps += [b - a for a, b in itertools.pairwise(frames)]


async def streams(target: Target, count: int, tokens: int, pace_ms: int) -> Streams:
    """Read so many streams at once.

    They begin one after another, each at another part of the time between two frames: neither their
    requests nor their frames come in bursts that the test made.
    """
    request = target.request(stream=True, max_tokens=tokens, seed=pace_ms)
    found = Streams()

    async def one(number: int) -> None:
        connection = await target.connect()
        await asyncio.sleep(number * pace_ms / 1000 * (1 + 1 / count))
        sent = perf_counter()
        found.add(await connection.send(request), sent, tokens)
        connection.close()

    longest_s = (tokens + count) * pace_ms / 1000 + PATIENCE_S
    async with asyncio.timeout(longest_s), asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(one(number))
    return found


class HeldStreams:
    """Streams that are open until the block ends."""

    def __init__(self, target: Target, count: int) -> None:
        self._target, self._count = target, count
        self._connections: list[Connection] = []

    async def __aenter__(self) -> Self:
        """Open them, and wait until frames came on each.

        Raises:
            TimeoutError: some have none in time. All are closed.
        """
        request = self._target.request(stream=True, max_tokens=3600, seed=1000)
        for _ in range(self._count):
            connection = await self._target.connect()
            self._connections.append(connection)
            connection.send(request)
            # Spread as clients are; the frames of all then come spread over a second, too.
            await asyncio.sleep(1 / self._count)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(item.flowing.wait() for item in self._connections))
        except TimeoutError:
            self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close them."""
        self._close()

    def _close(self) -> None:
        for connection in self._connections:
            connection.close()

    @property
    def open(self) -> int:
        """Return how many are still open."""
        return sum(connection.open for connection in self._connections)

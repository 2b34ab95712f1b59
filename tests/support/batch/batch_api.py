"""The API of files and batches on a port, over a store in memory, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import openai
import uvicorn

from fleetkeeper_gateway.batch.api import ApiParts, create_app
from fleetkeeper_gateway.batch.model import BatchRecord
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.http.connections.connection import connection_class
from tests.support.batch.batch_memory import (
    MemoryAudit,
    MemoryBatches,
    MemoryFiles,
    MemoryKeys,
    MemoryObjects,
)
from tests.support.guards import GUARD_S

CHAT: Final = "/v1/chat/completions"


def line(number: int, **changes: Any) -> dict[str, Any]:
    """Return a valid line of an input file, or one with changes."""
    body = {"model": "m", "messages": [{"role": "user", "content": f"question {number}"}]}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body} | changes


def jsonl(lines: Sequence[object]) -> bytes:
    """Return the bytes of an input file."""
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def until(done: Callable[[], object]) -> None:
    """Wait until a condition holds that no event tells of."""
    async with asyncio.timeout(GUARD_S):
        while not done():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)


class _Server(uvicorn.Server):
    """A server that leaves signals to the test."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class ApiWorld:
    """What the API is made of, and how a test reaches it."""

    settings: BatchSettings = field(default_factory=BatchSettings)
    now: float = field(default_factory=lambda: float(int(time.time())))
    """The API's clock."""
    created: list[BatchRecord] = field(default_factory=list)
    """Batches whose validation was asked for."""
    port: int = 0

    def __post_init__(self) -> None:
        self.keys = MemoryKeys("one", "two")
        self.audit = MemoryAudit()
        self.objects = MemoryObjects()
        self.files = MemoryFiles(self.objects, lambda: self.now)
        self.batches = MemoryBatches(self.objects)
        self.parts = ApiParts(
            keys=self.keys,
            audit=self.audit,
            objects=self.objects,
            files=self.files,
            batches=self.batches,
            settings=self.settings,
            on_created=self.created.append,
            clock=lambda: self.now,
        )

    def set(self, **changes: Any) -> None:
        """Change parts before the API runs."""
        self.parts = replace(self.parts, **changes)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ApiWorld]:
        """Serve on a free port."""
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            self.port = listener.getsockname()[1]
            config = uvicorn.Config(
                create_app(self.parts),
                http=connection_class(self.parts.client_timeout_s),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
            )
            server = _Server(config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                yield self
            finally:
                server.should_exit = server.force_exit = True
                await serving

    @property
    def url(self) -> str:
        """Return the base URL for a client."""
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, key: str = "one") -> openai.AsyncOpenAI:
        """Return a client that tries once. The test closes it."""
        return openai.AsyncOpenAI(
            base_url=self.url, api_key=f"secret-of-{key}", max_retries=0, timeout=GUARD_S
        )

    def sync_client(self, key: str = "one") -> openai.OpenAI:
        """Return the client without asyncio, for another thread. The test closes it."""
        return openai.OpenAI(
            base_url=self.url, api_key=f"secret-of-{key}", max_retries=0, timeout=GUARD_S
        )

    async def audited(self, outcome: str) -> dict[str, Any]:
        """Wait for a request with an outcome in the audit log, and return it."""
        async with asyncio.timeout(GUARD_S):
            while True:
                for request in self.audit.requests:
                    if request["outcome"] == outcome:
                        return request
                self.audit.added.clear()
                await self.audit.added.wait()

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[RawClient]:
        """Yield a connection for bytes that no client library would send."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield RawClient(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@dataclass(frozen=True)
class RawClient:
    """A connection on which a test writes HTTP itself."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """Write bytes."""
        self.writer.write(data)
        async with asyncio.timeout(GUARD_S):
            await self.writer.drain()

    async def ask(
        self, method: str, path: str, body: bytes = b"", *, key: str = "one", **headers: str
    ) -> None:
        """Send a request as it is written here."""
        lines = [
            f"{method} {path} HTTP/1.1",
            "Host: test",
            f"Authorization: Bearer secret-of-{key}",
            *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
            *([f"Content-Length: {len(body)}"] if body else []),
        ]
        await self.send("\r\n".join([*lines, "", ""]).encode() + body)

    async def head(self) -> str:
        """Return the head of an answer, in lower case."""
        async with asyncio.timeout(GUARD_S):
            return (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()

    async def content(self, head: str) -> bytes:
        """Return what follows the head of an answer."""
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        async with asyncio.timeout(GUARD_S):
            return await self.reader.readexactly(length)

    async def answer(self) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of an answer in JSON."""
        head = await self.head()
        return int(head.split()[1]), json.loads(await self.content(head))


BOUNDARY: Final = "the-boundary"


def form(*fields: tuple[str, str | None, bytes], boundary: str = BOUNDARY) -> bytes:
    """Return a multipart form of fields: name, file name and content."""
    parts = []
    for name, filename, content in fields:
        disposition = f'form-data; name="{name}"'
        if filename is not None:
            disposition += f'; filename="{filename}"'
        head = f"--{boundary}\r\nContent-Disposition: {disposition}\r\n\r\n"
        parts.append(head.encode() + content + b"\r\n")
    return b"".join(parts) + f"--{boundary}--\r\n".encode()


def upload_head(length: int, *, key: str = "one", boundary: str = BOUNDARY) -> bytes:
    """Return the head of an upload that announces a length."""
    return (
        f"POST /v1/files HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer secret-of-{key}\r\n"
        f"Content-Type: multipart/form-data; boundary={boundary}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()

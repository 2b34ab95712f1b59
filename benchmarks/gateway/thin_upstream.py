"""An engine's stand-in that costs as little as Python allows: uvloop and httptools, no framework.

    python benchmarks/gateway/thin_upstream.py PORT

Each request is a chat completion. `max_tokens` is the number of frames of a stream, and `seed` the
milliseconds between them. Every frame has its own point in time, so that a late one delays no other.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Final, cast

import httptools
import uvloop

_TOKENS: Final = re.compile(rb'"max_tokens":\s*(\d+)')
_PACE: Final = re.compile(rb'"seed":\s*(\d+)')
_STREAM: Final = re.compile(rb'"stream":\s*true')
MODEL: Final = "tiny"
ANSWER: Final = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "one two three"},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11},
    }
).encode()
WHOLE: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    % (len(ANSWER), ANSWER)
)
STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def chunk(text: bytes) -> bytes:
    """Return a chunk of HTTP's chunked encoding."""
    return b"%x\r\n%s\r\n" % (len(text), text)


def frame(finish: str | None) -> bytes:
    """Return a server-sent event with one token, or with the end of the answer."""
    choice = {"index": 0, "delta": {"content": " a"} if finish is None else {}}
    event = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [{**choice, "finish_reason": finish}],
    }
    return chunk(b"data: " + json.dumps(event).encode() + b"\n\n")


TOKEN: Final = frame(None)
END: Final = frame("stop") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def asked(body: bytes) -> tuple[int, float] | None:
    """Return the frames of a stream and the seconds between them; None for a whole answer."""
    if not _STREAM.search(body):
        return None
    tokens, pace = _TOKENS.search(body), _PACE.search(body)
    return (int(tokens[1]) if tokens else 16, int(pace[1]) / 1000 if pace else 0.0)


class Upstream(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # A transport of uvloop is a subclass of none of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's name
        """Forget the transport, which ends its stream."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Collect the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answer."""
        body, self._body = self._body, b""
        assert self._transport is not None
        stream = asked(body)
        if stream is None:
            self._transport.write(WHOLE)
            return
        self._transport.write(STREAM_HEAD)
        self._next(*stream, at=self._loop.time())

    def _next(self, left: int, pace_s: float, at: float) -> None:
        if self._transport is None:
            return
        if left == 0:
            self._transport.write(END)
            return
        self._transport.write(TOKEN)
        self._loop.call_at(at + pace_s, self._next, left - 1, pace_s, at + pace_s)


async def serve(port: int) -> None:
    """Serve until the process ends."""
    server = await asyncio.get_running_loop().create_server(
        Upstream, "127.0.0.1", port, backlog=2048
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))

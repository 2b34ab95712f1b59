"""Random requests for the gateway, as bytes: methods, targets, headers, framing, bodies, and hang-ups."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import struct
from dataclasses import dataclass
from typing import Final

from tests.support.engine.hostile_requests import PATHS, hostile_request
from tests.support.gateway import gateway_upstream
from tests.support.guards import GUARD_S

METHODS: Final = (
    b"POST", b"POST", b"POST", b"POST", b"POST", b"POST", b"GET", b"PUT", b"PATCH", b"DELETE",
    b"HEAD", b"OPTIONS", b"TRACE", b"CONNECT", b"post", b"BREW", b"P\x00ST", b"X" * 300,
)  # fmt: skip
TARGETS: Final = (
    b"/", b"*", b"//", b"/v1", b"/v1/models", b"/v1/models/tiny", b"/v1/models/%00", b"/metrics",
    b"/healthz", b"/v1/chat/completions/", b"/v1//chat/completions", b"/v1/./completions",
    b"/v1/%63ompletions", b"/v1/completions?x=1&model=other", b"/v1/completions#fragment",
    b"/v1/responses/resp_1", b"/v1/responses/resp_1/cancel", b"/../../etc/passwd", b"/v1/\xff\xfe",
    b"http://elsewhere.invalid/v1/completions", b"/" + b"a" * 9000, b"/v1/completions\x00",
)  # fmt: skip
VERSIONS: Final = (b"HTTP/1.1",) * 20 + (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.1 x", b"")
HEADERS: Final = (
    b"X-Inference-Tier: realtime",
    b"X-Inference-Tier: batch",
    b"X-Inference-Tier: standard\r\nX-Inference-Tier: realtime",
    b"x-inference-tier: \xff\xfe",
    b"X-Inference-Tier: " + b"r" * 5000,
    b"X-Fleetkeeper-Service: team-a/tiny",
    b"X-Fleetkeeper-Service: team-b/secret",
    b"X-Fleetkeeper-Service: ../..",
    b"X-Fleetkeeper-Anything: 1",
    b"X-Request-Id: same",
    b"X-Request-Id: " + b"i" * 4000,
    b"X-Request-Id: a b\tc",
    b"x-vllm-anything: 1",
    b"Cookie: session=1",
    b"Connection: close, X-Request-Id, Host",
    b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAA",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAAA",
    b"Expect: 100-continue",
    b"Expect: 200-anything",
    b"TE: trailers, gzip",
    b"Trailer: X-Inference-Tier",
    b"Content-Encoding: gzip",
    b"Content-Type: multipart/form-data; boundary=",
    b"Content-Type: text/plain; charset=nowhere",
    b"Range: bytes=0-1",
    b"Forwarded: for=127.0.0.1",
    b"X-Forwarded-For: 127.0.0.1, ::1, unknown",
    b"Proxy-Authorization: Basic eDp5",
    b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    b"traceparent: 99-nothing",
    b"tracestate: " + b"a=1," * 60,
    b"baggage: fleetkeeper-grant=eyJhbGciOiJub25lIn0.e30.",
    b"baggage: a=1, fleetkeeper-grant=" + b"x" * 3000 + b", ;;,=",
    b"Bad Name: 1",
    b": no name",
    b"no colon",
    b"X-Folded: 1\r\n  2",
    b"X-Null: \x00",
    b"X-Latin: \xe9",
    b"X-Large: " + b"v" * 70_000,
    b"Host: elsewhere.invalid",
    b"Host:",
)

PLAIN_SHARE: Final = 0.4
"""Of the requests, with odd bodies and keys alone."""


@dataclass(frozen=True)
class RawRequest:
    """Bytes to send, and what their sender does after them."""

    parts: list[bytes]
    leaves: bool
    """Resets the connection without reading an answer."""
    whole: bool
    """Is a request with one meaning, so an answer is to come. Otherwise this side is closed as well."""


def raw_request(dice: random.Random, keys: list[str], models: list[str]) -> RawRequest:
    """Return the next one."""
    body = _body(dice, dice.choice(models))
    if dice.random() < PLAIN_SHARE:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n"
        fields = [*_authorization(dice, keys), b"Content-Length: %d" % len(body)]
        whole = head + b"\r\n".join(fields) + b"\r\n\r\n" + body
        leaves = dice.random() < 0.15
        return RawRequest(_cut(dice, whole), leaves, whole=not leaves)
    return RawRequest(_cut(dice, _odd(dice, keys, body)), dice.random() < 0.15, whole=False)


def _odd(dice: random.Random, keys: list[str], body: bytes) -> bytes:
    target = dice.choice(TARGETS) if dice.random() < 0.2 else dice.choice(PATHS).encode()
    method = dice.choice(METHODS) if dice.random() < 0.3 else b"POST"
    version = dice.choice(VERSIONS) if dice.random() < 0.2 else b"HTTP/1.1"
    fields = [b"Host: gateway", *_authorization(dice, keys), b"Connection: close"]
    if dice.random() < 0.4:
        fields += [dice.choice(HEADERS) for _ in range(dice.randint(1, 3))]
    framing, payload = _framed(dice, body)
    fields += framing
    dice.shuffle(fields)
    whole = b" ".join([method, target, version]) + b"\r\n" + b"\r\n".join(fields) + b"\r\n\r\n"
    whole += payload
    if dice.random() < 0.05:
        whole += dice.randbytes(dice.randint(1, 200))
    if dice.random() < 0.1:
        whole = whole[: dice.randrange(1, len(whole))]
    return whole


def _authorization(dice: random.Random, keys: list[str]) -> list[bytes]:
    kind = dice.random()
    value = b"Authorization: Bearer " + dice.choice(keys).encode()
    if kind < 0.75:
        return [value]
    wrong = (
        b"Authorization: Basic eDp5",
        b"Authorization: Bearer",
        b"Authorization: Bearer fk_" + b"A" * 43,
        b"Authorization: Bearer " + b"\xff" * 20,
        b"Authorization: Bearer " + b"k" * 20_000,
    )
    if kind < 0.85:
        return [dice.choice(wrong)]
    return [value, dice.choice((value, *wrong))] if kind < 0.95 else []


def _body(dice: random.Random, model: str) -> bytes:
    if dice.random() < 0.5:
        return hostile_request(dice, model).body
    way = dice.choice(gateway_upstream.ENDS)
    fields = {"model": model, "prompt": "one two", "answer_as": way, "max_tokens": 3}
    text = json.dumps({**fields, "stream": way == "stream"})
    if dice.random() < 0.1:
        text = text[:-1] + ', "model": "another"}'
    return text.encode()


def _framed(dice: random.Random, body: bytes) -> tuple[list[bytes], bytes]:
    """Return the headers of the body and its bytes on the wire, right or wrong."""
    length = b"Content-Length: %d" % len(body)
    kind = dice.random()
    if kind < 0.6:
        return [length], body
    if kind < 0.8:
        return [b"Transfer-Encoding: chunked"], _chunked(dice, body)
    wrong: tuple[tuple[list[bytes], bytes], ...] = (
        ([length, b"Transfer-Encoding: chunked"], _chunked(dice, body)),
        ([length, length], body),
        ([length, b"Content-Length: 0"], body),
        ([b"Content-Length: -1"], body),
        ([b"Content-Length: +5"], body),
        ([b"Content-Length: 99999999999999999999"], body),
        ([b"Content-Length: 1099511627776"], body),
        ([b"Content-Length: %d" % (len(body) // 2)], body),
        ([b"Transfer-Encoding: xchunked"], _chunked(dice, body)),
        ([b"Transfer-Encoding: chunked, identity"], _chunked(dice, body)),
        ([b"Transfer-Encoding: gzip, chunked"], _chunked(dice, body)),
        ([b"Transfer-Encoding: chunked"], b"zz\r\n" + body),
        ([b"Transfer-Encoding: chunked"], b"ffffffffffffffff\r\n" + body),
        ([b"Transfer-Encoding: chunked"], b"5;x=" + b"y" * 20_000 + b"\r\nabcde\r\n0\r\n\r\n"),
        ([b"Transfer-Encoding: chunked"], _chunked(dice, body)[:-5]),
        ([], body),
    )
    return dice.choice(wrong)


def _chunked(dice: random.Random, body: bytes) -> bytes:
    size = dice.choice((1, 7, 100, 5000, 100_000)) if len(body) < 5000 else 60_000
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    trailer = b"X-Inference-Tier: realtime\r\n" if dice.random() < 0.2 else b""
    return b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in chunks) + b"0\r\n" + trailer + b"\r\n"


def _cut(dice: random.Random, whole: bytes) -> list[bytes]:
    cuts = sorted(dice.randrange(len(whole) + 1) for _ in range(dice.randint(0, 3)))
    edges = [0, *cuts, len(whole)]
    return [whole[a:b] for a, b in itertools.pairwise(edges) if a < b]


async def send_raw(port: int, request: RawRequest) -> bytes:
    """Send it and return the whole answer, empty if there was none.

    The sending side of a request that may not be whole is closed, so that it ends too.
    """
    async with asyncio.timeout(GUARD_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if request.leaves:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        try:
            for part in request.parts:
                writer.write(part)
                await writer.drain()
            if request.leaves:
                return b""
            if not request.whole:
                writer.write_eof()
            return await reader.read()
        except OSError:  # the gateway hung up first; a socket tells it in several ways
            return b""
        finally:
            writer.close()

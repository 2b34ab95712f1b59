"""The longest turn of an event loop that a body can take, in processor time of its thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from fleetkeeper_contract.bodies.outline import PART_BYTES
from fleetkeeper_gateway.http.connections.bodies import Body, BodyBudget
from fleetkeeper_gateway.http.errors import Refusal
from fleetkeeper_gateway.http.request_fields import parse_fields
from tests.support.engine.middleware_calls import Call, StandInVllm, running_middleware
from tests.support.processor_units import longest_turn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_collections")]

CHAT = "/v1/chat/completions"
MAX_TURN = 80
"""Units: 40 ms where this was written. Turns take up to 21 ms; without parts they took 70 ms and more."""
TOGETHER = 30
LARGEST = 16 * 1024**2
"""Bytes that the gateway takes."""


def filled(start: bytes, one: bytes, end: bytes, size: int = LARGEST) -> bytes:
    return start + one * ((size - len(start) - len(end)) // len(one)) + end


def listed(start: bytes, one: bytes, count: int, end: bytes) -> bytes:
    return start + b",".join([one] * count) + end


LARGE = b'{"model":"m","user":"' + b"u" * PART_BYTES + b'",'
HOSTILE: dict[str, Callable[[], bytes]] = {
    "small objects": lambda: filled(b'{"model":"m","x":[', b"{},", b"1]}", PART_BYTES - 1),
    "small objects that are allowed": lambda: listed(b'{"model":"m","x":[', b"{}", 19_990, b"]}"),
    "objects that are allowed": lambda: listed(LARGE + b'"x":[', b"{}", 19_990, b"]}"),
    "objects of the review": lambda: filled(b'{"model":"m","x":[', b"{},", b"{}]}", 510_000),
    "objects": lambda: filled(b'{"model":"m","x":[', b"{},", b"{}]}"),
    "texts": lambda: listed(b'{"model":"m","x":[', b'"' + b"x" * 800 + b'"', 19_990, b"]}"),
    "short texts": lambda: listed(b'{"model":"m","x":[', b'"' + b"x" * 60 + b'"', 19_990, b"]}"),
    "long names": lambda: (
        b'{"model":"m","x":{'
        + b",".join(b'"%0100d":0' % number for number in range(15_000))
        + b"}}"
    ),
    "short lists of tokens": lambda: listed(
        b'{"model":"m","input":[', b"[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", 9000, b"]}"
    ),
    "tokens": lambda: filled(b'{"model":"m","input":[', b"1,", b"1]}"),
    "images": lambda: listed(
        b'{"model":"m","messages":[{"role":"user","content":[',
        b'{"image_url":"data:' + b"A" * 1600 + b'"}',
        9000,
        b"]}]}",
    ),
    "text": lambda: filled(b'{"model":"m","input":"', b"x", b'"}'),
    "escapes": lambda: filled(b'{"model":"m","input":"', b"\\n\\u0041", b'"}'),
    "backslashes": lambda: filled(b'{"model":"m","input":"', b"\\\\", b'"}'),
    "spaces": lambda: filled(b'{"model":"m",', b"\n  ", b'"input":"x"}'),
    "levels": lambda: b'{"model":"m","x":' + b"[" * 19_000 + b"]" * 19_000 + b"}",
}


async def read_by_the_gateway(data: bytes, budget: BodyBudget | None = None) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(data), PART_BYTES):
            yield data[start : start + PART_BYTES]

    arriving = parts()

    async def receive() -> dict[str, object]:
        part = await anext(arriving, b"")
        return {"type": "http.request", "body": part, "more_body": bool(part)}

    body = Body(budget or BodyBudget(4 * LARGEST), LARGEST, 60.0)
    try:
        await body.read(receive, None, "key")
        parse_fields(body.data, body.json, CHAT)
    except Refusal as refusal:
        refused = refusal.code
    else:
        refused = ""
    finally:
        body.release()
    assert refused in ("", "too_many_values", "too_deep")


async def read_by_the_engine(data: bytes) -> None:
    with running_middleware(StandInVllm()) as app:
        await Call(app, data, path=CHAT).answer()


@pytest.mark.promise("bounded-requests")
@pytest.mark.parametrize("reader", [read_by_the_gateway, read_by_the_engine])
@pytest.mark.parametrize("name", HOSTILE)
async def test_no_body_holds_an_event_loop(
    name: str, reader: Callable[[bytes], Awaitable[None]]
) -> None:
    """A loop that is held answers no probe, and no other client."""
    data = HOSTILE[name]()
    assert await longest_turn(lambda: reader(data), MAX_TURN) < MAX_TURN


@pytest.mark.parametrize("name", ["small objects that are allowed", "objects that are allowed"])
async def test_many_bodies_together_hold_no_event_loop(name: str) -> None:
    """Between two steps of another request there is one turn, however many bodies are read."""
    data, budget = HOSTILE[name](), BodyBudget(4 * LARGEST)

    async def read_all() -> None:
        await asyncio.gather(*(read_by_the_gateway(data, budget) for _ in range(TOGETHER)))

    assert await longest_turn(read_all, MAX_TURN) < MAX_TURN

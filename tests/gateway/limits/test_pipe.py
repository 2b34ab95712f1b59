"""The connection to Redis on an event loop that is busy: whose fault a late answer is."""

# ruff: noqa: ARG002 - the arguments are those of the library
from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from redis.asyncio.connection import AbstractConnection

from fleetkeeper_gateway.limits.pipe import Pipe, PipeEnded

BUDGET_S = 0.04
TURN_S = 0.03
"""What a turn of the loop takes: a few of them are longer than the budget."""


class Server:
    """A connection whose answer can be read after some turns of the event loop."""

    def __init__(self, turns: int | None) -> None:
        self._turns = turns
        self._asked = asyncio.Event()

    def pack_command(self, *words: object) -> list[bytes]:
        return [b" ".join(str(word).encode() for word in words)]

    async def send_packed_command(self, packed: list[bytes], check_health: bool) -> None:
        self._asked.set()

    async def read_response(self, disable_decoding: bool) -> bytes:
        await self._asked.wait()
        self._asked.clear()
        if self._turns is None:
            await asyncio.Event().wait()
        for _ in range(self._turns or 0):
            await asyncio.sleep(0)
        return b"OK"

    async def disconnect(self, nowait: bool) -> None:
        return


def block_event_loop(seconds: float) -> None:
    """Do what a long computation in the gateway would."""
    time.sleep(seconds)


async def asked(turns: int | None) -> bytes:
    """Ask a server while each turn of the event loop takes long, and return its answer."""
    server: Any = Server(turns)
    connection: AbstractConnection = server
    pipe = Pipe(connection, lambda _pipe, _reason: None)
    answer = pipe.command(b"PING", budget_s=BUDGET_S)
    try:
        while not answer.done():
            block_event_loop(TURN_S)
            await asyncio.sleep(0)
        return answer.result()
    finally:
        await pipe.close()


async def test_a_loop_that_is_busy_turn_after_turn_is_not_a_slow_server() -> None:
    assert await asked(5) == b"OK"


async def test_a_server_that_never_answers_is_found_on_a_busy_loop_too() -> None:
    with pytest.raises(PipeEnded, match="no answer in time"):
        await asked(None)

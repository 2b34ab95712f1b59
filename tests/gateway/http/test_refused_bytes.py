"""Requests that are refused: they take nothing from a limit, and are bounded all the same."""

from __future__ import annotations

import asyncio
import json

import pytest

from fleetkeeper_gateway.http.connections import refused_bytes
from fleetkeeper_gateway.http.connections.refused_bytes import (
    BYTES_PER_S,
    MAX_BYTES,
    MIN_BYTES,
    RefusedBytes,
)
from fleetkeeper_gateway.http.errors import Refusal
from fleetkeeper_gateway.interfaces import Key, LimitRefused
from tests.gateway.http.world import AUTHORIZATION, World, chat, head
from tests.support.guards import GUARD_S

UNKNOWN = json.dumps({"model": "no-such-model", "prompt": "x" * 20_000}).encode()
HALF = head(f"Content-Length: {len(UNKNOWN)}") + UNKNOWN[:100]
"""A request whose body never comes."""


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_source_pays_for_what_was_read_and_at_least_for_a_head() -> None:
    clock = Clock()
    refused = RefusedBytes(clock)
    for _ in range(MAX_BYTES // MIN_BYTES):
        refused.check("a")
        refused.add("a", 10)
    refused.check("a")
    refused.add("a", BYTES_PER_S)
    with pytest.raises(Refusal) as found:
        refused.check("a")
    assert found.value.status == 429
    assert (b"retry-after", b"1") in found.value.headers
    refused.check("b")
    clock.now += 1.0
    refused.check("a")
    clock.now += MAX_BYTES / BYTES_PER_S
    refused.check("a")
    assert len(refused) == 0


def test_sources_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_bytes, "MAX_SOURCES", 3)
    refused = RefusedBytes(Clock())
    for number in range(10):
        refused.add("often", 2 * MAX_BYTES)
        refused.add(f"once-{number}", 1)
    assert len(refused) == 3
    assert refused.wait_s("often") > 0


async def answer_of(world: World, data: bytes) -> tuple[int, bytes]:
    """Return the status and all that follows, until the gateway ends the connection."""
    reader, writer = await world.raw(data)
    async with asyncio.timeout(GUARD_S):
        line = await reader.readline()
        rest = await reader.read()
    writer.close()
    return int(line.split()[1]), rest


@pytest.mark.promise("refused-requests")
async def test_a_key_whose_requests_are_refused_is_refused_before_its_body(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused_bytes, "MAX_BYTES", 3 * len(UNKNOWN) - 1)
    monkeypatch.setattr(refused_bytes, "BYTES_PER_S", 1e-3)
    world.keys.known["Bearer other"] = Key("key-2", "other", None)
    for _ in range(3):
        assert await world.refused(UNKNOWN) == (404, "model_not_found")
    status, rest = await answer_of(world, HALF)
    assert status == 429
    assert b"x-fleetkeeper-refused: rate_limit_exceeded" in rest
    assert b'"limit": "refused"' in rest
    async with world.post(Authorization="Bearer other") as response:
        assert response.status == 200, "it is not the other key's doing"
    async with world.post(Authorization="Bearer batch.key-1.signed") as response:
        assert response.status == 200, "nor its batches'"


async def test_a_key_at_its_limit_of_requests_is_refused_before_its_body(world: World) -> None:
    world.limiter.refusal = LimitRefused("requests", "1 request a minute is used.", 17, {})
    world.limiter.refuses_all = True
    # The body never comes: only a refusal without it can end the wait.
    reader, writer = await world.raw(HALF)
    async with asyncio.timeout(GUARD_S):
        assert b" 429 " in await reader.readline()
    writer.close()
    assert len(world.gateway.refused) == 0, "a client far above its limit still has its limit"


@pytest.mark.promise("refused-requests")
async def test_an_address_without_a_key_is_cut_off_when_it_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused_bytes, "MAX_BYTES", 0)
    monkeypatch.setattr(refused_bytes, "BYTES_PER_S", 1e-3)
    assert await world.refused(Authorization="Bearer wrong") == (401, "invalid_api_key")
    for path in ("/v1/chat/completions", "/v1/models"):
        status, rest = await answer_of(
            world, head("Content-Length: 100", path=path, key="Bearer wrong")
        )
        assert status == 401
        assert b"connection: close" in rest
    async with world.post(chat(), Authorization=AUTHORIZATION) as response:
        assert response.status == 200, "a client with a key at the same address"

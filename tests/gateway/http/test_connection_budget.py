"""Connections of clients that have shown no key: their number, and their heads without end."""

from __future__ import annotations

import asyncio
from functools import partial

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from fleetkeeper_gateway import serve
from fleetkeeper_gateway.http.connections.budget import ConnectionBudget
from tests.gateway.http.world import AUTHORIZATION, World, chat, head
from tests.support.guards import GUARD_S
from tests.support.lanes import examples

BODY = chat()
REQUEST = head(f"Content-Length: {len(BODY)}") + BODY


class Fake:
    """A connection that says how it ended."""

    def __init__(self) -> None:
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


@examples(100, guarded=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("open", "accept", "head", "end")),
            st.integers(0, 9),
            st.integers(0, 500),
        ),
        max_size=60,
    )
)
def test_a_budget_holds_whatever_connections_do(steps: list[tuple[str, int, int]]) -> None:
    reasons: list[str] = []
    budget = ConnectionBudget(max_unknown=4, max_head_bytes=1000, closed=reasons.append)
    live: dict[int, Fake] = {}
    for step, number, size in steps:
        if step == "open" and number not in live:
            live[number] = Fake()
            budget.opened(live[number])
        elif number in live and step == "accept":
            budget.accepted(live[number])
        elif number in live and step == "head":
            budget.head(live[number], size)
        elif number in live and step == "end":
            budget.forget(live.pop(number))
        live = {number: one for number, one in live.items() if not one.is_aborted}
        assert budget.unknown <= 4
        assert 0 <= budget.head_bytes <= 1000
    for one in live.values():
        budget.forget(one)
    assert (budget.unknown, budget.head_bytes) == (0, 0)


def closed(reason: str) -> float:
    """Return the number of connections that were closed for a reason."""
    name = "fleetkeeper_gateway_connections_closed_total"
    return REGISTRY.get_sample_value(name, {"reason": reason}) or 0.0


@pytest.mark.promise("keyless-bounds")
async def test_connections_without_a_key_do_not_take_those_with_one(
    idle_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "ConnectionBudget", partial(ConnectionBudget, max_unknown=3))
    before = closed("unknown")
    async with idle_world.running() as world, asyncio.timeout(GUARD_S):
        reader, writer = await world.raw(REQUEST)
        await reader.readuntil(b'{"ok": true}')
        one = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=one) as lister:
            headers = {"Authorization": AUTHORIZATION}
            async with lister.get(world.url("/v1/models"), headers=headers) as response:
                assert response.status == 200
            idle = [await world.raw(b"GET /" * (number % 2)) for number in range(10)]
            for oldest, _ in idle[:7]:
                assert await oldest.read() == b""
            writer.write(REQUEST)
            await reader.readuntil(b'{"ok": true}')
            async with lister.get(world.url("/v1/models"), headers=headers) as response:
                assert response.status == 200
        _, newest = idle[-1]
        newest.write(b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 401 " in await idle[-1][0].readline()
        assert closed("unknown") - before == 7
        for _, one_of_them in [*idle, (reader, writer)]:
            one_of_them.close()


@pytest.mark.promise("keyless-bounds")
async def test_heads_without_end_are_bounded_together(
    idle_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        serve, "ConnectionBudget", partial(ConnectionBudget, max_head_bytes=200_000)
    )
    before = closed("heads")
    async with idle_world.running() as world, asyncio.timeout(GUARD_S):
        endless = [await world.raw(head()[:-2] + b"X-Long: " + b"a" * 50_000) for _ in range(9)]
        for oldest, _ in endless[:5]:
            assert await oldest.read() == b""
        assert closed("heads") - before >= 5
        reader, writer = await world.raw(REQUEST[:20])
        writer.write(REQUEST[20:])
        await reader.readuntil(b'{"ok": true}')
        for _, one in [*endless, (reader, writer)]:
            one.close()

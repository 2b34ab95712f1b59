"""One tenant uses all that its quotas allow, and more: the requests of another take no longer than twice as long.

Tenant B asks an engine that only waits, alone and beside tenant A, block by block in turn. What other work on
the host takes does not count: see `block`.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import aiohttp
import psutil
import pytest

from fleetkeeper_contract import client_keys
from fleetkeeper_contract.bodies.refused import MAX_VALUES
from tests.support.gateway.gateway_api import service
from tests.support.gateway.gateway_process import GatewayProcess
from tests.support.gateway.gateway_surroundings import MODEL, NAMESPACE, Surroundings
from tests.support.gateway.scripted_service import (
    Script,
    answer,
    answers,
    floods_chunks,
    floods_interim_answers,
    hangs,
    replies,
    serving,
    waits,
)
from tests.support.guards import GUARD_S
from tests.support.lanes import keep_first

REQUESTS: Final = 100
AT_ONCE: Final = 10
WAIT_S: Final = 0.05
ROUNDS: Final = 3
MOST_RATIO: Final = 2.0
SLACK_S: Final = 0.75
"""An attack that is not bounded takes more."""
OTHER_NAMESPACE: Final = "team-b"
OTHER_MODEL: Final = "waiting"
PROMPT: Final = "word " * 3_000
"""Of B: 15 KB, as a chat has after some turns."""
CONCURRENCY: Final = 100
QUOTAS: Final = {
    client_keys.REQUESTS_PER_MINUTE: "600",
    client_keys.TOKENS_PER_MINUTE: "200000",
    client_keys.CONCURRENCY: str(CONCURRENCY),
}
"""Of each key of A: those of the README's example."""
CLIENTS: Final = 8
PAUSE_S: Final = 0.02
"""Between two requests of one of A's clients. Without it the test would measure how fast this host sends."""
BUDGET_BYTES: Final = 8 * 1024**2
"""Of bodies, where they are attacked."""
HEADS: Final = 288
"""60 kB each: some more than all unfinished heads may have."""


def post(key: str, body: bytes) -> bytes:
    """Return a request of A on a connection of its own."""
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: gateway",
        f"Authorization: Bearer {key}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join([*lines, "", ""]).encode() + body


def body_of(model: str = MODEL, *, text_bytes: int = 10, values: int = 1) -> bytes:
    """Return a body that the gateway reads to its end."""
    text, items = b"x" * text_bytes, b",".join([b"{}"] * values)
    return b'{"model":"%b","prompt":"%b","x":[%b]}' % (model.encode(), text, items)


MANY_VALUES: Final = MAX_VALUES - 10
SMALL: Final = (body_of(),) * CLIENTS
LARGE: Final = (body_of("no-such-model", text_bytes=450_000, values=MANY_VALUES),) * CLIENTS
FULL: Final = tuple(
    body_of(text_bytes=(BUDGET_BYTES >> (2 + number // 2)) - 200) for number in range(20)
)
"""Two of each key, of half of what the keys before it left free."""


@dataclass(frozen=True)
class Attack:
    """What tenant A does."""

    name: str
    bodies: Sequence[bytes] = SMALL
    """One for each client, which sends it again whenever its connection ends. None: heads without end."""
    script: Script = answers
    """How A's engine answers."""
    keys: int = 1
    quotas: dict[str, str] = field(default_factory=lambda: QUOTAS)
    settings: dict[str, str] = field(default_factory=dict)

    def requests(self, keys: Sequence[str]) -> list[bytes]:
        """Return what each client sends."""
        count = len(self.bodies)
        posts = [
            post(keys[number * len(keys) // count], body) for number, body in enumerate(self.bodies)
        ]
        return posts or [b"POST / HTTP/1.1\r\nHost: gateway\r\nX-Long: " + b"a" * 60_000] * HEADS


ATTACKS: Final = (
    Attack("refused-large-bodies", LARGE),
    Attack("flood-of-chunks", script=floods_chunks),
    Attack(
        "ten-keys-fill-the-budget",
        FULL,
        hangs,
        keys=10,
        quotas={**QUOTAS, client_keys.TOKENS_PER_MINUTE: "20000000"},
        settings={"BODY_BUDGET_BYTES": str(BUDGET_BYTES), "REQUEST_BYTES": str(BUDGET_BYTES // 2)},
    ),
    Attack("many-values", (body_of(values=MANY_VALUES),) * CLIENTS),
    Attack("hanging-service", (body_of(),) * (CONCURRENCY + CLIENTS), hangs),
    Attack("refusing-service", script=replies(answer("429 Too Many", "Retry-After: 300"))),
    Attack("flood-of-interim-answers", script=floods_interim_answers),
    Attack("heads-without-end", ()),
)


class Tenant:
    """Tenant A: its clients, and how often one of them was answered or its engine was asked."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.outcomes = 0
        self._moved = asyncio.Event()

    def moved(self) -> None:
        """Count an outcome."""
        self.outcomes += 1
        self._moved.set()

    async def until(self, outcomes: int) -> None:
        """Wait for so many outcomes."""
        async with asyncio.timeout(GUARD_S):
            while self.outcomes < outcomes:
                self._moved.clear()
                await self._moved.wait()

    async def client(self, request: bytes) -> None:
        """Send a request, and again when the connection has ended, until cancelled."""
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(request)
                await writer.drain()
                await reader.read()
            except ConnectionError:
                pass  # refused before it was read to its end
            finally:
                writer.close()
            self.moved()
            await asyncio.sleep(PAUSE_S)

    @contextlib.asynccontextmanager
    async def attacking(self, attack: Attack, keys: Sequence[str]) -> AsyncIterator[None]:
        """Keep the clients busy. Each one begins after the one before it came to something."""
        before, clients = self.outcomes, []
        for request in attack.requests(keys):
            clients.append(asyncio.create_task(self.client(request)))
            if attack.bodies:
                await self.until(before + len(clients))
        await self.until(before + 1)
        try:
            yield
            assert not any(client.done() for client in clients), "the gateway ended"
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def block(gateway: GatewayProcess, ask: Callable[[], Awaitable[int]]) -> tuple[float, int]:
    """Send B's requests. Return the seconds that they took, and how many failed.

    They count for no more than the engine's waits and the processor that the gateway took meanwhile, for
    whomever: what they would take if the gateway had a core of its own.
    """
    loop, process = asyncio.get_running_loop(), psutil.Process(gateway.pid)
    began, used = loop.time(), sum(process.cpu_times()[:2])
    statuses = await asyncio.gather(*(ask() for _ in range(REQUESTS)))
    waited, used = loop.time() - began, sum(process.cpu_times()[:2]) - used
    seconds = min(waited, REQUESTS / AT_ONCE * WAIT_S + used)
    return seconds, REQUESTS - statuses.count(200)


async def at_rest(gateway: GatewayProcess) -> None:
    """Wait until nothing of A is left."""

    async def none_open() -> bool:
        return await gateway.metric("fleetkeeper_gateway_open_requests") == 0

    await gateway.until(none_open, "requests of A are still open")


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack", keep_first(3, ATTACKS, pytest.mark.exhaustive), ids=lambda attack: attack.name
)
async def test_a_tenant_is_served_beside_one_that_attacks(
    world: Surroundings, attack: Attack
) -> None:
    world.api.put(service(OTHER_NAMESPACE, OTHER_MODEL))
    keys = [world.add_key(f"a-{number}", **attack.quotas) for number in range(attack.keys)]
    key = world.add_key("b", **{client_keys.NAMESPACES: OTHER_NAMESPACE})
    tenant = Tenant(0)
    # A connection for each request: those that the gateway closes to make room may be B's.
    connector = aiohttp.TCPConnector(limit=AT_ONCE, force_close=True)
    alone: list[float] = []
    beside: list[float] = []
    failed = 0
    async with (
        serving(attack.script, tenant.moved) as hostile,
        serving(waits(WAIT_S)) as waiting,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        world.addresses[f"{MODEL}.{NAMESPACE}.svc"] = hostile
        world.addresses[f"{OTHER_MODEL}.{OTHER_NAMESPACE}.svc"] = waiting
        gateway = await world.start(**attack.settings)
        other = replace(world, session=session)

        async def ask() -> int:
            with contextlib.suppress(aiohttp.ClientError):
                status, _ = await other.ask(gateway, key, model=OTHER_MODEL, prompt=PROMPT)
                return status
            return 0

        tenant.port = gateway.port
        assert await ask() == 200
        for _ in range(ROUNDS):
            seconds, lost = await block(gateway, ask)
            alone.append(seconds)
            failed += lost
            async with tenant.attacking(attack, keys):
                seconds, lost = await block(gateway, ask)
            beside.append(seconds)
            failed += lost
            await at_rest(gateway)
    one, two = statistics.median(alone), statistics.median(beside)
    print(
        f"{attack.name}: alone {one:.2f} s, beside A {two:.2f} s, ratio {two / one:.2f}; "
        f"{failed} of B's failed; {tenant.outcomes} outcomes of A"
    )
    assert failed == 0
    assert two <= max(MOST_RATIO * one, one + SLACK_S), (alone, beside)
    assert gateway.tracebacks() == []

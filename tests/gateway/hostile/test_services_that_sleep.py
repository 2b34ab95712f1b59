"""Real processes hold requests for a service that sleeps, and end in every way while they do."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import aiohttp
import psutil
import pytest
from aiohttp import web

from fleetkeeper_contract import client_keys
from fleetkeeper_contract.sleep import GATEWAY_KEY, GATEWAY_VALUE
from fleetkeeper_local.control_plane.ports import free_ports
from tests.gateway.http.world import StandIn
from tests.support.gateway.gateway_api import (
    KEYS_NAMESPACE,
    SECRETS,
    Manifest,
    config_map,
    service,
    uid_of,
)
from tests.support.gateway.gateway_process import GatewayProcess
from tests.support.gateway.gateway_surroundings import MODEL, NAMESPACE, SHARES, Surroundings

MARKS: Final = ("fleetkeeper", "wake-marks")
SETTINGS: Final = {"WAKE_MARKS": "/".join(MARKS)}
UID: Final = uid_of(NAMESPACE, MODEL)
MARKED: Final = {GATEWAY_KEY: GATEWAY_VALUE, UID: "3.standard"}
REVOKED_S: Final = 2.0
CLIENTS: Final = 10
TRIES: Final = 3
"""A busy machine may delay some of them."""


def sleeper(state: str | None, number: int = 3) -> Manifest:
    """Return the service in a state of its sleep; None: awake."""
    manifest = service(NAMESPACE, MODEL)
    if state is not None:
        manifest["status"]["sleep"] = {"number": number, "state": state}
        manifest["status"]["conditions"][1]["status"] = "False"
    return manifest


@pytest.fixture
def port(world: Surroundings) -> int:
    """The port of the service's replica, which does not run yet. The service sleeps."""
    found: int = free_ports(1)[0]
    world.addresses[f"{MODEL}.{NAMESPACE}.svc"] = found
    world.addresses["*"] = found
    world.api.put(sleeper("Asleep"), config_map(*MARKS))
    return found


async def until_held(process: GatewayProcess, count: int) -> None:
    async def held() -> bool:
        return await process.metric("fleetkeeper_gateway_held_requests") == count

    await process.until(held, f"it does not hold {count} requests")


async def refused(
    world: Surroundings, process: GatewayProcess, key: str | None = None, **fields: Any
) -> tuple[int, str | None, float]:
    """Ask; return the status, the gateway's code, and when the answer came."""
    async with world.open(process, key, **fields) as answer:
        await answer.read()
        return answer.status, answer.headers.get("X-Fleetkeeper-Refused"), time.monotonic()


async def test_a_request_is_held_by_two_gateways_and_one_of_them_is_killed(
    world: Surroundings, port: int
) -> None:
    """The mark outlives the gateway. Held requests count for the concurrency of their key."""
    one, two = [await world.start(name, **SETTINGS, **SHARES) for name in ("one", "two")]
    key = world.add_key("few", **{client_keys.CONCURRENCY: "3"})
    async with asyncio.TaskGroup() as tasks:
        lost = tasks.create_task(_lost(world, one, key))
        await until_held(one, 1)
        await one.until(lambda: world.api.data(*MARKS) == MARKED, "there is no mark")
        kept = [tasks.create_task(world.ask(two, key)) for _ in range(2)]
        await until_held(two, 2)
        assert world.slots() == 3
        assert (await refused(world, two, key))[:2] == (429, "rate_limit_exceeded")
        one.kill()
        assert await lost
        world.api.put(sleeper("Waking"))
        async with StandIn().running(port) as late:
            statuses = [status for status, _ in await asyncio.gather(*kept)]
            world.api.put(sleeper(None))
            assert (await world.ask(two, world.key))[0] == 200
    assert statuses == [200, 200]
    assert len(late.received) == 3
    patches = [patch for _, patch in world.api.patches if UID in patch]
    assert patches == [{UID: MARKED[UID]}]
    assert two.tracebacks() == []


async def test_no_request_fails_while_the_only_replica_is_replaced(
    world: Surroundings, port: int
) -> None:
    """It drains, is gone for a time, and the next one listens. Clients send without a pause."""
    gateway = await world.start(**SETTINGS)
    old, late, over = StandIn(), StandIn(), asyncio.Event()
    statuses: list[int] = []

    async def drains(_request: web.Request) -> web.StreamResponse:
        answer = web.json_response({"error": {"code": "draining"}}, status=503)
        answer.force_close()  # as a router that ends does
        return answer

    async def ask_steadily() -> None:
        while not over.is_set():
            statuses.append((await world.ask(gateway))[0])

    async def has_more(stand_in: StandIn) -> None:
        known = len(stand_in.received)
        await gateway.until(lambda: len(stand_in.received) >= known + 50, "requests do not go on")

    async with old.running(port):
        world.api.put(sleeper(None))
        asking = [asyncio.create_task(ask_steadily()) for _ in range(CLIENTS)]
        await has_more(old)
        world.api.put(sleeper("Swapping"))
        await has_more(old)
        old.script = drains
        await until_held(gateway, CLIENTS)
    async with late.running(port):
        await has_more(late)
        world.api.put(sleeper(None))
        await has_more(late)
        over.set()
        await asyncio.gather(*asking)
    assert set(statuses) == {200}
    assert not [patch for _, patch in world.api.patches if UID in patch]
    assert gateway.tracebacks() == []


async def test_a_key_that_is_revoked_ends_its_held_request(world: Surroundings, port: int) -> None:
    gateway = await world.start(**SETTINGS)
    times = []
    for number in range(TRIES):
        key = world.add_key(f"leaver-{number}")

        async def known(key: str = key) -> bool:
            return (await refused(world, gateway, key, model="other"))[0] == 404

        await gateway.until(known, "the key is not known")
        asking = asyncio.create_task(refused(world, gateway, key))
        await until_held(gateway, 1)
        began = time.monotonic()
        world.api.delete(SECRETS, KEYS_NAMESPACE, f"leaver-{number}")
        status, code, ended = await asking
        assert (status, code) == (401, "invalid_api_key")
        times.append(ended - began)
        assert world.slots() == 0
    assert min(times) <= REVOKED_S, times


async def test_a_gateway_that_ends_refuses_its_held_requests_at_once(
    world: Surroundings, port: int
) -> None:
    gateway = await world.start(**SETTINGS, DRAIN_SECONDS="600")
    asking = [asyncio.create_task(refused(world, gateway)) for _ in range(20)]
    await until_held(gateway, 20)
    assert await gateway.stop() == 0
    assert {(await task)[:2] for task in asking} == {(503, "draining")}
    assert world.slots() == 0
    assert gateway.tracebacks() == []


@pytest.mark.exhaustive
async def test_ten_thousand_requests_for_a_service_that_sleeps_stay_within_their_budget(
    world: Surroundings, port: int
) -> None:
    """Those beyond it are refused and leave nothing, and those within it are all answered."""
    count, budget = 10_000, 16 * 1024**2
    gateway = await world.start(**SETTINGS, HOLD_BYTES=str(budget))
    before = psutil.Process(gateway.pid).memory_info().rss
    # More new connections at once are closed before their key is known.
    await world.session.close()
    world.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=3000))
    asking = [asyncio.create_task(refused(world, gateway)) for _ in range(count)]
    held = 0.0

    async def rest_is_refused() -> bool:
        nonlocal held
        held = await gateway.metric("fleetkeeper_gateway_held_requests")
        return held > 0 and sum(not task.done() for task in asking) == held

    await gateway.until(rest_is_refused, lambda: f"{held} are held")
    assert await gateway.metric("fleetkeeper_gateway_held_bytes") <= budget / 2
    grown = psutil.Process(gateway.pid).memory_info().rss - before
    print(f"{held:.0f} of {count} requests were held, and the process grew by {grown / 1e6:.0f} MB")
    async with StandIn().running(port) as late:
        answers = [await task for task in asking]
    sent = [code for status, code, _ in answers if status == 200]
    assert len(sent) == held == len(late.received)
    assert {code for status, code, _ in answers if status != 200} == {"hold_full"}
    assert len([patch for _, patch in world.api.patches if UID in patch]) == 1
    await world.session.close()
    await world.at_rest(gateway)
    assert gateway.tracebacks() == []


async def _lost(world: Surroundings, process: GatewayProcess, key: str) -> bool:
    """Return True if the connection broke before an answer."""
    try:
        await world.ask(process, key)
    except aiohttp.ClientError:
        return True
    return False

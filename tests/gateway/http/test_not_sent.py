"""Requests that no replica took go elsewhere or wait; what was sent is not sent again."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import web

from tests.gateway.http.world import KEY, StandIn, World, chat, head, service
from tests.support.guards import GUARD_S

NO_WORKER = "No available workers (all circuits open or unhealthy)"
"""As vllm-router 0.1.17 answers (measured)."""
DRAINING = '{"error": {"message": "...", "type": "server_error", "code": "draining"}}'
LINE = f"Bearer batch.{KEY.id}.signed"
"""Token of the batch process on behalf of a key."""


@pytest.fixture
def free_port() -> int:
    """A port that refuses connections until the test listens on it."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        name: tuple[str, int] = taken.getsockname()
    return name[1]


async def test_a_refused_connection_is_tried_until_a_replica_listens(
    world: World, free_port: int
) -> None:
    world.services.set(service(url=f"http://127.0.0.1:{free_port}", demands_grant=True))
    asking = asyncio.create_task(_status(world))
    await world.until(lambda: len(world.grants.signed) >= 3)
    async with StandIn().running(free_port) as late:
        assert await asking == 200
    assert len(late.received) == 1
    attempts = [claims["attempt_id"] for claims in world.grants.signed]
    # An engine accepts an attempt once, so each has an ID of its own.
    assert len(set(attempts)) == len(attempts)
    assert len({claims["request_id"] for claims in world.grants.signed}) == 1
    assert world.limiter.admissions[0].released == [True]


async def test_a_service_that_moves_is_found_at_its_new_address(
    world: World, free_port: int
) -> None:
    world.services.set(service(url=f"http://127.0.0.1:{free_port}", demands_grant=True))
    asking = asyncio.create_task(_status(world))
    await world.until(lambda: len(world.grants.signed) >= 2)
    world.services.set(service(url=world.upstream.url, uid="new", demands_grant=True))
    assert await asking == 200
    assert world.grants.signed[-1]["service"] == "new"


@pytest.mark.promise("owned-address")
async def test_nothing_is_sent_to_a_service_without_an_address_of_its_own(world: World) -> None:
    world.services.set(service(url="", state="Unavailable", ready=False, demands_grant=True))
    assert await world.refused() == (503, "service_unavailable")
    assert world.grants.signed == [], "a grant is for an address that is known"


async def test_the_wait_for_a_replica_is_bounded(idle_world: World, free_port: int) -> None:
    async with idle_world.running(wait_seconds=0.3) as world:
        world.services.set(service(url=f"http://127.0.0.1:{free_port}"))
        async with world.post() as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (503, "service_unavailable")
            assert 1 <= int(response.headers["Retry-After"]) <= 60
        assert "team/chat" in error["message"]
        # Its tokens are given back: nothing was sent.
        assert world.limiter.admissions[0].released == [False]


@pytest.mark.promise("batch-quotas")
async def test_a_line_that_no_replica_takes_is_refused_without_a_wait(
    world: World, free_port: int
) -> None:
    """Its process sends it again, at the pace of its service. A thousand waiting lines would cost the gateway a core."""
    world.services.set(service(url=f"http://127.0.0.1:{free_port}", demands_grant=True))
    assert await world.refused(Authorization=LINE) == (503, "service_unavailable")
    attempts = len(world.grants.signed)
    assert 1 <= attempts <= 5, "each signs a grant"


async def test_a_line_that_a_draining_replica_refuses_is_sent_to_another_one(world: World) -> None:
    answers = [web.Response(status=503, text=DRAINING)]

    async def script(request: web.Request) -> web.StreamResponse:
        return answers.pop() if answers else web.Response(text="taken")

    world.upstream.script = script
    async with world.post(Authorization=LINE) as response:
        assert (response.status, await response.text()) == (200, "taken")


async def test_a_name_without_an_address_counts_as_not_sent(idle_world: World) -> None:
    async with idle_world.running(wait_seconds=0) as world:
        world.services.set(service(url="http://name.invalid:80"))
        assert await world.refused() == (503, "service_unavailable")


async def test_a_service_that_is_removed_during_the_wait_ends_it(
    world: World, free_port: int
) -> None:
    world.services.set(service(url=f"http://127.0.0.1:{free_port}", demands_grant=True))
    asking = asyncio.create_task(_status(world))
    await world.until(lambda: len(world.grants.signed) >= 1)
    world.services.set()
    assert await asking == 503


@pytest.mark.parametrize("text", [NO_WORKER, "No available workers", DRAINING])
async def test_a_503_that_says_that_nobody_took_the_request_is_tried_again(
    world: World, text: str
) -> None:
    answers = [web.Response(status=503, text=text) for _ in range(2)]

    async def script(request: web.Request) -> web.StreamResponse:
        return answers.pop() if answers else web.Response(text="taken")

    world.upstream.script = script
    async with world.post() as response:
        assert (response.status, await response.text()) == (200, "taken")
    assert len({one.values("x-request-id")[0] for one in world.upstream.received}) == 1
    assert len({one.body for one in world.upstream.received}) == 1


@pytest.mark.parametrize(
    "answer",
    [
        (503, "The model is overloaded"),
        (503, '{"error": {"code": "other"}}'),
        (503, '{"error": "draining"}'),
        (503, "[]"),
        (503, NO_WORKER + "x" * 5000),
        (500, NO_WORKER),
    ],
)
async def test_another_error_is_passed_on_and_not_tried_again(
    world: World, answer: tuple[int, str]
) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        return web.Response(status=answer[0], text=answer[1])

    world.upstream.script = script
    async with world.post() as response:
        assert (response.status, await response.text()) == answer
    assert len(world.upstream.received) == 1


@pytest.mark.parametrize(
    ("status", "taken"), [(200, True), (400, False), (429, False), (500, True), (503, False)]
)
async def test_a_request_that_the_service_refuses_gives_its_tokens_back(
    world: World, status: int, taken: bool
) -> None:
    """An engine that sheds it enters it in no ledger, so nobody would settle the estimate."""

    async def script(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text="no")

    world.upstream.script = script
    async with world.post() as response:
        assert response.status == status
    assert world.limiter.admissions[0].released == [taken]


async def test_a_503_in_chunks_is_passed_on(world: World) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=503)
        await response.prepare(request)
        await response.write(b"a")
        await response.write(b"b")
        return response

    world.upstream.script = script
    async with world.post() as response:
        assert (response.status, await response.text()) == (503, "ab")


async def test_a_client_that_hangs_up_during_the_wait_ends_it(world: World, free_port: int) -> None:
    world.services.set(service(url=f"http://127.0.0.1:{free_port}", demands_grant=True))
    _, writer = await world.raw(head(f"Content-Length: {len(chat())}"), chat())
    await world.until(lambda: len(world.grants.signed) >= 1)
    writer.close()
    await world.until(lambda: world.gateway.open_requests.count == 0)
    assert world.audit.requests[0]["outcome"] == "client_gone"


async def test_a_connection_that_is_not_accepted_times_out_as_not_sent(idle_world: World) -> None:
    """A full queue of a listener drops the connection's first packet, as a dead node does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fill = [socket.socket() for _ in range(4)]
        for one in fill:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        async with idle_world.running(wait_seconds=0, connect_timeout_seconds=0.3) as world:
            world.services.set(service(url=f"http://127.0.0.1:{listener.getsockname()[1]}"))
            async with world.post() as response:
                assert response.status == 503
                assert "connect_timeout" in await response.text()
        for one in fill:
            one.close()


async def _status(world: World) -> int:
    async with asyncio.timeout(GUARD_S), world.post() as response:
        return response.status

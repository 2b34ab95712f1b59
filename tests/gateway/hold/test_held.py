"""Requests for services that sleep wait until a replica takes them, also if the status is late."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.hold.budget import OVERHEAD_BYTES
from fleetkeeper_gateway.hold.line import DECISION_S
from fleetkeeper_gateway.interfaces import Key, LimitRefused, Service
from tests.gateway.hold.held import ask, held, hold_of
from tests.gateway.http.world import AUTHORIZATION, KEY, StandIn, World, asleep, chat, head, service
from tests.support.guards import GUARD_S

LINE = f"Bearer batch.{KEY.id}.signed"
"""Token of the batch process on behalf of a key."""
QUEUE_FULL = '{"error": {"message": "...", "type": "rate_limit_error", "code": "queue_full"}}'
NO_REPLICA = '{"error": {"message": "...", "type": "server_error", "code": "no_replica"}}'
MARK = ("uid-chat", 1, Tier.STANDARD)


def is_at_rest(world: World) -> bool:
    """Returns whether nothing of any request is left."""
    open_requests = world.gateway.open_requests.count
    return not (open_requests or world.hold._lines or world.hold._budget.held_bytes)


async def test_a_request_waits_until_a_replica_listens(
    world: World, sleeper: Callable[..., Service], free_port: int
) -> None:
    """The status may say for longer that the service sleeps."""
    world.services.set(sleeper())
    asking = asyncio.create_task(ask(world))
    await world.until(lambda: len(world.grants.signed) >= 2)
    assert world.gateway.bodies.held_bytes == 0, "its bytes have a budget of their own"
    assert world.hold._budget.held_bytes == len(chat()) + OVERHEAD_BYTES
    assert world.marks.wanted == [MARK]
    async with StandIn().running(free_port) as late:
        assert await asking == 200
    assert [received.body for received in late.received] == [chat()]
    assert world.limiter.admissions[0].released == [True]
    await world.until(lambda: is_at_rest(world))
    assert world.hold.holding == set()


async def test_requests_for_awake_services_are_not_held(world: World) -> None:
    assert await ask(world) == 200
    assert world.marks.wanted == []
    assert world.hold._lines == {}


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/chat/completions", {"X_Inference_Tier": "batch"}),
        ("/v1/chat/completions", {"X_Inference_Tier": "batch", "X_Fleetkeeper_Wake": "always"}),
        ("/v1/chat/completions", {"Authorization": LINE}),
        ("/tokenize", {}),
        ("/detokenize", {}),
    ],
)
async def test_a_batch_and_a_tokenizer_are_not_held_and_wake_nothing(
    world: World, sleeper: Callable[..., Service], path: str, headers: dict[str, str]
) -> None:
    world.services.set(sleeper(starts=(20, 40)))
    async with world.post(None, path, **headers) as response:
        assert response.status == 503
        assert response.headers["X-Fleetkeeper-Refused"] == "service_asleep"
        assert response.headers["Retry-After"] == "40"
    assert world.marks.wanted == []
    assert world.grants.signed == []
    assert world.limiter.admissions[0].released == [False]


async def test_a_line_of_a_batch_wakes_its_service_if_the_batch_process_says_so(
    world: World, sleeper: Callable[..., Service]
) -> None:
    world.services.set(sleeper())
    assert await world.refused(Authorization=LINE, X_Fleetkeeper_Wake="deadline") == (
        503,
        "service_asleep",
    )
    assert world.marks.wanted == [("uid-chat", 1, Tier.BATCH)]


async def test_the_header_that_wakes_reaches_no_service(world: World) -> None:
    assert await ask(world, X_Fleetkeeper_Wake="always") == 200
    assert world.upstream.received[0].values("x-fleetkeeper-wake") == []


async def test_a_refused_request_wakes_nothing(
    world: World, sleeper: Callable[..., Service]
) -> None:
    world.services.set(sleeper())
    assert (await world.refused(chat(model="other")))[0] == 404
    assert (await world.refused(b"{"))[0] == 400
    assert (await world.refused(Authorization="Bearer fk_unknown"))[0] == 401
    world.limiter.refusal = LimitRefused("tokens", "Too many.", 9, {})
    assert (await world.refused())[0] == 429
    async with world.client.get(
        world.url("/v1/models"), headers={"Authorization": AUTHORIZATION}
    ) as response:
        assert response.status == 200
    assert world.marks.wanted == []


async def test_without_marks_nothing_is_held(
    idle_world: World, sleeper: Callable[..., Service]
) -> None:
    idle_world.hold = hold_of(idle_world, marks=None)
    async with idle_world.running() as world:
        world.services.set(sleeper())
        assert await world.refused() == (503, "service_asleep")
        assert world.grants.signed == []


async def test_the_hold_is_bounded(idle_world: World, sleeper: Callable[..., Service]) -> None:
    idle_world.hold = hold_of(idle_world, hold_s=0.3)
    async with idle_world.running() as world:
        world.services.set(sleeper())
        async with world.post() as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "30")
            assert response.headers["X-Fleetkeeper-Refused"] == "service_waking"
        # Its tokens are given back: nothing was sent.
        assert world.limiter.admissions[0].released == [False]
        await world.until(lambda: is_at_rest(world))


async def test_a_failed_start_ends_the_hold(world: World, sleeper: Callable[..., Service]) -> None:
    world.services.set(sleeper("Waking"))
    asking = asyncio.create_task(world.refused())
    await world.until(lambda: len(world.grants.signed) >= 1)
    world.services.set(sleeper(number=2, failures=1))
    assert await asking == (503, "wake_failed")


@pytest.mark.parametrize("gone", [True, False])
async def test_a_service_that_is_deleted_or_renames_its_model_ends_the_hold(
    world: World, sleeper: Callable[..., Service], gone: bool
) -> None:
    world.services.set(sleeper())
    asking = asyncio.create_task(world.refused())
    await world.until(lambda: held(world) == 1)
    renamed = service(models=("renamed",), sleep=asleep())
    world.services.set(*([] if gone else [renamed]))
    assert await asking == ((503, "service_unavailable") if gone else (404, "model_not_found"))


async def test_a_client_that_hangs_up_leaves(world: World, sleeper: Callable[..., Service]) -> None:
    world.services.set(sleeper())
    _, writer = await world.raw(head(f"Content-Length: {len(chat())}"), chat())
    await world.until(lambda: held(world) == 1)
    writer.transport.abort()
    await world.until(lambda: is_at_rest(world))
    assert world.audit.requests[0]["outcome"] == "client_gone"
    assert world.limiter.admissions[0].released == [False]


async def test_a_revoked_key_ends_the_hold(world: World, sleeper: Callable[..., Service]) -> None:
    world.services.set(sleeper())
    asking = asyncio.create_task(world.refused())
    await world.until(lambda: held(world) == 1)
    world.keys.revoked.add(KEY.id)
    assert await asking == (401, "invalid_api_key")
    assert world.limiter.admissions[0].released == [False]


async def test_the_end_of_the_process_ends_the_hold_at_once(
    world: World, sleeper: Callable[..., Service]
) -> None:
    """Other requests have time to end."""
    slow = service("slow", world.upstream.url, models=("slow",))
    released = asyncio.Event()

    async def script(request: web.Request) -> web.StreamResponse:
        await released.wait()
        return web.Response(text="whole")

    world.upstream.script = script
    world.services.set(sleeper(), slow)
    waiting = asyncio.create_task(world.refused())
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(_status(world, chat(model="slow")))
        await world.until(lambda: held(world) == 1 and len(world.upstream.received) == 1)
        world.signals.receive()
        assert await waiting == (503, "draining")
        released.set()
    assert running.result() == 200


async def test_a_replica_that_sheds_gets_the_request_again(
    world: World, sleeper: Callable[..., Service], free_port: int
) -> None:
    answers = [
        web.Response(status=429, text=QUEUE_FULL),
        web.Response(status=429, text=QUEUE_FULL.replace("queue_full", "tier_closed")),
        web.Response(status=503, text=NO_REPLICA),
    ]

    async def script(request: web.Request) -> web.StreamResponse:
        return answers.pop() if answers else web.Response(text="taken")

    late = StandIn()
    late.script = script
    world.services.set(sleeper())
    async with late.running(free_port), world.post() as response:
        assert (response.status, await response.text()) == (200, "taken")
    assert len(late.received) == 4
    assert len({received.values("x-request-id")[0] for received in late.received}) == 1
    assert len({claims["attempt_id"] for claims in world.grants.signed}) == 4
    assert world.limiter.admissions[0].released == [True]


@pytest.mark.parametrize(
    ("status", "text"),
    [(429, '{"error": {"code": "grants_full"}}'), (429, "slow down"), (500, "no"), (400, "no")],
)
async def test_another_error_ends_the_hold(
    world: World, sleeper: Callable[..., Service], free_port: int, status: int, text: str
) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text)

    late = StandIn()
    late.script = script
    world.services.set(sleeper())
    async with late.running(free_port), world.post() as response:
        assert (response.status, await response.text()) == (status, text)
    assert len(late.received) == 1


async def test_a_request_that_was_sent_is_not_sent_again(
    world: World, sleeper: Callable[..., Service], free_port: int
) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    late = StandIn()
    late.script = script
    world.services.set(sleeper())
    async with late.running(free_port):
        assert await world.refused() == (502, "upstream_failed")
    assert len(late.received) == 1
    await world.until(lambda: is_at_rest(world))


async def test_an_awake_service_that_falls_asleep_during_the_attempts_holds(
    world: World, sleeper: Callable[..., Service], free_port: int
) -> None:
    world.services.set(sleeper(None))
    asking = asyncio.create_task(ask(world))
    await world.until(lambda: len(world.grants.signed) >= 2)
    assert world.marks.wanted == []
    world.services.set(sleeper())
    await world.until(lambda: held(world) == 1)
    assert world.marks.wanted == [MARK]
    async with StandIn().running(free_port) as late:
        assert await asking == 200
    assert len(late.received) == 1


async def test_an_attempt_that_failed_last_while_the_service_fell_asleep_holds(
    idle_world: World, sleeper: Callable[..., Service], free_port: int
) -> None:
    """The wait for an awake service is over with it."""
    async with idle_world.running(wait_seconds=0) as world:
        world.services.set(sleeper(None))
        sign = world.grants.sign

        def falls_asleep(service: Service, **claims: Any) -> str:
            world.services.set(sleeper())
            return sign(service, **claims)

        world.grants.sign = falls_asleep  # type: ignore[method-assign]
        asking = asyncio.create_task(ask(world))
        await world.until(lambda: held(world) == 1)
        async with StandIn().running(free_port):
            assert await asking == 200


STATES = ("GoingToSleep", "Asleep", "Waking", None)


@pytest.mark.parametrize(
    ("first", "listens"), list(itertools.combinations_with_replacement(range(len(STATES)), 2))
)
async def test_no_request_is_lost_when_the_state_changes(
    idle_world: World,
    sleeper: Callable[..., Service],
    free_port: int,
    first: int,
    listens: int,
) -> None:
    """It arrives in one state, and a replica listens from the same or a later state on."""
    skipped_s = 0.0
    idle_world.hold = hold_of(idle_world, monotonic=lambda: time.monotonic() + skipped_s)
    async with idle_world.running() as world:
        world.services.set(sleeper(STATES[first]))
        asking = asyncio.create_task(ask(world))
        await world.until(lambda: held(world) == 1 or STATES[first] is None)
        late = StandIn()
        for state in STATES[first:listens]:
            world.services.set(sleeper(state))
            await world.until(lambda: held(world) == 1)
            skipped_s += DECISION_S
            world.grants.signed.clear()
            await world.until(lambda: bool(world.grants.signed))
        async with late.running(free_port):
            for state in STATES[listens:]:
                world.services.set(sleeper(state))
                await asyncio.sleep(0)
            assert await asking == 200
    assert len(late.received) == 1


async def test_later_requests_go_behind_those_that_are_held(
    world: World, sleeper: Callable[..., Service], free_port: int
) -> None:
    """Also once the status says that the service is awake. A more urgent tier is first."""
    world.keys.known["Bearer fk_urgent"] = Key(
        "key-2", "urgent", frozenset({"team"}), highest=Tier.REALTIME
    )
    world.services.set(sleeper())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask(world, X_Request_Id="first"))
        await world.until(lambda: held(world) == 1)
        world.services.set(sleeper(None))
        tasks.create_task(ask(world, X_Request_Id="second"))
        await world.until(lambda: held(world) == 2)
        tasks.create_task(
            ask(
                world,
                X_Request_Id="urgent",
                Authorization="Bearer fk_urgent",
                X_Inference_Tier="realtime",
            )
        )
        await world.until(lambda: held(world) == 3)
        late = await tasks.create_task(_serve_until(world, free_port, 3))
    order = [received.values("x-client-request-id")[0] for received in late.received]
    assert order == ["urgent", "first", "second"]


async def test_a_batch_for_an_awake_service_goes_past_those_that_are_held(
    world: World, sleeper: Callable[..., Service], free_port: int
) -> None:
    world.services.set(sleeper())
    asking = asyncio.create_task(ask(world))
    await world.until(lambda: held(world) == 1)
    world.services.set(sleeper(None))
    assert await world.refused(Authorization=LINE) == (503, "service_unavailable")
    async with StandIn().running(free_port):
        assert await asking == 200


async def test_a_woken_replica_is_not_flooded(
    world: World, sleeper: Callable[..., Service], free_port: int
) -> None:
    """It takes 8 at a time. Nearly every request is sent once, and all are answered."""
    at_once, count, running = 8, 90, 0

    async def script(request: web.Request) -> web.StreamResponse:
        nonlocal running
        if running >= at_once:
            return web.Response(status=429, text=QUEUE_FULL)
        running += 1
        await asyncio.sleep(0.002)
        running -= 1
        return web.Response(text="taken")

    late = StandIn()
    late.script = script
    world.services.set(sleeper())
    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(ask(world)) for _ in range(count)]
        await world.until(lambda: held(world) == count)
        async with late.running(free_port):
            await asyncio.wait(asking)
    assert [task.result() for task in asking] == [200] * count
    assert len(late.received) < 2 * count
    await world.until(lambda: is_at_rest(world))


async def test_the_bytes_of_held_requests_are_bounded(
    idle_world: World, sleeper: Callable[..., Service], free_port: int
) -> None:
    """A service may have half of them, so the requests for another one are held."""
    size = len(chat()) + OVERHEAD_BYTES
    idle_world.hold = hold_of(idle_world, total_bytes=5 * size)
    async with idle_world.running() as world:
        other = service("other", sleeper().url, models=("other",), sleep=asleep())
        world.keys.known["Bearer fk_other"] = Key("key-2", "other", frozenset({"team", "b"}))
        world.services.set(sleeper(starts=(20,)), other)
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(ask(world)) for _ in range(2)]
            await world.until(lambda: held(world) == 2)
            async with world.post() as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "20")
                assert response.headers["X-Fleetkeeper-Refused"] == "hold_full"
            body = chat(model="other")
            others = tasks.create_task(_status(world, body, Authorization="Bearer fk_other"))
            await world.until(lambda: held(world) == 3)
            async with StandIn().running(free_port):
                await asyncio.wait([*asking, others])
        assert [task.result() for task in (*asking, others)] == [200] * 3
        assert world.hold._budget._of_owners == {}


async def _status(world: World, body: bytes, **headers: str) -> int:
    async with asyncio.timeout(GUARD_S), world.post(body, **headers) as response:
        await response.read()
        return response.status


async def _serve_until(world: World, port: int, count: int) -> StandIn:
    """Serves on a port until so many requests have come."""
    async with StandIn().running(port) as late:
        await world.until(lambda: len(late.received) == count)
        await world.until(lambda: held(world) == 0 and not world.hold._lines)
    return late

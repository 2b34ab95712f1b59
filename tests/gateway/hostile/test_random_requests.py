"""Random requests over raw sockets: no traceback, nothing left over, nothing secret in a log."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter

import pytest

from fleetkeeper_contract import client_keys
from tests.support.gateway.gateway_process import GatewayProcess
from tests.support.gateway.gateway_requests import RawRequest, raw_request, send_raw
from tests.support.gateway.gateway_surroundings import MODEL, PROMPT, Surroundings

AT_A_TIME = 24
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
TOKEN = re.compile(r"eyJ[\w-]+\.[\w-]+\.[\w-]+|fk_[\w-]{20,}")
"""A grant, or a client's key."""


@pytest.mark.promise("random-requests")
@pytest.mark.parametrize(
    ("seed", "count"),
    [pytest.param(7, 1_000, id="1000"), pytest.param(8, 10_000, id="10000", marks=pytest.mark.exhaustive)],
)  # fmt: skip
@pytest.mark.slow
async def test_random_requests_leave_nothing_behind(
    world: Surroundings, seed: int, count: int
) -> None:
    narrow = world.add_key(
        "narrow", **{client_keys.MODELS: "tiny*", client_keys.HIGHEST_TIER: "batch"}
    )
    keys = [world.key, world.key, narrow]
    gateway = await world.start(BODY_BUDGET_BYTES=str(64 << 20), WAIT_SECONDS="0.2")
    dice = random.Random(seed)
    seen = await _send(
        gateway, [raw_request(dice, keys, [MODEL, MODEL, "secret", "none"]) for _ in range(count)]
    )
    assert gateway.alive, gateway.tail()
    assert gateway.tracebacks() == []
    assert seen[500] == 0, f"an error of the gateway itself: {seen}"
    # The requests were not all refused at the door: every kind of answer is among them.
    assert {200, 400, 401, 404, 405, 502} <= set(seen), seen
    await world.at_rest(gateway)
    assert (await _ask_again(world, gateway)) == 200


async def _send(gateway: GatewayProcess, requests: list[RawRequest]) -> Counter[int]:
    """Send them, some at a time; return the statuses, 0 for no answer."""
    slots = asyncio.Semaphore(AT_A_TIME)

    async def one(request: RawRequest) -> int:
        async with slots:
            answer = await send_raw(gateway.port, request)
        found = STATUS.match(answer)
        assert found or not answer, f"no HTTP: {answer[:200]!r}"
        return int(found[1]) if found else 0

    return Counter(await asyncio.gather(*(one(request) for request in requests)))


async def _ask_again(world: Surroundings, gateway: GatewayProcess) -> int:
    answer = await send_raw(
        gateway.port,
        RawRequest(
            [
                b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nConnection: close\r\n"
                b"Authorization: Bearer " + world.key.encode() + b"\r\nContent-Length: 34\r\n\r\n"
                b'{"model": "tiny", "prompt": "end"}'
            ],
            leaves=False,
            whole=True,
        ),
    )
    found = STATUS.match(answer)
    assert found, answer
    return int(found[1])


@pytest.mark.promise("logs-without-content")
async def test_a_log_has_no_key_no_grant_and_no_prompt(world: Surroundings) -> None:
    """At the most talkative level, with requests that fail in every way."""
    gateway = await world.start(LOG_LEVEL="debug", WAIT_SECONDS="0.2")
    for way in ("whole", "stream", "refuse"):
        await world.ask(gateway, answer_as=way, stream=way == "stream")
    for way in ("reset", "garbage"):
        status, _ = await world.ask(gateway, answer_as=way)
        assert status == 502
    wrong = world.add_key("gone")
    world.api.delete("secrets", "fleetkeeper-keys", "gone")
    for key in (wrong, "fk_short", world.key + "x"):
        await world.ask(gateway, key)
    await world.ask(gateway, model=PROMPT * 3)
    await world.ask(gateway, model=["no", "text", PROMPT])
    requests = await send_raw(gateway.port, _broken_with_secrets(world.key))
    assert requests.startswith(b"HTTP/1.1 400")
    assert await gateway.stop() == 0
    text = gateway.log.read_text()
    assert '"event": "audit"' in text, "the log has what it is to have"
    assert world.key not in text
    assert TOKEN.findall(text) == []
    lines = [line for line in text.splitlines() if PROMPT in line]
    # A client may send anything as a model's name; the audit log cuts it, and nothing else has it.
    assert all('"action": "request"' in line and len(line) < 1000 for line in lines), lines


def _broken_with_secrets(key: str) -> RawRequest:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {key}\r\n"
    return RawRequest([head.encode() + b"Bad Header\r\n\r\n"], leaves=False, whole=False)


@pytest.mark.promise("client-keys-stay")
async def test_a_clients_key_reaches_no_service(world: Surroundings) -> None:
    """Whatever headers name it; what arrives is a grant, for this service, in both places."""
    gateway = await world.start()
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {world.key}\r\n"
        "Connection: close, X-Named\r\nX-Named: 1\r\nCookie: session=1\r\nX-vLLM-Anything: 1\r\n"
        "X-Fleetkeeper-Anything: 1\r\nX-Inference-Tier: batch\r\nbaggage: a=1\r\n"
        "X-Request-Id: of-the-client\r\nForwarded: for=1.2.3.4\r\nX-Forwarded-For: 1.2.3.4\r\n"
        'Content-Length: 34\r\n\r\n{"model": "tiny", "prompt": "one"}'
    )
    answer = await send_raw(gateway.port, RawRequest([request.encode()], leaves=False, whole=True))
    assert answer.startswith(b"HTTP/1.1 200")
    (received,) = world.upstream.received
    assert world.key not in str(received.headers)
    for name in (
        "cookie",
        "x-named",
        "x-vllm-anything",
        "x-fleetkeeper-anything",
        "forwarded",
        "x-forwarded-for",
    ):
        assert received.values(name) == [], name
    assert received.values("x-inference-tier") == ["batch"]
    assert received.values("x-client-request-id") == ["of-the-client"]
    (own,) = received.values("x-request-id")
    assert own != "of-the-client"
    (authorization,) = received.values("authorization")
    grant = authorization.removeprefix("Bearer ")
    assert received.values("baggage") == [f"a=1,fleetkeeper-grant={grant}"]

"""Thousands of requests of random shapes against the middleware: none breaks it, none leaves anything behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter

import pytest

from fleetkeeper_engine.in_vllm.http.asgi import Receive, Scope, Send, answer
from tests.support.engine.hostile_requests import HostileRequest, hostile_request
from tests.support.engine.middleware_calls import Call, assert_nothing_left, running_middleware

REQUESTS = 3000
AT_ONCE = 40

SEED = int(os.environ.get("FLEETKEEPER_TEST_SEED", "20261123"))


async def picky(_scope: Scope, receive: Receive, send: Send) -> None:
    """Parses like vLLM's server: what is no JSON object is a 400 of its own."""
    message = await receive()
    if message["type"] == "http.disconnect":
        return
    await asyncio.sleep(0)
    try:
        good = isinstance(json.loads(message["body"]), dict)
    except (ValueError, RecursionError):
        good = False
    await answer(send, 200 if good else 400, b"{}")


async def send_hostile(app: object, request: HostileRequest) -> int | None:
    """Its status; None when its client did not wait for it."""
    call = Call(app, None, path=request.path, headers=request.headers)  # type: ignore[arg-type]
    body, step = request.body[: request.sent], max(1, request.sent // request.parts)
    for at in range(0, len(body), step):
        call.feed(body[at : at + step], more=True)
        if request.parts > 2:
            await asyncio.sleep(0)
    if request.sent < len(request.body):
        call.hang_up()
    else:
        call.feed(b"", more=False)
        if request.leaves:
            call.hang_up()
    await call.task
    assert not call.sent or call.sent[-1].get("more_body") is False
    return call.sent[0]["status"] if call.sent else None


@pytest.mark.promise("bounded-requests")
@pytest.mark.slow
async def test_no_request_breaks_the_middleware_or_leaves_anything_behind() -> None:
    """No exception, no 5xx, and all counts return to zero."""
    dice = random.Random(SEED)
    statuses: Counter[int | None] = Counter()
    with running_middleware(picky, max_sequences=8, standard_queue_limit=20) as app:
        for _ in range(REQUESTS // AT_ONCE):
            requests = [hostile_request(dice) for _ in range(AT_ONCE)]
            statuses.update(await asyncio.gather(*(send_hostile(app, r) for r in requests)))
        assert_nothing_left(app)
    print(dict(statuses))
    assert not [status for status in statuses if status is not None and status >= 500]
    # Each way was gone: answered by the application, refused for its body, its count, its queue.
    assert {200, 400, 404, 422, None} <= set(statuses)

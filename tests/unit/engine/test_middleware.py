"""The tier middleware at its seams: what reaches vLLM, what is answered before, what a hang-up frees."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.http import dispatcher
from fleetkeeper_engine.in_vllm.http.asgi import Message, Receive, Scope, Send
from fleetkeeper_engine.in_vllm.http.middleware import TierMiddleware
from fleetkeeper_engine.in_vllm.priority import PriorityRule
from fleetkeeper_engine.in_vllm.vllm_settings import INTERNAL_HEADER, VllmSettings
from fleetkeeper_engine.shm.layout import MiddlewareBlock, Outcome, SupervisorBlock
from fleetkeeper_engine.shm.region import Region

COMPLETIONS = "/v1/completions"


BODY = b'{"model": "tiny", "prompt": "hello"}'


class StandInVllm:
    """Takes requests like vLLM's application and answers when told."""

    def __init__(self) -> None:
        self.taken: list[tuple[Scope, bytes]] = []
        self.go = asyncio.Event()
        self.go.set()
        self.aborted = 0
        self.stream = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        message = await receive()
        self.taken.append((scope, message.get("body", b"")))
        kind = b"text/event-stream" if self.stream else b"application/json"
        if self.stream:
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-type", kind)],
                }
            )
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        gone = asyncio.ensure_future(receive())
        ended = asyncio.ensure_future(self.go.wait())
        try:
            await asyncio.wait((gone, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.aborted += not ended.done()
            gone.cancel()
            ended.cancel()
        if not self.stream:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done", "more_body": False})


class Call:
    """One request of a client."""

    def __init__(self, app: Callable[..., Any], body: bytes = BODY, **scope: Any) -> None:
        self.sent: list[Message] = []
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        half = len(body) // 2
        for part, more in ((body[:half], True), (body[half:], False)):
            self._inbox.put_nowait({"type": "http.request", "body": part, "more_body": more})
        self.scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": COMPLETIONS,
            "headers": [],
            "client": ("10.0.0.9", 1234),
            **scope,
        }
        self.task = asyncio.ensure_future(app(self.scope, self._inbox.get, self._take))

    async def _take(self, message: Message) -> None:
        self.sent.append(message)

    def hang_up(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        await self.task
        start = self.sent[0]
        body = b"".join(message.get("body", b"") for message in self.sent[1:])
        assert not self.sent[-1].get("more_body", False)
        headers = {str(k, "latin-1"): str(v, "latin-1") for k, v in start["headers"]}
        return start["status"], headers, json.loads(body) if body.startswith(b"{") else body


@pytest.fixture
def region(tmp_path: Path) -> Region:
    return Region.create(tmp_path / "region")


@pytest.fixture
def vllm() -> StandInVllm:
    return StandInVllm()


@pytest.fixture
async def make(vllm: StandInVllm, region: Region) -> AsyncIterator[Callable[..., TierMiddleware]]:
    made: list[TierMiddleware] = []

    def build(**changes: Any) -> TierMiddleware:
        settings = VllmSettings(
            **{"max_sequences": 4, "min_sequences": 1, "internal_token": "secret", **changes}
        )
        made.append(TierMiddleware(vllm, settings, region))
        return made[-1]

    yield build
    for app in made:
        if app._dispatcher._ticker is not None:
            app._dispatcher._ticker.cancel()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - memory shared with other code has no event
            await asyncio.sleep(0.001)


async def until_written(region: Region, true: Callable[[MiddlewareBlock], bool]) -> None:
    """Wait until the middleware's block is so: it is written every 50 ms while requests come and go."""
    await until(lambda: (block := region.read_middleware()) is not None and true(block))


def headers(**values: str) -> list[tuple[bytes, bytes]]:
    return [(name.replace("_", "-").encode(), value.encode()) for name, value in values.items()]


@pytest.mark.promise("own-priority")
async def test_the_priority_is_ours_in_body_and_header_whatever_the_client_sent(
    make: Any, vllm: StandInVllm, region: Region
) -> None:
    """vLLM takes a header before the body: neither way lets a client jump the queue."""
    app = make()
    body = b'{"prompt": "x", "priority": -999999999999, "n": 2}'
    call = Call(app, body, headers=headers(x_vllm_priority="-9", x_inference_tier="Batch", a="b"))
    assert (await call.answer())[0] == 200
    scope, taken = vllm.taken[0]
    fields = json.loads(taken)
    origin = PriorityRule(0, 30_000_000).origin(fields["priority"])
    assert origin is not None
    assert origin.tier is Tier.BATCH
    found = dict(scope["headers"])
    assert found[b"x-vllm-priority"] == str(fields["priority"]).encode()
    assert found[b"content-length"] == str(len(taken)).encode()
    assert found[b"a"] == b"b"
    assert len(scope["headers"]) == 4
    admitted = Tier.BATCH * 5 + Outcome.ADMITTED
    await until_written(region, lambda b: b.outcomes[admitted] == 1 and b.released == (0, 0, 0))


async def test_the_api_key_is_checked_before_the_queue(
    make: Any, vllm: StandInVllm, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No key, no place in the queue; /health needs none, as kubelets send none."""
    monkeypatch.setenv("VLLM_API_KEY", "k1")
    app = make()
    for given_key in ("", "Bearer wrong", "Basic k1"):
        status, _, body = await Call(app, headers=headers(authorization=given_key)).answer()
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert vllm.taken == []
    assert (await Call(app, headers=headers(authorization="Bearer k1")).answer())[0] == 200
    assert (await Call(app, path="/health", method="GET").answer())[0] == 200
    await until_written(region, lambda b: (b.unauthorized, sum(b.arrivals)) == (3, 1))


async def test_the_supervisors_own_requests_skip_everything(
    make: Any, vllm: StandInVllm, region: Region
) -> None:
    """With its token, also while draining: untouched, uncounted, and the token goes no further."""
    app = make()
    region.write_supervisor(SupervisorBlock(draining=True))
    own = [(INTERNAL_HEADER.encode(), b"secret")]
    assert (await Call(app, headers=own).answer())[0] == 200
    assert vllm.taken[0] == (
        {**Call(app, headers=own).scope, "headers": []},
        BODY[: len(BODY) // 2],
    )
    wrong = [(INTERNAL_HEADER.encode(), b"guess")]
    assert (await Call(app, headers=wrong).answer())[0] == 503
    await until_written(region, lambda b: b.outcomes[Tier.STANDARD * 5 + Outcome.DRAINING] == 1)
    block = region.read_middleware()
    assert block is not None
    assert sum(block.outcomes) == 1


@pytest.mark.promise("engine-port")
@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/metrics", "10.0.0.9", 404),
        ("/metrics", "127.0.0.1", 200),
        ("/docs", "127.0.0.1", 404),
        ("/v1/load_lora_adapter", "127.0.0.1", 404),
        ("/v1/models", "10.0.0.9", 200),
        ("/v1/completions/render", "10.0.0.9", 404),
    ],
)
async def test_paths_are_an_allow_list(make: Any, path: str, host: str, status: int) -> None:
    """The router passes every path on; vLLM's own metrics are for the pod itself."""
    answer = await Call(make(), path=path, method="GET", client=(host, 1)).answer()
    assert answer[0] == status


async def test_websockets_are_refused(make: Any, vllm: StandInVllm) -> None:
    """They would pass the queue by."""
    call = Call(make(), type="websocket")
    await call.task
    assert call.sent == [{"type": "websocket.close", "code": 1008}]
    assert vllm.taken == []


async def test_requests_wait_in_order_and_are_released_as_others_end(
    make: Any, vllm: StandInVllm, region: Region
) -> None:
    """4 sequences and a look-ahead of 2 are inside; the seventh waits, realtime passes standard."""
    app = make()
    vllm.go.clear()
    calls = [Call(app) for _ in range(7)]
    await until(lambda: len(vllm.taken) == 6)
    late = Call(app, b'{"prompt": "late"}', headers=headers(x_inference_tier="realtime"))
    await until_written(region, lambda b: b.waiting == (1, 1, 0))
    calls[0].hang_up()
    await until(lambda: len(vllm.taken) == 7)
    assert b"late" in vllm.taken[6][1]
    vllm.go.set()
    answers = await asyncio.gather(*(call.answer() for call in [*calls, late]))
    assert {status for status, _, _ in answers} == {200}
    await until_written(region, lambda b: (b.released, b.waiting) == ((0, 0, 0), (0, 0, 0)))


async def test_a_hang_up_in_the_queue_never_reaches_vllm(
    make: Any, vllm: StandInVllm, region: Region
) -> None:
    """Its place is free at once and it counts as cancelled."""
    app = make()
    vllm.go.clear()
    calls = [Call(app) for _ in range(7)]
    await until_written(region, lambda b: b.waiting == (0, 1, 0))
    calls[6].hang_up()
    await calls[6].task
    assert calls[6].sent == []
    vllm.go.set()
    await asyncio.gather(*(call.task for call in calls))
    await until_written(region, lambda b: b.outcomes[Tier.STANDARD * 5 + Outcome.CANCELLED] == 1)
    assert len(vllm.taken) == 6


async def test_a_crowd_of_requests_writes_shared_memory_a_few_times_and_the_last_word_is_right(
    make: Any, region: Region
) -> None:
    """A write an arrival and an end would cost the engine beside it more than all of admission."""
    writes = 0
    publish = region.publish

    def counted(cells: Any) -> None:
        nonlocal writes
        writes += 1
        publish(cells)

    region.publish = counted  # type: ignore[method-assign]
    app = make(standard_queue_limit=300)
    began = time.monotonic()
    calls = [Call(app) for _ in range(300)]
    assert {(await call.answer())[0] for call in calls} == {200}
    block = region.read_middleware()
    assert block is not None
    assert (sum(block.outcomes), sum(block.released)) == (300, 0), "at once, as nothing is left"
    # One at the start, one every 200 ms, one at the end.
    assert writes <= (time.monotonic() - began) / 0.2 + 3
    assert writes < 300


@pytest.mark.parametrize("closed", [False, True])
async def test_who_reads_the_last_answer_to_its_end_finds_it_counted(
    make: Any, region: Region, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """Answered or refused: shared memory is written before the last frame leaves, not after it."""
    monkeypatch.setattr(dispatcher, "_PUBLISH_EVERY_S", 3600.0)
    monkeypatch.setattr(dispatcher, "_REST_S", 3600.0)
    app = make()
    region.write_supervisor(SupervisorBlock(closed=(False, closed, False)))
    counted: list[tuple[int, int]] = []

    class Reader(Call):
        async def _take(self, message: Message) -> None:
            await super()._take(message)
            if message["type"] == "http.response.body" and not message["more_body"]:
                block = region.read_middleware()
                assert block is not None
                counted.append((block.arrivals[Tier.STANDARD], sum(block.outcomes)))

    for _ in range(3):
        await Reader(app).answer()
    assert counted == [(1, 1), (2, 2), (3, 3)]


async def test_a_router_sends_again_what_found_a_full_queue_and_nothing_that_a_tier_sheds(
    make: Any, vllm: StandInVllm, region: Region
) -> None:
    """Four tries of a request of which a quarter is admitted would admit two of three."""
    app = make(standard_queue_limit=1)
    vllm.go.clear()
    calls = [Call(app) for _ in range(8)]
    await until(lambda: any(call.task.done() for call in calls))
    (refused,) = (call for call in calls if call.task.done())
    status, found, body = await refused.answer()
    assert (status, body["error"]["code"]) == (429, "queue_full")
    assert "x-envoy-ratelimited" not in found
    vllm.go.set()
    assert {(await call.answer())[0] for call in calls if call is not refused} == {200}

    region.write_supervisor(SupervisorBlock(closed=(False, True, False)))
    status, found, body = await Call(app).answer()
    assert (status, body["error"]["code"]) == (429, "tier_closed")
    assert found["x-envoy-ratelimited"] == "true"


@pytest.mark.parametrize("streaming", [True, False])
async def test_at_the_end_of_a_drain_answers_end_whole(
    make: Any, vllm: StandInVllm, region: Region, streaming: bool
) -> None:
    """The queue gets 503; a stream ends with an error event and DONE, an unanswered request with 503."""
    app = make()
    vllm.go.clear()
    vllm.stream = streaming
    calls = [Call(app) for _ in range(7)]
    await until(lambda: len(vllm.taken) == 6)
    region.write_supervisor(SupervisorBlock(draining=True, drain_deadline=1.0))
    answers = [await call.answer() for call in calls]
    assert vllm.aborted == 6
    status, found, body = answers[6]
    assert (status, found["connection"], body["error"]["code"]) == (503, "close", "draining")
    for status, _, body in answers[:6]:
        if streaming:
            assert status == 200
            assert body.startswith(b"data: 1\n\ndata: {")
            assert body.endswith(b"\n\ndata: [DONE]\n\n")
        else:
            assert (status, body["error"]["code"]) == (503, "draining")


async def test_a_lease_that_ends_lets_waiting_requests_in_without_a_new_one(
    make: Any, vllm: StandInVllm, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The middleware looks by itself: nobody has to arrive for a higher limit to count.

    However long it rests while nothing waits: the first request that waits ends the rest.
    """
    monkeypatch.setattr(dispatcher, "_REST_S", 3600.0)
    app = make(max_sequences=16)
    await Call(app).answer()
    region.write_supervisor(SupervisorBlock(sequences=1, lease_deadline=1e12))
    vllm.go.clear()
    calls = [Call(app) for _ in range(10)]
    await until(lambda: len(vllm.taken) == 4)
    region.write_supervisor(SupervisorBlock(sequences=1, lease_deadline=1.0))
    await until(lambda: len(vllm.taken) == 11)
    vllm.go.set()
    await asyncio.gather(*(call.task for call in calls))


async def test_a_body_that_is_no_json_is_refused(make: Any, vllm: StandInVllm) -> None:
    """The gateway and the engine read one request alike, so vLLM gets none that could be read otherwise."""
    assert (await Call(make(), b"{oops").answer())[0] == 400
    assert vllm.taken == []


@pytest.mark.parametrize("value", [True, 1, "yes"])
async def test_a_response_in_background_is_refused_with_the_reason(
    make: Any, vllm: StandInVllm, region: Region, value: object
) -> None:
    """Its sequences would outlive the answer and with it their place; elsewhere the field means nothing."""
    app = make()
    body = json.dumps({"input": "a", "background": value}).encode()
    status, _, told = await Call(app, body, path="/v1/responses").answer()
    assert (status, told["error"]["code"]) == (400, "background_not_supported")
    assert vllm.taken == []
    await until(lambda: region.read_middleware() is not None)
    block = region.read_middleware()
    assert block is not None
    assert (sum(block.released), sum(block.waiting)) == (0, 0)
    plain = json.dumps({"input": "a", "background": False}).encode()
    assert (await Call(app, plain, path="/v1/responses").answer())[0] == 200
    assert (await Call(app, body, path="/v1/chat/completions").answer())[0] == 200

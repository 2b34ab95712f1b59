"""TTFT and ITL as the middleware measures them: which answers and frames count, by tier, and when."""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fleetkeeper_contract.headers import TIER_HEADER
from fleetkeeper_contract.histogram_buckets import (
    INTER_TOKEN_LATENCY_EDGES_S,
    TIME_TO_FIRST_TOKEN_EDGES_S,
)
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.http.asgi import Receive, Scope, Send
from fleetkeeper_engine.in_vllm.http.latencies import LatencyRecord, StreamTimer, stream_of
from fleetkeeper_engine.in_vllm.http.middleware import TierMiddleware
from fleetkeeper_engine.in_vllm.vllm_settings import VllmSettings
from fleetkeeper_engine.shm.layout import MIDDLEWARE, Cells, MiddlewareBlock, SupervisorBlock
from fleetkeeper_engine.shm.region import Region
from tests.support.engine.middleware_calls import Call
from tests.support.guards import GUARD_S
from tests.support.processor_units import units_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
START = b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"tiny",'
ROLE = (
    START
    + b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null}]}\n\n'
)
TOKEN = START + b'"choices":[{"index":0,"delta":{"content":"a"},"logprobs":null}]}\n\n'
TEXT = b'data: {"id":"x","object":"text_completion","choices":[{"index":0,"text":"a"}]}\n\n'
USAGE = START + b'"choices":[],"usage":{"prompt_tokens":3}}\n\n'
ERROR = b'data: {"error":{"message":"\\"choices\\":[{ was wrong","code":500}}\n\n'
DONE = b"data: [DONE]\n\n"
EVENTS = b"text/event-stream; charset=utf-8"
Steps = Sequence[tuple[float, bytes]]


class Clock:
    """The middleware's clock, which only the stand-in below moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Streaming:
    """Stands in for vLLM: answers with frames, each so many seconds after the one before."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.steps: Steps = ()
        self.status = 200
        self.kind = EVENTS
        self.stops = False
        """Never sends the end of its answer."""
        self.sent = asyncio.Event()

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        headers = [(b"content-type", self.kind)]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for seconds, frame in self.steps:
            self.clock.now += seconds
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        self.sent.set()
        if self.stops:
            await receive()
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Bench:
    """The middleware in front of `Streaming`, and what it wrote to shared memory."""

    def __init__(self, region: Region) -> None:
        self.clock = Clock()
        self.vllm = Streaming(self.clock)
        self.region = region
        settings = VllmSettings(max_sequences=4, min_sequences=1)
        self.app = TierMiddleware(self.vllm, settings, region, clock=self.clock)

    def call(self, tier: Tier = Tier.STANDARD, path: str = CHAT, **body: Any) -> Call:
        fields = {"prompt": "x", "stream": True, **body}
        headers = [(TIER_HEADER.lower().encode(), tier.label.encode())]
        return Call(self.app, json.dumps(fields).encode(), path=path, headers=headers)

    async def stream(self, steps: Steps, tier: Tier = Tier.STANDARD, **more: Any) -> None:
        self.vllm.steps = steps
        await self.call(tier, **more).answer()

    def block(self) -> MiddlewareBlock:
        block = self.region.read_middleware()
        assert block is not None
        return block

    def counts(self) -> tuple[list[int], list[int]]:
        """TTFTs and ITLs that were counted, by tier."""
        block = self.block()
        return (
            [sum(block.time_to_first_token_of(tier)) for tier in Tier],
            [sum(block.inter_token_latency_of(tier)) for tier in Tier],
        )


@pytest.fixture
async def bench(tmp_path: Path) -> Any:
    made = Bench(Region.create(tmp_path / "region"))
    yield made
    if made.app._dispatcher._ticker is not None:
        made.app._dispatcher._ticker.cancel()


def filled(edges: Sequence[float], *seconds: float) -> tuple[int, ...]:
    """The buckets that hold these times."""
    places = [bisect_left(edges, value) for value in seconds]
    return tuple(places.count(place) for place in range(len(edges) + 1))


async def test_a_streamed_chat_counts_one_ttft_and_the_gaps_between_its_content_frames(
    bench: Bench,
) -> None:
    """The frame with the role comes with the first token, and the end holds no token: neither is a gap."""
    await bench.stream(
        [(0.3, ROLE), (0.0, TOKEN), (0.02, TOKEN), (0.06, TOKEN), (0.0, USAGE), (0.0, DONE)]
    )
    block = bench.block()
    assert bench.counts() == ([0, 1, 0], [0, 2, 0])
    assert block.time_to_first_token_of(Tier.STANDARD) == filled(TIME_TO_FIRST_TOKEN_EDGES_S, 0.3)
    assert block.time_to_first_token_sum == pytest.approx((0.0, 0.3, 0.0))
    assert block.inter_token_latency_of(Tier.STANDARD) == filled(
        INTER_TOKEN_LATENCY_EDGES_S, 0.02, 0.06
    )
    assert block.inter_token_latency_sum == pytest.approx((0.0, 0.08, 0.0))


@pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)
async def test_each_tier_has_its_own_counts(bench: Bench, tier: Tier) -> None:
    await bench.stream([(0.5, TOKEN), (0.05, TOKEN)], tier)
    one = [int(other is tier) for other in Tier]
    assert bench.counts() == (one, one)
    assert bench.block().time_to_first_token_sum[tier] == pytest.approx(0.5)


async def test_ttft_begins_with_the_arrival_not_with_the_end_of_the_body(bench: Bench) -> None:
    """A body that takes 2 s to arrive is part of what the user waits for, as in queue wait."""
    bench.vllm.steps = [(0.1, TOKEN)]
    headers = [(b"content-type", b"application/json")]
    call = Call(bench.app, None, path=CHAT, headers=headers)
    call.feed(b'{"stream": true, ')
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    bench.clock.now += 2.0
    call.feed(b'"prompt": "x"}', more=False)
    await call.answer()
    assert bench.block().time_to_first_token_sum[Tier.STANDARD] == pytest.approx(2.1)


async def test_completions_and_responses_count_their_own_frames(bench: Bench) -> None:
    """The responses API sends events before the first token and after the last."""
    await bench.stream([(0.2, TEXT), (0.01, TEXT), (0.0, DONE)], path=COMPLETIONS)
    assert bench.counts() == ([0, 1, 0], [0, 1, 0])

    def event(kind: str) -> bytes:
        return f'event: response.{kind}\ndata: {{"type":"response.{kind}"}}\n\n'.encode()

    before, after = (
        ("created", "in_progress", "output_item.added"),
        ("output_text.done", "completed"),
    )
    delta = event("output_text.delta")
    await bench.stream(
        [
            *((0.0, event(kind)) for kind in before),
            (0.4, delta),
            (0.03, delta),
            (0.03, event("reasoning_text.delta")),
            *((0.5, event(kind)) for kind in after),
        ],
        path=RESPONSES,
        input="x",
    )
    assert bench.counts() == ([0, 2, 0], [0, 3, 0])
    block = bench.block()
    assert block.time_to_first_token_sum[Tier.STANDARD] == pytest.approx(0.2 + 0.4)
    assert block.inter_token_latency_sum[Tier.STANDARD] == pytest.approx(0.01 + 0.06)


async def test_an_answer_that_is_not_streamed_has_no_ttft(bench: Bench) -> None:
    """Even if it is sent in parts that look like frames."""
    bench.vllm.kind = b"application/json"
    await bench.stream([(0.3, TOKEN), (0.1, TOKEN)])
    assert bench.counts() == ([0, 0, 0], [0, 0, 0])


async def test_an_answer_with_an_error_has_no_ttft(bench: Bench) -> None:
    """A status other than 200, or an error in place of the first frame."""
    bench.vllm.status = 400
    await bench.stream([(0.3, TOKEN)])
    bench.vllm.status = 200
    await bench.stream([(0.3, ERROR), (0.0, DONE)])
    assert bench.counts() == ([0, 0, 0], [0, 0, 0])


async def test_routes_without_tokens_are_not_measured(bench: Bench) -> None:
    await bench.stream([(0.3, TOKEN), (0.3, TOKEN)], path="/v1/embeddings", input="x")
    assert bench.counts() == ([0, 0, 0], [0, 0, 0])


async def test_frames_of_several_sequences_count_no_gaps(bench: Bench) -> None:
    """They interleave: the time between two of them is not what one sequence waits for its next token."""
    await bench.stream([(0.3, TOKEN), (0.0, TOKEN), (0.05, TOKEN)], n=2)
    assert bench.counts() == ([0, 1, 0], [0, 0, 0])
    await bench.stream([(0.3, TEXT), (0.05, TEXT)], path=COMPLETIONS, prompt=["a", "b"])
    assert bench.counts() == ([0, 2, 0], [0, 0, 0])


async def test_a_client_that_leaves_before_the_first_frame_is_not_counted(bench: Bench) -> None:
    bench.vllm.stops = True
    call = bench.call()
    async with asyncio.timeout(GUARD_S):
        await bench.vllm.sent.wait()
        call.hang_up()
        await call.task
    assert bench.counts() == ([0, 0, 0], [0, 0, 0])


async def test_an_aborted_stream_keeps_what_was_measured(bench: Bench) -> None:
    """The user had a first token, and one gap. The abort itself is no gap."""
    bench.vllm.stops = True
    bench.vllm.steps = [(0.3, TOKEN), (0.02, TOKEN)]
    call = bench.call()
    async with asyncio.timeout(GUARD_S):
        await bench.vllm.sent.wait()
        bench.clock.now += 30.0
        call.hang_up()
        await call.task
    assert bench.counts() == ([0, 1, 0], [0, 1, 0])
    assert bench.block().inter_token_latency_sum[Tier.STANDARD] == pytest.approx(0.02)


async def test_refused_requests_count_nowhere(bench: Bench) -> None:
    """Closed, draining, for an unknown tier, or with too many sequences."""
    bench.vllm.steps = [(0.3, TOKEN)]
    bench.region.write_supervisor(
        SupervisorBlock(closed=(False, False, True), queue_limits=(9,) * 3)
    )
    statuses = [(await bench.call(Tier.BATCH).answer())[0]]
    bench.region.write_supervisor(SupervisorBlock(draining=True, queue_limits=(9, 9, 9)))
    statuses.append((await bench.call().answer())[0])
    unknown = [(TIER_HEADER.lower().encode(), b"gold")]
    statuses.append((await Call(bench.app, path=CHAT, headers=unknown).answer())[0])
    bench.region.write_supervisor(SupervisorBlock(queue_limits=(9, 9, 9)))
    statuses.append((await bench.call(n=5).answer())[0])
    assert statuses == [429, 503, 400, 422]
    bench.app._shared_state.publish()
    assert bench.counts() == ([0, 0, 0], [0, 0, 0])


async def test_a_scrape_after_the_last_frame_finds_every_frame(bench: Bench) -> None:
    """Even if the block was written just before the last token, and no write is due."""
    found: list[tuple[list[int], list[int]]] = []

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        headers = [(b"content-type", EVENTS)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": TOKEN, "more_body": True})
        while bench.app._dispatcher._publishes:  # noqa: ASYNC110 - a write has no event
            await asyncio.sleep(0)
        assert bench.counts() == ([0, 1, 0], [0, 0, 0])
        await send({"type": "http.response.body", "body": TOKEN, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        found.append(bench.counts())

    bench.app._app = app
    await bench.call().answer()
    assert found == [([0, 1, 0], [0, 1, 0])]


def values(edges: Sequence[float]) -> Iterator[tuple[float, int]]:
    """Times and the bucket where each belongs: at an edge, just above it, below all, above all."""
    yield 0.0, 0
    for place, edge in enumerate(edges):
        yield edge, place
        yield edge * 1.0001, place + 1
    yield 1e6, len(edges)


@pytest.mark.parametrize("kind", ["time_to_first_token", "inter_token_latency"])
def test_every_time_is_in_the_bucket_of_its_edge(kind: str) -> None:
    """An edge belongs to its own bucket, as Prometheus' `le` says."""
    edges = {
        "time_to_first_token": TIME_TO_FIRST_TOKEN_EDGES_S,
        "inter_token_latency": INTER_TOKEN_LATENCY_EDGES_S,
    }[kind]
    for seconds, place in values(edges):
        cells = Cells(MIDDLEWARE)
        record = LatencyRecord(cells)
        add: Callable[[Tier, float], None] = (
            record.add_first if kind == "time_to_first_token" else record.add_gap
        )
        add(Tier.BATCH, seconds)
        block = MIDDLEWARE.unpack(bytes(cells.buffer))
        buckets = getattr(block, f"{kind}_of")(Tier.BATCH)
        assert [index for index, count in enumerate(buckets) if count] == [place], seconds
        assert getattr(block, f"{kind}_sum")[Tier.BATCH] == seconds


def test_a_frame_costs_microseconds() -> None:
    """Less than 10 us where this was written, about 1 us alone; in units, so that a slow machine passes."""
    stream = stream_of(CHAT)
    assert stream is not None
    timer = StreamTimer(
        LatencyRecord(Cells(MIDDLEWARE)), Tier.STANDARD, 0.0, stream, time.monotonic, gaps=True
    )

    def frames() -> None:
        for _ in range(2000):
            timer.frame(TOKEN)

    units = units_of(frames, 40)
    print(f"{units:.2f} units for 2,000 frames")
    assert units < 40

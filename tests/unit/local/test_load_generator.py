"""The load generator measures from the intended time, tries patiently, and tells causes apart."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_local.load.client import CompletionClient, Outcome, Patience, parse_retry_after
from fleetkeeper_local.load.closed_loop import closed_loop, run_closed_loop
from fleetkeeper_local.load.open_loop import Sample, run_open_loop
from fleetkeeper_local.load.schedule import Arrival, Phase, Shape, plan_arrivals
from fleetkeeper_local.load.summary import quantile, summarise
from tests.support.guards import GUARD_S

pytestmark = pytest.mark.exhaustive

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Start = Callable[[Handler], Awaitable[str]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Serves a handler at /v1/completions on loopback and gives the base address."""
    servers: list[TestServer] = []

    async def begin(handler: Handler) -> str:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        server = TestServer(app)
        await server.start_server()
        servers.append(server)
        return str(server.make_url("/v1"))

    yield begin
    for server in servers:
        await server.close()


def answer_to(arrival: Arrival) -> Outcome:
    """A whole answer at once."""
    return Outcome(True, "", 200, 1, 0.0, None, 0.0, arrival.output_tokens)


async def stream(request: web.Request, *, finish: bool = True) -> web.StreamResponse:
    """Answers as vLLM does: a chunk, the usage, the closing frame."""
    asked = await request.json()
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    chunk = {"choices": [{"text": "a"}]}
    usage = {"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}}
    frames = [json.dumps(chunk), json.dumps(usage)] + (["[DONE]"] if finish else [])
    for frame in frames:
        await answer.write(f"data: {frame}\n\n".encode())
    return answer


async def test_an_answer_is_counted_with_its_tokens_and_headers(start: Start) -> None:
    """Tier and session travel as headers; tokens come from the usage frame."""
    seen: dict[str, str] = {}

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.update(request.headers)
        return await stream(request)

    async with CompletionClient(await start(handler), "m") as client:
        outcome = await client.complete("hello", 7, tier="realtime", session="s1")
    assert outcome.ok
    assert (outcome.tokens, outcome.attempts, outcome.cause) == (7, 1, "")
    assert outcome.first_token_s is not None
    assert outcome.started_s <= outcome.first_token_s <= outcome.ended_s
    assert seen["X-Inference-Tier"] == "realtime"
    assert seen["X-Session-ID"] == "s1"


async def test_retry_after_is_honoured_and_the_request_succeeds_in_the_end(start: Start) -> None:
    """Two refusals with Retry-After 3: two waits of at least 3 s, then the answer."""
    refusals = iter([429, 503])
    waits: list[float] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        status = next(refusals, None)
        if status is not None:
            return web.Response(status=status, headers={"Retry-After": "3"})
        return await stream(request)

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async with CompletionClient(await start(handler), "m", sleep=sleep) as client:
        outcome = await client.complete("x", 1)
    assert outcome.ok
    assert outcome.attempts == 3
    assert len(waits) == 2
    assert min(waits) >= 3


async def test_a_bad_request_is_not_sent_twice(start: Start) -> None:
    """A 400 will be a 400 again."""
    calls = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        return web.Response(status=400, text="no such tier")

    async with CompletionClient(await start(handler), "m") as client:
        outcome = await client.complete("x", 1)
    assert (outcome.ok, outcome.cause, outcome.detail) == (False, "http_400", "no such tier")
    assert calls == 1


async def test_a_stream_without_its_closing_frame_is_a_failure(start: Start) -> None:
    """Half an answer is told apart from a whole one, and is not tried again."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, finish=False)

    async with CompletionClient(await start(handler), "m") as client:
        outcome = await client.complete("x", 1)
    assert (outcome.ok, outcome.cause, outcome.attempts) == (False, "truncated", 1)


async def test_nobody_listening_is_a_connection_failure_after_all_attempts(start: Start) -> None:
    """Unreachable is retried, then told as what it is."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    patience = Patience(attempts=3)
    async with CompletionClient(
        "http://127.0.0.1:9/v1", "m", patience=patience, sleep=sleep
    ) as client:
        outcome = await client.complete("x", 1)
    assert (outcome.cause, outcome.attempts, len(waits)) == ("connection", 3, 2)


async def test_no_attempt_begins_after_the_deadline(start: Start) -> None:
    """A client that was told to come back too late gives up at once, and was not failed by a wait."""
    waits: list[float] = []

    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": "4"})

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    patience = Patience(attempts=50, deadline_s=3.0)
    async with CompletionClient(await start(refuse), "m", patience=patience, sleep=sleep) as client:
        outcome = await client.complete("x", 1)
    assert (outcome.cause, outcome.attempts, waits) == ("http_429", 1, [])


async def test_a_server_that_broke_before_a_token_is_asked_again(start: Start) -> None:
    """A proxy answers 500 when the engine behind it dies: another one can still answer."""
    calls = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        return web.Response(status=500) if calls == 1 else await stream(request)

    patience = Patience(base_wait_s=0.0)
    async with CompletionClient(await start(handler), "m", patience=patience) as client:
        outcome = await client.complete("x", 1)
    assert (outcome.ok, outcome.attempts) == (True, 2)


async def test_a_whole_answer_is_counted_too(start: Start) -> None:
    """Without a stream there is no first token to time, but the tokens are known."""

    async def handler(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["stream"] is False
        return web.json_response({"usage": {"completion_tokens": 7}})

    async with CompletionClient(await start(handler), "m") as client:
        outcome = await client.complete("x", 7, stream=False)
    assert (outcome.ok, outcome.tokens, outcome.first_token_s) == (True, 7, None)


async def test_latency_counts_from_the_intended_moment(start: Start) -> None:
    """One slot, three requests at once: the third's latency holds its wait for the others."""
    gate = asyncio.Semaphore(1)

    async def handler(request: web.Request) -> web.StreamResponse:
        async with gate:
            await asyncio.sleep(0.05)
            return await stream(request)

    arrivals = [Arrival(n, 0.0, "p", "standard", "s", 4, 4) for n in range(3)]
    async with CompletionClient(await start(handler), "m", connections=1) as client:
        samples = await run_open_loop(client.send, arrivals)
    latencies = sorted(sample.latency_s for sample in samples)
    assert latencies[2] >= 0.15
    assert latencies[2] - latencies[0] >= 0.1, "two others were served in between"


async def test_a_stop_ends_sending_and_keeps_what_is_under_way() -> None:
    """The second request is an hour away."""
    stop, sent = asyncio.Event(), asyncio.Event()

    async def send(arrival: Arrival) -> Outcome:
        await stop.wait()
        return answer_to(arrival)

    arrivals = [Arrival(n, 3600.0 * n, "p", "standard", "s", 4, 4) for n in range(2)]
    async with asyncio.timeout(GUARD_S):
        running = asyncio.create_task(run_open_loop(send, arrivals, on_send=sent.set, stop=stop))
        await sent.wait()
        stop.set()
        samples = await running
    assert [one.arrival.number for one in samples] == [0]


async def test_a_closed_loop_keeps_as_many_under_way_as_it_has_clients() -> None:
    """Each of five requests begins when a client of two is free, in their order."""
    under_way, most, order = 0, 0, []

    async def send(arrival: Arrival) -> Outcome:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        order.append(arrival.number)
        await asyncio.sleep(0)
        under_way -= 1
        return answer_to(arrival)

    answers: list[Outcome] = []
    arrivals = [Arrival(n, 0.0, "p", "standard", "s", 4, n) for n in range(5)]
    async with asyncio.timeout(GUARD_S):
        await run_closed_loop(send, arrivals, 2, on_answer=answers.append)
    assert (order, most) == ([0, 1, 2, 3, 4], 2)
    assert [answer.tokens for answer in answers] == [0, 1, 2, 3, 4]


async def test_an_error_in_a_closed_loop_is_raised_when_its_block_is_left() -> None:
    began = asyncio.Event()

    async def send(arrival: Arrival) -> Outcome:
        began.set()
        raise ZeroDivisionError(arrival.number)

    arrivals = itertools.cycle([Arrival(0, 0.0, "p", "standard", "s", 4, 4)])
    with pytest.raises(ExceptionGroup):
        async with closed_loop(send, arrivals, 2, on_answer=lambda _: None):
            await began.wait()


async def test_a_request_without_a_tier_has_no_header(start: Start) -> None:
    """The engine then takes it for standard."""
    seen: list[str | None] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("X-Inference-Tier"))
        return await stream(request)

    async with CompletionClient(await start(handler), "m") as client:
        for tier in ("", "batch"):
            assert (await client.send(Arrival(0, 0.0, "p", tier, "s", 4, 4))).ok
    assert seen == [None, "batch"]


def test_the_time_per_token_begins_with_the_first_one() -> None:
    """A second for ten tokens after the first; none without a second token, or without its time."""
    assert Outcome(True, "", 200, 1, 0.0, 5.0, 6.0, 11).time_per_token_s == pytest.approx(0.1)
    assert Outcome(True, "", 200, 1, 0.0, 5.0, 6.0, 1).time_per_token_s is None
    assert Outcome(True, "", 200, 1, 0.0, None, 6.0, 11).time_per_token_s is None


def sample(tier: str, cause: str, latency_s: float) -> Sample:
    """A finished request."""
    outcome = Outcome(not cause, cause, 0, 1, 0.0, 0.1, latency_s, 5 if not cause else 0)
    return Sample(Arrival(0, 1.0, "p", tier, "s", 1, 5), outcome, 1.0, 1.0, 1.0 + latency_s)


def test_a_summary_tells_shed_from_failed() -> None:
    """429 after all retries is shed; everything else that did not succeed is a failure."""
    rows = summarise(
        [
            sample("realtime", "", 0.2),
            sample("realtime", "", 0.4),
            sample("batch", "http_429", 1.0),
            sample("batch", "truncated", 1.0),
        ]
    )
    by_name = {row.name: row for row in rows}
    assert by_name["realtime"].failures == 0
    assert by_name["realtime"].p95_s == pytest.approx(0.4)
    assert by_name["batch"].shed == 1
    assert by_name["batch"].failed == {"truncated": 1}
    assert by_name["all"].requests == 4
    assert by_name["all"].tokens == 10


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    """Runs can be repeated."""
    phases = [Phase("a", 30, 5), Phase("b", 30, 20)]
    assert plan_arrivals(phases, Shape(), 1) == plan_arrivals(phases, Shape(), 1)
    assert plan_arrivals(phases, Shape(), 1) != plan_arrivals(phases, Shape(), 2)


@pytest.mark.slow
@given(rate=st.floats(0.5, 50), factor=st.floats(2, 5), seed=st.integers(0, 2**16))
def test_arrivals_follow_their_phases(rate: float, factor: float, seed: int) -> None:
    """Times rise, stay in their phase, and a phase's count lies near rate x seconds."""
    phases = [Phase("low", 60, rate), Phase("none", 10, 0), Phase("high", 60, rate * factor)]
    arrivals = plan_arrivals(phases, Shape(), seed)
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    bounds = {"low": (0, 60), "high": (70, 130)}
    for arrival in arrivals:
        low, high = bounds[arrival.phase]
        assert low <= arrival.at_s < high
    for phase in (phases[0], phases[2]):
        expected = phase.rate_per_s * 60
        count = sum(1 for arrival in arrivals if arrival.phase == phase.name)
        # Six standard deviations of a Poisson count: a false alarm in 10^8.
        assert abs(count - expected) <= 6 * expected**0.5 + 3


@pytest.mark.parametrize(
    ("phases", "shape", "said"),
    [
        ([Phase("x", 0, 1)], Shape(), "seconds must be above 0"),
        ([Phase("x", 1, -1)], Shape(), "rate at least 0"),
        ([Phase("x", 1, 1)], Shape(tiers={"standard": 0}), "no tier has a weight"),
    ],
)
def test_impossible_plans_are_refused(phases: list[Phase], shape: Shape, said: str) -> None:
    """The message says what to give instead."""
    with pytest.raises(ValueError, match=said):
        plan_arrivals(phases, shape, 0)


@given(attempt=st.integers(0, 40), asked=st.one_of(st.none(), st.floats(0, 1e6)))
def test_waits_are_bounded_and_never_shorter_than_asked_for(
    attempt: int, asked: float | None
) -> None:
    """Full jitter under a ceiling; Retry-After is a floor up to that, with a quarter of jitter."""
    patience = Patience()
    wait_s = patience.wait_s(attempt, asked, random.Random(attempt))
    assert 0 <= wait_s <= 1.25 * patience.max_wait_s
    if asked is not None:
        assert wait_s >= min(asked, patience.max_wait_s)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("2", 2.0), ("0.5", 0.5), ("-1", None), ("inf", None), ("soon", None)],
)
def test_only_sensible_retry_after_values_count(value: str | None, seconds: float | None) -> None:
    """A hostile or textual header is no wait."""
    assert parse_retry_after(value) == seconds


def test_prompts_have_the_planned_length_and_differ() -> None:
    """No prefix cache can answer for the engine."""
    first, second = (Arrival(n, 0, "p", "batch", "s", 40, 1) for n in (1, 2))
    assert len(first.prompt) == 40
    assert first.prompt[:16] != second.prompt[:16]


def test_the_quantile_of_nothing_is_nothing() -> None:
    """None, not 0: nothing was measured."""
    assert quantile([], 0.5) is None

"""Tiers on a real vLLM: realtime hardly waits, batch keeps its floor, nobody waits for ever."""

from __future__ import annotations

import asyncio
import json
import random
import time
from bisect import bisect_left
from collections import Counter
from itertools import accumulate

import aiohttp
import pytest

from fleetkeeper_engine.histogram import QUEUE_WAIT_EDGES_S
from fleetkeeper_engine.page_layout import Outcome, SchedulerBlock, Tier
from fleetkeeper_engine.scheduler_limits import RESERVE_KEPT_S
from inside_engine import Answer, InsideEngine, client, shared_engine

SEQUENCES = 8
MANY = 32
PATIENCE = 5
"""Machines under test are shared: what is promised holds here within this factor."""

pytestmark = pytest.mark.timeout(900)
"""The first test waits for the shared engine to start."""


@pytest.fixture
async def engine(request: pytest.FixtureRequest) -> InsideEngine:
    found = shared_engine(request.config)
    await found.until_idle()
    found.order(sequences=SEQUENCES)
    return found


def quantile_s(before: SchedulerBlock, after: SchedulerBlock, tier: Tier, share: float) -> float:
    """The upper edge of the bucket in which that share of the queue waits between two readings lies."""
    counts = [
        now - was
        for was, now in zip(before.queue_wait_of(tier), after.queue_wait_of(tier), strict=True)
    ]
    total = list(accumulate(counts))
    assert total[-1] > 0
    return (*QUEUE_WAIT_EDGES_S, float("inf"))[bisect_left(total, share * total[-1])]


def outcome(engine: InsideEngine, tier: Tier, wanted: Outcome) -> int:
    """How many requests of a tier came to an outcome so far."""
    return engine.middleware().outcomes[tier * len(Outcome) + wanted]


async def offer(
    engine: InsideEngine, session: aiohttp.ClientSession, rates: dict[Tier, float], seconds: float
) -> dict[Tier, list[Answer]]:
    """Requests of 8 to 24 tokens at fixed rates a second, whatever the answers; all answers by tier.

    Lengths differ as clients' do: equal ones would start and end together for ever, so that places
    come free only once a request's time.
    """
    dice = random.Random(11)
    tasks: dict[Tier, list[asyncio.Task[Answer]]] = {tier: [] for tier in rates}

    async def ask(tier: Tier, tokens: int) -> Answer:
        answer = await engine.stream(session, tokens, tier=tier.label)
        assert answer.tokens == (tokens if answer.status == 200 else 0)
        return answer

    async def send(tier: Tier, rate: float) -> None:
        started = time.monotonic()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, started + number / rate - time.monotonic()))
            tasks[tier].append(asyncio.create_task(ask(tier, dice.randint(8, 24))))

    await asyncio.gather(*(send(tier, rate) for tier, rate in rates.items()))
    return {tier: list(await asyncio.gather(*sent)) for tier, sent in tasks.items()}


async def capacity(engine: InsideEngine, session: aiohttp.ClientSession) -> float:
    """Requests of 16 tokens a second when there is always one waiting."""
    sent = 4 * MANY
    started = time.monotonic()
    await asyncio.gather(*(engine.stream(session, 16) for _ in range(sent)))
    return sent / (time.monotonic() - started)


async def test_batch_alone_gets_everything(engine: InsideEngine) -> None:
    """Neither share nor floor nor an idle reserve keeps a slot from it."""
    async with client() as session:
        tasks = [asyncio.create_task(engine.stream(session, 48, tier="batch")) for _ in range(24)]
        await engine.until(
            lambda: engine.scheduler().running[Tier.BATCH] == SEQUENCES, RESERVE_KEPT_S + 30
        )
        answers = await asyncio.gather(*tasks)
    assert {answer.tokens for answer in answers} == {48}


async def test_at_twice_the_capacity_realtime_hardly_waits_and_batch_keeps_its_floor(
    engine: InsideEngine,
) -> None:
    """Realtime's p95 queue wait is at most 2 mean batch times + 10 ms; batch gets 5% or more."""
    engine.order(sequences=MANY)
    async with client() as session:
        rate = await capacity(engine, session)
        await engine.until_idle()
        before = engine.scheduler()
        answers = await offer(
            engine,
            session,
            {Tier.REALTIME: 0.2 * rate, Tier.STANDARD: 1.0 * rate, Tier.BATCH: 0.8 * rate},
            min(40.0, 100 / (0.2 * rate)),
        )
        after = engine.scheduler()
    step_s = (after.batch_time_sum - before.batch_time_sum) / (
        after.worked_steps - before.worked_steps
    )
    p95 = quantile_s(before, after, Tier.REALTIME, 0.95)
    statuses = {tier: Counter(a.status for a in found) for tier, found in answers.items()}
    print(f"rate {rate:.1f}/s, step {step_s:.4f} s, realtime p95 {p95:.4f} s, {statuses}")
    assert p95 <= PATIENCE * (2 * step_s + 0.010)
    assert statuses[Tier.REALTIME].keys() == {200}
    assert quantile_s(before, after, Tier.STANDARD, 0.95) > p95
    done = sum(found[200] for found in statuses.values())
    assert statuses[Tier.BATCH][200] >= 0.05 * done
    assert statuses[Tier.STANDARD][200] >= 0.3 * done


async def test_a_flood_of_realtime_starves_nobody(engine: InsideEngine) -> None:
    """Realtime always waits; one standard and one batch request still end (ageing time 3 s)."""
    over = False

    async def flood(session: aiohttp.ClientSession) -> None:
        while not over:
            await engine.stream(session, 16, tier="realtime")

    async with client() as session:
        floods = [asyncio.create_task(flood(session)) for _ in range(3 * SEQUENCES)]
        await engine.until(lambda: engine.middleware().waiting[Tier.REALTIME] >= SEQUENCES)
        answers = await asyncio.wait_for(
            asyncio.gather(*(engine.stream(session, 4, tier=t) for t in ("standard", "batch"))),
            engine.settings.batch_ageing_s + 60,
        )
        assert engine.middleware().waiting[Tier.REALTIME] > 0
        over = True
        await asyncio.gather(*floods)
    assert [answer.tokens for answer in answers] == [4, 4]


async def test_a_full_queue_answers_429_at_once_and_says_when_to_come_back(
    engine: InsideEngine,
) -> None:
    """An OpenAI-style body that names tier and limit; another tier is not concerned."""
    limit = engine.settings.standard_queue_limit
    engine.order(sequences=1)
    full = outcome(engine, Tier.STANDARD, Outcome.QUEUE_FULL)
    async with client() as session:
        tasks = [asyncio.create_task(engine.stream(session, 4)) for _ in range(limit + 3)]
        await engine.until(lambda: engine.middleware().waiting[Tier.STANDARD] >= limit - 1)
        engine.order(sequences=1, cap_exceeded=True)
        while engine.middleware().waiting[Tier.STANDARD] < limit:
            tasks.append(asyncio.create_task(engine.stream(session, 4)))
            await asyncio.sleep(0.02)
        times = []
        for _ in range(20):
            started = time.perf_counter()
            answer = await engine.stream(session, 4)
            times.append(time.perf_counter() - started)
            assert answer.status == 429
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
            error = json.loads(answer.body)["error"]
            assert (error["code"], error["tier"], error["limit"]) == (
                "queue_full",
                "standard",
                limit,
            )
        assert sorted(times)[10] <= PATIENCE * 0.005
        assert outcome(engine, Tier.STANDARD, Outcome.QUEUE_FULL) >= full + 20
        other = asyncio.create_task(engine.stream(session, 4, tier="realtime"))
        await engine.until(lambda: engine.middleware().waiting[Tier.REALTIME] == 1)
        engine.free_all()
        statuses = Counter(answer.status for answer in await asyncio.gather(*tasks, other))
    assert statuses[200] >= limit


async def test_a_closed_tier_and_a_drain_are_told_apart(engine: InsideEngine) -> None:
    """Closed: 429 `tier_closed`, so that the router does not eject the pod. Draining: 503, so that it does."""
    async with client() as session:
        engine.order(closed=(False, False, True))
        closed = await engine.stream(session, 4, tier="batch")
        assert (closed.status, json.loads(closed.body)["error"]["code"]) == (429, "tier_closed")
        assert (await engine.stream(session, 4)).status == 200
        engine.order(draining=True)
        draining = await engine.stream(session, 4)
        assert (draining.status, json.loads(draining.body)["error"]["code"]) == (503, "draining")
        assert draining.headers["Connection"].lower() == "close"
        engine.free_all()


async def test_a_drain_ends_whole_and_late_streams_end_at_a_frame(engine: InsideEngine) -> None:
    """What ends before the deadline of a drain ends whole; at it streams are cut and the queue gets 503.

    Four places: two short and two long run. Of six that come later four are inside vLLM when the
    short ones have ended; the last two never leave the queue. Two of the four look ahead: vLLM may
    have sent nothing for them yet, then they too get a clean 503.
    """
    engine.order(sequences=4)
    arrived = engine.middleware().arrivals[Tier.STANDARD]
    async with client() as session:
        long = [asyncio.create_task(engine.stream(session, 1800)) for _ in range(2)]
        short = [asyncio.create_task(engine.stream(session, 60)) for _ in range(2)]
        await engine.until(lambda: sum(engine.middleware().released) == 4)
        late = [asyncio.create_task(engine.stream(session, 1800)) for _ in range(6)]
        await engine.until(lambda: engine.middleware().arrivals[Tier.STANDARD] - arrived == 10)
        engine.order(sequences=4, draining=True, drain_deadline=time.monotonic() + 3600)
        assert {answer.tokens for answer in await asyncio.gather(*short)} == {60}
        await engine.until(lambda: sum(engine.middleware().released) == 6)
        assert not any(task.done() for task in (*long, *late))
        engine.order(sequences=4, draining=True, drain_deadline=time.monotonic())
        cut = await asyncio.gather(*long)
        left = await asyncio.gather(*late)
        await engine.until_idle()
        engine.free_all()
    assert [(answer.status, answer.tokens) for answer in cut] == [(200, 0)] * 2
    statuses = Counter(answer.status for answer in left)
    assert statuses.keys() <= {200, 503}
    assert 2 <= statuses[503] <= 4
    assert {answer.tokens for answer in left} == {0}


async def test_unknown_tiers_and_paths_are_refused(engine: InsideEngine) -> None:
    """400 for a tier that is none; 404 for every path that is not on the list."""
    async with client() as session:
        wrong = await engine.stream(session, 4, tier="gold")
        assert (wrong.status, json.loads(wrong.body)["error"]["code"]) == (400, "unknown_tier")
        found = {}
        for path in ("/v1/models", "/version", "/health", "/metrics", "/docs", "/load", "/v1/nope"):
            async with session.get(engine.url + path) as answer:
                found[path] = answer.status
    refused = {path for path, status in found.items() if status == 404}
    assert refused == {"/docs", "/load", "/v1/nope"}
    assert {found[path] for path in found.keys() - refused} == {200}


async def test_a_client_that_hangs_up_is_dropped_from_queue_and_engine(
    engine: InsideEngine,
) -> None:
    """Its place and its sequences are free again at once."""
    engine.order(sequences=1)
    cancelled = outcome(engine, Tier.STANDARD, Outcome.CANCELLED)
    async with client() as session:
        running = [asyncio.create_task(engine.stream(session, 1800)) for _ in range(3)]
        await engine.until(lambda: engine.middleware().released[Tier.STANDARD] == 3)
        await engine.until(lambda: sum(engine.scheduler().running) == 1)
        waiting = asyncio.create_task(engine.stream(session, 4))
        await engine.until(lambda: engine.middleware().waiting[Tier.STANDARD] == 1)
        waiting.cancel()
        took = await engine.until(lambda: engine.middleware().waiting[Tier.STANDARD] == 0)
        assert took < PATIENCE * 0.5
        assert outcome(engine, Tier.STANDARD, Outcome.CANCELLED) == cancelled + 1
        for task in running:
            task.cancel()
        await engine.until(lambda: engine.middleware().released[Tier.STANDARD] == 0)
        await engine.until(lambda: sum(engine.scheduler().running) == 0)
        assert engine.scheduler().kv_resident_tokens < 2048
        assert (await engine.stream(session, 4)).tokens == 4


async def test_arrivals_are_counted_once_and_waits_where_they_end(engine: InsideEngine) -> None:
    """A retry by the same X-Request-Id is no new arrival; several sequences are one request."""
    before, steps = engine.middleware(), engine.scheduler()
    request = {"model": "tiny", "prompt": ["one", "two"], "n": 2, "max_tokens": 2}
    async with client() as session:
        for name in ("a", "a", "b"):
            headers = {
                "X-Request-Id": f"{name}-{time.monotonic_ns() if name == 'b' else id(engine)}"
            }
            url = f"{engine.url}/v1/completions"
            async with session.post(url, json=request, headers=headers) as answer:
                assert answer.status == 200
                assert len((await answer.json())["choices"]) == 4
    after = engine.middleware()
    assert after.arrivals[Tier.STANDARD] - before.arrivals[Tier.STANDARD] == 2
    waits = sum(engine.scheduler().queue_wait_of(Tier.STANDARD)) - sum(
        steps.queue_wait_of(Tier.STANDARD)
    )
    assert waits == 3

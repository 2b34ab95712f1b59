"""No engine, pod or namespace keeps the usage of another from being read."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fleetkeeper_gateway.usage import bounds, collector, metrics
from fleetkeeper_gateway.usage.lane import Lane
from fleetkeeper_gateway.usage.lines import Pod
from fleetkeeper_gateway.usage.store import RAW_HOURS
from tests.support.gateway.usage_bench import Bench, never, until
from tests.support.gateway.usage_ledgers import NOW, Ledger, an_entry, opened

HOUR = 3600.0


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    found = Bench(tmp_path)
    yield found
    found.store.close()


async def reads_on(bench: Bench, engine: Any, times: int = 10) -> None:
    """Wait until an engine was read some times, each time after it counted a request."""
    for _ in range(times):
        engine.work(1)
        await until(lambda: bench.read_up_to(engine.uid) == len(engine.written))


# -- slow engines ---------------------------------------------------------------------------------


@pytest.mark.promise("usage-checked")
async def test_an_engine_is_read_while_others_never_answer(bench: Bench) -> None:
    """More of them than may be asked at once, and none was given up meanwhile."""
    asked: Counter[str] = Counter()

    async def silent(request: web.Request) -> web.StreamResponse:
        asked["silent"] += 1
        return await never(request)

    pods = [f"bad-{number}" for number in range(40)]
    async with (
        bench.answering(*pods, by=silent, namespace="tarpit"),
        bench.engine("good") as good,
        bench.running() as reader,
    ):
        await until(lambda: asked["silent"] == collector.DOUBTED_TURNS // 2)
        await reads_on(bench, good)
        assert not reader._problems


@pytest.mark.promise("usage-checked")
async def test_engines_that_stop_to_answer_delay_others_once(bench: Bench) -> None:
    """They had answered, so they share the lane of those that answer until they are given up."""
    asked: Counter[str] = Counter()

    async def once(request: web.Request) -> web.StreamResponse:
        asked[request.headers["Authorization"]] += 1
        asked["silent"] += asked.total() > pods
        if asked["silent"]:
            return await never(request)
        return web.json_response(Ledger("bad").document("", 0))

    pods = 40
    async with AsyncExitStack() as stack:
        names = [f"bad-{number}" for number in range(pods)]
        await stack.enter_async_context(bench.answering(*names, by=once, namespace="tarpit"))
        good = await stack.enter_async_context(bench.engine("good"))
        reader = await stack.enter_async_context(bench.running())
        await until(lambda: asked["silent"] >= collector.TRUSTED_TURNS // 2)
        await reads_on(bench, good)
        left = [name for name in names if name not in reader._problems]
        assert left, "the good engine waited for all of the bad ones"


async def test_namespaces_take_turns() -> None:
    """A namespace that waits for one turn passes one that waits for many."""
    lane, order = Lane(1), []

    async def hold(namespace: str) -> None:
        async with lane.turn(namespace):
            order.append(namespace)

    async with lane.turn("first"):
        tasks = [asyncio.create_task(hold(name)) for name in ["a", "a", "a", "b", "c", "b"]]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c", "a", "b", "a"]


async def test_a_namespace_holds_as_many_turns_as_it_leaves_free() -> None:
    """So there is always one for another. What was held back is used once there is room."""
    lane, held = Lane(8), Counter[str]()
    ends = asyncio.Event()

    async def hold(namespace: str) -> None:
        async with lane.turn(namespace):
            held[namespace] += 1
            await ends.wait()

    tasks = [asyncio.create_task(hold(name)) for name in ["a"] * 9 + ["b"] * 9 + ["c"] * 9]
    await asyncio.sleep(0)
    assert held == {"a": 4, "b": 2, "c": 1}
    ends.set()
    await asyncio.gather(*tasks)
    assert held == {"a": 9, "b": 9, "c": 9}


@pytest.mark.parametrize("passed", [False, True])
async def test_a_turn_of_a_reading_that_is_cancelled_goes_to_the_next(*, passed: bool) -> None:
    """Also if it was passed on to it in the same moment."""
    lane = Lane(1)
    held = lane.turn("a")
    await held.__aenter__()
    waits = asyncio.create_task(lane.turn("b").__aenter__())
    await asyncio.sleep(0)
    if passed:
        await held.__aexit__(None, None, None)
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    if not passed:
        await held.__aexit__(None, None, None)
    async with asyncio.timeout(60), lane.turn("c"):
        pass


# -- exceptions -----------------------------------------------------------------------------------


def _store_fails(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    append = bench.store.append

    def failing(page: Any, pod: Pod, now: float) -> Any:
        if pod.uid == "bad":
            raise ValueError("a defect")
        return append(page, pod, now)

    patch.setattr(bench.store, "append", failing)


def _signer_fails(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    sign = bench.signer.sign

    def failing(uid: str) -> str:
        if uid == "bad":
            raise ValueError("a defect")
        return sign(uid)

    patch.setattr(bench.signer, "sign", failing)


def _checker_fails(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    is_ours = bench.checker.is_ours

    def failing(attempt: str, service: str, request: str, *more: str) -> bool:
        if request.startswith("r-bad"):
            raise ValueError("a defect")
        return is_ours(attempt, service, request, *more)

    patch.setattr(bench.checker, "is_ours", failing)


@pytest.mark.promise("usage-checked")
@pytest.mark.parametrize("break_it", [_store_fails, _signer_fails, _checker_fails])
async def test_a_defect_that_one_engine_meets_ends_no_other_reading(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[Bench, pytest.MonkeyPatch], None],
) -> None:
    """It is counted for the engine's service, and the engine is read again later."""
    failed = metrics.FAILED_READINGS.labels("tenant/chat")._value
    async with bench.engine("bad", "tenant") as bad, bench.engine("good") as good:
        bad.work(1)
        with monkeypatch.context() as patch:
            break_it(bench, patch)
            async with bench.running():
                before = failed.get()
                await until(lambda: failed.get() >= before + 3)
                await reads_on(bench, good, 3)
        assert bench.read_up_to("bad") == 0
        async with bench.running():
            await until(lambda: bench.read_up_to("bad") == 1)


async def test_limits_that_fail_for_one_key_settle_the_others(bench: Bench) -> None:
    before = metrics.SETTLE_FAILURES._value.get()
    async with bench.engine("one") as one, bench.running():
        bench.limiter.fails = lambda key: key == "key-1"
        one.work(2)
        one.work(2, key="key-2")
        await until(lambda: len(bench.limiter.calls) == 2)
    assert {key for key, *_ in bench.limiter.calls} == {"key-2"}
    assert metrics.SETTLE_FAILURES._value.get() == before + 2


def test_a_file_that_cannot_be_summed_keeps_no_other_from_it(tmp_path: Path) -> None:
    ledger, store = Ledger("pod-1"), opened(tmp_path, retention_days=1)
    for number in range(30):
        ledger.add(an_entry(f"a-{number}", NOW + number * HOUR, 1))
        ledger.read_into(store, NOW + number * HOUR)
    files = sorted(tmp_path.iterdir())
    broken = files[10].read_text().replace('"prompt":1', '"prompt":-1')
    files[10].write_text(broken)
    with pytest.raises(ValueError, match="not a line of usage"):
        store.tidy(NOW + 29 * HOUR)
    assert not files[0].exists()
    raw = [file for file in files if file.exists() and '"attempt"' in file.read_text()]
    assert raw == [files[10], *files[-RAW_HOURS:]]


# -- periods, health and series --------------------------------------------------------------------


async def test_a_namespace_without_lines_is_read_less_often(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_OTHERS", 10)
    async with (
        bench.engine("bad", "tenant") as bad,
        bench.engine("good") as good,
        bench.running() as reader,
    ):
        while not bench.store.is_used_up("tenant"):
            bad.work(1, granted=False)
            await until(lambda: bench.read_up_to("bad") == len(bad.written))
        await reads_on(bench, good, 3)
        assert reader._pause_s(reader._pods["bad"]) == collector.SPARING_PERIOD_S
        assert reader._pause_s(reader._pods["good"]) < 1


class Clock:
    """A clock that a test turns."""

    now = 1_000.0

    def __call__(self) -> float:
        return self.now


async def test_health_is_that_of_the_engines_that_answer(bench: Bench) -> None:
    """Engines that never answer say nothing about the process; one that was forgotten does."""
    clock = Clock()
    async with (
        bench.answering("bad", by=never, namespace="tarpit"),
        bench.engine("good") as good,
        bench.running() as reader,
    ):
        reader._monotonic = clock
        assert math.isnan(reader.read_age_s())
        await reads_on(bench, good, 2)
        clock.now += 100.0
        assert reader.read_age_s() in {0.0, 100.0}
        await reads_on(bench, good, 2)
        assert reader.read_age_s() == 0.0
        reader._pods["good"].asked -= 50.0
        assert reader.read_age_s() == 50.0


def test_series_of_a_service_go_an_hour_after_its_last_pod(bench: Bench) -> None:
    clock = Clock()
    reader = bench.new_collector()
    reader._monotonic = clock
    for name in ("gone/chat", "kept/chat"):
        metrics.FAILED_READINGS.labels(name).inc()
        metrics.LOST_ENTRIES.labels(name).inc()
        reader._services[name] = clock.now
    bench.add("one", "http://127.0.0.1:1", "kept")
    reader.follow(bench.targets[0])
    clock.now += collector.SERIES_S + 1
    reader._forget_services()
    for counter in (metrics.FAILED_READINGS, metrics.LOST_ENTRIES):
        services = {sample.labels["service"] for one in counter.collect() for sample in one.samples}
        assert "gone/chat" not in services
        assert "kept/chat" in services

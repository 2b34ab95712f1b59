"""A hang is noticed although vLLM's /health says 200, and a slow step is not taken for one."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from supervised_engine import GIB, RunningEngine, StartEngine

pytestmark = pytest.mark.timeout(1200)
STALL_S = 25


@pytest.fixture(scope="module")
def engine_to_stop(_starter: StartEngine) -> RunningEngine:
    """An engine that counts as hung after 25 s."""
    found = _starter(
        sections={"health": {"stallSeconds": STALL_S}, "memory": {"limitBytes": 4 * GIB}}
    )
    found.wait_ready()
    return found


@contextmanager
def stopped(engine: RunningEngine, title: str) -> Iterator[float]:
    """SIGSTOP to a process of vLLM; SIGCONT afterwards when it is still there."""
    process = engine.vllm_process(title)
    process.send_signal(signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        if process.is_running():
            process.send_signal(signal.SIGCONT)


def streams(engine: RunningEngine, pool: ThreadPoolExecutor, tokens: int) -> list[Future[int]]:
    """Eight requests, all running."""
    found = [pool.submit(lambda: engine.complete(tokens).status_code) for _ in range(8)]
    engine.wait_for(
        lambda: engine.metrics()['fleetkeeper_running{tier="standard"}'] == 8, "load", 30
    )
    return found


def test_an_idle_core_that_hangs_is_noticed_with_its_first_request_and_recovers(
    engine_to_stop: RunningEngine,
) -> None:
    """Stopped while idle it is no failure; one request later the pod is not ready within 15 s."""
    engine = engine_to_stop
    with ThreadPoolExecutor(1) as pool, stopped(engine, "EngineCore"):
        time.sleep(11)
        assert engine.health("ready") == 200, "idle: nothing is missing"
        waiting = pool.submit(engine.complete, 4)
        took = engine.wait_for(lambda: engine.health("ready") == 503, "not ready", 15)
        assert took >= 5
        assert engine.health("live") == 200
        assert engine.session.get(f"{engine.url}/health", timeout=5).status_code == 200
        engine.vllm_process("EngineCore").send_signal(signal.SIGCONT)
        assert waiting.result(60).status_code == 200
    engine.wait_ready(30)


def test_a_worker_that_hangs_under_load_is_noticed_and_recovers(
    engine_to_stop: RunningEngine,
) -> None:
    engine = engine_to_stop
    with ThreadPoolExecutor(8) as pool:
        running = streams(engine, pool, 150)
        with stopped(engine, "Worker"):
            engine.wait_for(lambda: engine.health("ready") == 503, "not ready", 15)
            assert engine.health("live") == 200
        assert {request.result(600) for request in running} == {200}
    engine.wait_ready(30)


def test_a_core_that_hangs_under_load_is_ended_as_hung(engine_to_stop: RunningEngine) -> None:
    """Last: not ready within 15 s, not live by stallSeconds, exit code 75 and a termination line."""
    engine = engine_to_stop
    with ThreadPoolExecutor(8) as pool:
        streams(engine, pool, 1500)
        with stopped(engine, "EngineCore") as since:
            engine.wait_for(lambda: engine.health("ready") == 503, "not ready", 15)
            assert engine.wait_end(STALL_S + 60) == 75
            took = time.monotonic() - since
    assert STALL_S - 2 <= took <= STALL_S + 20
    line = engine.termination()
    assert (line["class"], line["phase"]) == ("Hung", "serve")
    assert line["detail"]

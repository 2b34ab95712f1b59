"""A hang is noticed although vLLM's /health says 200, and it may end. How it is ended: test_install.py.

That a slow step is not taken for one: test_drain.py.
"""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from supervised_engine import RunningEngine, eight_running, stopped

pytestmark = pytest.mark.timeout(1200)


def test_an_idle_core_that_hangs_is_noticed_with_its_first_request_and_recovers(
    engine: RunningEngine,
) -> None:
    """Stopped while idle it is no failure; one request later the pod is not ready within 15 s."""
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


def test_a_worker_that_hangs_under_load_is_noticed_and_recovers(engine: RunningEngine) -> None:
    with ThreadPoolExecutor(8) as pool:
        running = eight_running(engine, pool, 1800)
        with stopped(engine, "Worker"):
            engine.wait_for(lambda: engine.health("ready") == 503, "not ready", 15)
            assert engine.health("live") == 200
        assert {request.result(600) for request in running} == {200}
    engine.wait_ready(30)

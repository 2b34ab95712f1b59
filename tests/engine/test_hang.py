"""A hang is noticed although vLLM's /health says 200, and it may end. That it is ended as hung in `make test`: tests/e2e.

That a slow step is not taken for one: test_drain.py.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from fleetkeeper_engine.shm.region import FILE as REGION_FILE
from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.spec import parse_document
from fleetkeeper_engine.supervisor.control_api.metrics import render_metrics
from fleetkeeper_engine.supervisor.memory.watch import MemoryState
from fleetkeeper_engine.supervisor.state import PodState
from tests.support.engine.supervised_engine import (
    RunningEngine,
    StartEngine,
    eight_running,
    stopped,
)
from tests.support.guards import GUARD_S

pytestmark = pytest.mark.timeout(1200)
SHORT_STALL_S = 8
STALL_S = 15
SLOW_REGEX = "|".join(f"(a{{0,{n % 50}}}b[a-f]{{0,{n}}}c{n})" for n in range(200))
"""xgrammar compiles it in some 3 s of a core."""


class Beside:
    """A second supervisor's eyes on the engine's shared memory, with less patience: it only reads.

    The engine's own supervisor ends what it calls hung within half a second, too soon to be asked.
    """

    def __init__(self, engine: RunningEngine) -> None:
        assert engine.run_directory is not None
        region = Region.open(engine.run_directory / REGION_FILE)
        assert region is not None
        health = {**engine.document["health"], "stallSeconds": SHORT_STALL_S}
        document = parse_document(json.dumps({**engine.document, "health": health}))
        self.region, self.pod = region, PodState(document, region, MemoryState(0.8), started=True)

    def shown(self) -> dict[str, float]:
        """Its metrics without labels, after one more observation."""
        now = time.monotonic()
        self.pod.observe(now)
        lines = render_metrics(self.pod, (), now, None).decode().splitlines()
        rows = (line.split() for line in lines if line[:1] != "#" and "{" not in line)
        return {name: float(value) for name, value in rows}

    def hung(self) -> bool:
        """What it would export as the verdict."""
        return self.shown()["fleetkeeper_hung"] == 1


@contextmanager
def beside(engine: RunningEngine) -> Iterator[Beside]:
    """Reads shared memory and leaves it as it is."""
    found = Beside(engine)
    yield found
    found.region.close()


def test_an_idle_core_that_hangs_is_noticed_with_its_first_request_and_recovers(
    engine: RunningEngine,
) -> None:
    """Stopped while idle it is no failure; one request later the pod is not ready within 15 s."""
    with ThreadPoolExecutor(1) as pool, stopped(engine, "EngineCore"):
        time.sleep(11)
        assert engine.health("ready") == 200, "idle: nothing is missing"
        waiting = pool.submit(engine.complete, 4)
        took = engine.wait_for(lambda: engine.health("ready") == 503, "not ready")
        assert took >= 5
        assert engine.health("live") == 200
        assert engine.session.get(f"{engine.url}/health", timeout=GUARD_S).status_code == 200
        engine.vllm_process("EngineCore").send_signal(signal.SIGCONT)
        assert waiting.result(GUARD_S).status_code == 200
    engine.wait_ready()


@pytest.mark.exhaustive
def test_a_worker_that_hangs_under_load_is_noticed_and_recovers(engine: RunningEngine) -> None:
    with ThreadPoolExecutor(8) as pool:
        running = eight_running(engine, pool, 600)
        with stopped(engine, "Worker"):
            engine.wait_for(lambda: engine.health("ready") == 503, "not ready")
            assert engine.health("live") == 200
        assert {request.result(600) for request in running} == {200}
    engine.wait_ready()


def test_a_frozen_engine_gives_the_verdict_that_it_hangs_and_takes_it_back(
    engine: RunningEngine,
) -> None:
    """1 beyond the allowance, 0 until then and again with the next step; idle and frozen it is 0."""
    with ThreadPoolExecutor(1) as pool, beside(engine) as eyes:
        with stopped(engine, "EngineCore"):
            until = time.monotonic() + 1.5 * SHORT_STALL_S
            while time.monotonic() < until:
                assert not eyes.hung(), "idle: nothing is missing"
                time.sleep(0.1)
            waiting = pool.submit(engine.complete, 4)
            engine.wait_for(eyes.hung, "the verdict")
            assert eyes.shown()["fleetkeeper_stalled_seconds"] >= SHORT_STALL_S
            assert engine.metrics()["fleetkeeper_hung"] == 0, "its own patience is 60 s"
            assert engine.health("live") == 200
        assert waiting.result(GUARD_S).status_code == 200
        engine.wait_for(lambda: not eyes.hung(), "the verdict taken back")
    engine.wait_ready()


def test_a_grammar_that_compiles_for_long_is_no_hang(engine: RunningEngine) -> None:
    """vLLM goes on calling schedule; the only request waits inside it, and nothing could run."""
    with ThreadPoolExecutor(1) as pool, beside(engine) as eyes:
        asked = pool.submit(
            engine.complete, 4, structured_outputs={"regex": SLOW_REGEX}, ignore_eos=False
        )
        blocked, moved_at = 0, set[float]()
        while not asked.done():
            block = eyes.region.read_scheduler()
            assert block is not None
            if block.blocked:
                blocked += 1
                assert (block.blocked, sum(block.waiting), sum(block.running)) == (1, 1, 0)
                assert not eyes.hung()
                moved_at.add(eyes.pod.progress.scheduled_at)
            time.sleep(0.02)
        assert asked.result().status_code == 200, asked.result().text
    assert blocked > 10, "the grammar took a while"
    assert len(moved_at) > 10, "each call of schedule was taken for progress"
    assert engine.health("ready") == 200


@pytest.mark.exhaustive
def test_a_core_that_hangs_under_load_is_ended_as_hung(start: StartEngine) -> None:
    """Not ready within 15 s, not live by stallSeconds, exit code 75 and a termination line."""
    engine = start(sections={"health": {"stallSeconds": STALL_S}})
    engine.wait_ready()
    with ThreadPoolExecutor(8) as pool:
        eight_running(engine, pool, 1500)
        with stopped(engine, "EngineCore") as since:
            not_ready = engine.wait_for(lambda: engine.health("ready") == 503, "not ready")
            assert engine.wait_end() == 75
            took = time.monotonic() - since
    print(f"not ready after {not_ready:.1f} s, ended {took:.1f} s after the hang began")
    assert took >= STALL_S - 2
    line = engine.termination()
    assert (line["class"], line["phase"]) == ("Hung", "serve")
    assert line["detail"]

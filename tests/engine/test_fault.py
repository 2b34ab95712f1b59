"""A fault of ours inside a real vLLM: it costs live limits, and neither a request nor the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fleetkeeper_engine.supervisor.health import Progress, decide_progress, is_live
from tests.support.engine.inside_engine import InsideEngine, client
from tests.support.engine.shared_engine import fault_file, shared_engine

pytestmark = pytest.mark.timeout(600)

TOKENS = 40
LONG = 1000
"""Tokens of the request that runs when the fault comes."""
FAULT_AT_START = """
from fleetkeeper_engine.in_vllm.live_scheduling import LiveScheduling

def describe(self):
    raise RuntimeError("a fault on purpose")

LiveScheduling._describe = describe
"""


def started(directory: Path, fault: str) -> InsideEngine:
    inside = directory / "inside"
    inside.mkdir()
    (inside / "sitecustomize.py").write_text(fault)
    return InsideEngine(directory, environment={"PYTHONPATH": str(inside)})


async def test_a_fault_in_the_scheduler_ends_live_limits_and_nothing_else(
    request: pytest.FixtureRequest,
) -> None:
    """It comes in the midst of a request; that one and all after it are answered, and none calls it a hang."""
    engine = shared_engine(request.config)
    await engine.until_idle()
    async with client() as session:
        first = asyncio.create_task(engine.complete(session, LONG))
        await engine.until(lambda: sum(engine.scheduler().running) == 1)
        fault_file(engine.log.parent).touch()
        assert ((await first).status, (await first).tokens) == (200, LONG)
        answers = [await engine.complete(session, TOKENS) for _ in range(5)]
    block, heartbeat, middleware = engine.scheduler(), engine.heartbeat(), engine.middleware()
    assert [(answer.status, answer.tokens) for answer in answers] == [(200, TOKENS)] * 5
    assert (block.instrumentation_disabled, block.supported) == (True, False)
    assert (sum(block.running), sum(block.waiting), heartbeat.steps) == (0, 0, 0)
    progress = decide_progress(Progress(), block, heartbeat, middleware, 0.0)
    assert is_live(decide_progress(progress, block, heartbeat, middleware, 900.0), 900.0, 60.0)
    said = engine.log.read_text()
    assert said.count("live batch limits are off") == 1
    assert "a fault on purpose" in said


@pytest.mark.exhaustive
async def test_a_fault_at_the_start_costs_live_limits_and_nothing_else(tmp_path: Path) -> None:
    """The scheduler's block is never written; what waits and runs is vLLM's own affair."""
    engine = started(tmp_path, FAULT_AT_START)
    try:
        async with client() as session:
            answers = [await engine.complete(session, TOKENS) for _ in range(3)]
        assert [(answer.status, answer.tokens) for answer in answers] == [(200, TOKENS)] * 3
        assert engine.region.read_scheduler() is None
        assert engine.log.read_text().count("live batch limits are off") == 1
    finally:
        engine.stop()

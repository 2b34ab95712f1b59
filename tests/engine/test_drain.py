"""A pod that leaves loses nothing while its deadline allows, and cuts no frame when it does not."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time

import aiohttp
import pytest

from supervised_engine import (
    ENGINE_PYTHON,
    GIB,
    RunningEngine,
    StartEngine,
    Stream,
    assert_within_cap,
    full_load,
)

pytestmark = pytest.mark.timeout(1200)
STREAMS = 50
TOKENS = 300


def a_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(300),
    )


async def running(engine: RunningEngine, count: int) -> None:
    name = 'fleetkeeper_running{tier="standard"}'
    await asyncio.to_thread(
        engine.wait_for, lambda: engine.metrics()[name] >= count, f"{count} running", 60
    )


async def test_a_long_prefill_is_no_hang_and_a_drain_with_50_streams_loses_none(
    start: StartEngine,
) -> None:
    """One step of 16,000 tokens takes longer than stallSeconds; 6 GiB hold it; then SIGTERM with 50 streams."""
    engine = start(
        sections={
            "engine": {"maxModelLength": 16_384},
            "batching": {"maxTokens": 16_640, "maxSequences": 64},
            "health": {"stallSeconds": 5},
            "drain": {"seconds": 600, "noticeSeconds": 5},
            "memory": {"limitBytes": 6 * GIB},
        },
        pod_bytes=6 * GIB,
    )
    engine.wait_ready()
    steps = engine.metrics()["fleetkeeper_steps_total"]
    prompt = [5 + token % 1000 for token in range(16_000)]
    began = time.monotonic()
    answer = await asyncio.to_thread(engine.complete, 1, prompt=prompt)
    took = time.monotonic() - began
    print(f"a prefill of 16,000 tokens took {took:.1f} s")
    assert answer.status_code == 200
    assert engine.metrics()["fleetkeeper_steps_total"] - steps <= 3, "it was one long step"
    assert took > 5, "the step was longer than stallSeconds: the test shows something"
    assert engine.health("live") == 200
    await asyncio.to_thread(full_load, engine)
    assert_within_cap(engine, 6)

    async with a_session() as session:
        streams = [asyncio.create_task(engine.stream(session, TOKENS)) for _ in range(STREAMS)]
        await running(engine, STREAMS)
        engine.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(
            engine.wait_for, lambda: engine.health("ready") == 503, "not ready", 4
        )
        noticed = await engine.stream(session, 1)
        assert noticed.status == 200, "in the notice time requests are still taken"
        assert engine.metrics()["fleetkeeper_draining"] == 1
        late = noticed
        while late.status == 200:
            late = await engine.stream(session, 1)
        assert late.status in {0, 503}, "after it they are refused"
        ended = await asyncio.gather(*streams)
    lost = [stream for stream in ended if stream.tokens != TOKENS or stream.broken]
    assert lost == []
    assert await asyncio.to_thread(engine.wait_end, 60) == 0
    assert not (engine.directory / "termination").exists(), "a drain is no death"


async def test_a_deadline_of_2_s_ends_every_stream_at_a_whole_frame(start: StartEngine) -> None:
    """preStop (over the socket) and SIGTERM share one clock; queued and running requests end cleanly."""
    engine = start(
        sections={
            "batching": {"maxSequences": 8, "maxTokens": 2048},
            "drain": {"seconds": 2, "noticeSeconds": 5},
        }
    )
    engine.wait_ready()
    async with a_session() as session:
        streams = [asyncio.create_task(engine.stream(session, 1800)) for _ in range(24)]
        await running(engine, 8)
        began = time.monotonic()
        prestop = await asyncio.create_subprocess_exec(
            *(ENGINE_PYTHON, "-m", "fleetkeeper_engine.cli", "drain"),
            env={"FLEETKEEPER_RUN": _run_directory(engine)},
            stdout=subprocess.DEVNULL,
        )
        await asyncio.sleep(0.2)
        ended: list[Stream] = await asyncio.gather(*streams)
        assert await prestop.wait() == 0
        engine.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(engine.wait_end, 30) == 0
        took = time.monotonic() - began
    assert took < 40
    refused = [stream for stream in ended if stream.status == 503]
    cut = [stream for stream in ended if stream.status == 200]
    assert len(refused) + len(cut) == 24
    assert len(cut) >= 8
    for stream in cut:
        assert not stream.broken
        assert stream.rest == b"", "no half frame"
        assert b"draining" in stream.events[-2] or stream.events[-1] == b"data: [DONE]"
    assert all(b'"code": "draining"' in stream.body for stream in refused)


def _run_directory(engine: RunningEngine) -> str:
    page = engine.vllm_process("APIServer").environ()["FLEETKEEPER_PAGE"]
    return page.rpartition("/")[0]

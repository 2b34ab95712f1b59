"""A pod that leaves loses nothing while its deadline allows, and cuts no frame when it does not."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from pathlib import Path

import aiohttp
import pytest

from fleetkeeper_engine.shm.region import Region
from tests.support.engine.engine_environment import PYTHON
from tests.support.engine.supervised_engine import (
    GIB,
    RunningEngine,
    StartEngine,
    Stream,
    assert_within_cap,
    full_load,
    stopped,
    with_config,
)
from tests.support.guards import GUARD_S

pytestmark = pytest.mark.timeout(1200)
STREAMS = 50
TOKENS = 300
ENDLESS = 16_000
"""More tokens than any engine makes in the seconds of a drain here."""
PROMPT = 16_000
LOOK_AHEAD = 2


def a_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(300),
    )


async def running(engine: RunningEngine, count: int) -> None:
    name = 'fleetkeeper_running{tier="standard"}'
    await asyncio.to_thread(
        engine.wait_for, lambda: engine.metrics()[name] >= count, f"{count} running"
    )


def stretch_step(engine: RunningEngine, tokens: int, seconds: float) -> None:
    """Stops the worker inside the step of so many tokens, and lets it go on after so many seconds.

    To the supervisor that is a step which takes that much longer, on any machine.

    Raises:
        AssertionError: when the pod is not live or not ready meanwhile, or says that it hangs.
    """
    region = Region.open(engine.vllm_process("APIServer").environ()["FLEETKEEPER_SHARED_MEMORY"])
    assert region is not None
    until = time.monotonic() + GUARD_S
    while (heartbeat := region.read_heartbeat()).tokens < tokens:
        assert time.monotonic() < until, f"no step of {tokens} tokens: {heartbeat}"
        time.sleep(0.001)
    with stopped(engine, "Worker") as since:
        while time.monotonic() - since < seconds:
            assert (engine.health("live"), engine.health("ready")) == (200, 200)
            shown = engine.metrics()
            assert shown["fleetkeeper_hung"] == 0
            time.sleep(0.1)
        assert shown["fleetkeeper_stalled_seconds"] > seconds - 2, "stalled, and rightly so"
        heartbeat = region.read_heartbeat()
        assert heartbeat.tokens >= tokens, "the step was under way all the time"
    region.close()


@pytest.mark.exhaustive
async def test_a_deadline_of_2_s_ends_every_stream_at_a_whole_frame(
    start: StartEngine, tiny_model: Path, tmp_path: Path
) -> None:
    """preStop (over the socket) and SIGTERM share one clock; queued and running requests end cleanly.

    Before, the pod has shown under full load that 3 GiB hold it, and that a model of 16 bits is
    served in the format that this CPU can compute in.
    """
    model = with_config(tiny_model, tmp_path / "model", dtype="bfloat16", torch_dtype="bfloat16")
    engine = start(
        sections={
            "model": {"source": str(model)},
            "engine": {"dtype": "auto", "maxModelLength": 16_384},
            "memory": {"limitBytes": 3 * GIB},
            "drain": {"seconds": 2, "noticeSeconds": 5},
        },
        pod_bytes=3 * GIB,
    )
    engine.wait_ready()
    await asyncio.to_thread(full_load, engine)
    assert_within_cap(engine, 3)
    words = engine.vllm_process("APIServer").cmdline()
    assert f"--dtype={computable_dtype()}" in words
    assert engine.put_limits(8, 2048).status_code == 200
    async with a_session() as session:
        streams = [asyncio.create_task(engine.stream(session, ENDLESS)) for _ in range(24)]
        await running(engine, 8)
        began = time.monotonic()
        prestop = await asyncio.create_subprocess_exec(
            *(PYTHON, "-m", "fleetkeeper_engine.cli", "drain"),
            env={"FLEETKEEPER_RUN": _run_directory(engine)},
            stdout=subprocess.DEVNULL,
        )
        await asyncio.sleep(0.2)
        ended: list[Stream] = await asyncio.gather(*streams)
        assert await prestop.wait() == 0
        engine.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(engine.wait_end) == 0
        took = time.monotonic() - began
    print(f"a drain of 2 s took {took:.1f} s")
    refused = [stream for stream in ended if stream.status == 503]
    aborted = [stream for stream in ended if stream.status == 200]
    assert len(refused) + len(aborted) == 24
    assert len(aborted) >= 8
    assert len(refused) >= 24 - 8 - LOOK_AHEAD, "what never left the queue"
    for stream in aborted:
        assert not stream.broken
        assert stream.tokens < ENDLESS, "the deadline ended it, so no queued one took its place"
        assert stream.rest == b"", "no half frame"
        assert b'"code": "draining"' in stream.events[-2]
        assert stream.events[-1] == b"data: [DONE]"
    assert all(b'"code": "draining"' in stream.body for stream in refused)


def computable_dtype() -> str:
    """The format for a model of bfloat16 on this CPU, by a product of torch's own."""
    product = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); a @ a"
    done = subprocess.run([PYTHON, "-c", product], capture_output=True, check=False)
    return "float32" if done.returncode else "bfloat16"


def _run_directory(engine: RunningEngine) -> str:
    region = engine.vllm_process("APIServer").environ()["FLEETKEEPER_SHARED_MEMORY"]
    return region.rpartition("/")[0]


async def test_a_long_prefill_is_no_hang_and_a_drain_with_50_streams_loses_none(
    pod: RunningEngine,
) -> None:
    """One step of 16,000 tokens lasts longer than stallSeconds; 6 GiB hold it; then SIGTERM with 50 streams.

    Last, for it ends the pod.
    """
    engine, stall_s = pod, pod.document["health"]["stallSeconds"]
    steps = engine.metrics()["fleetkeeper_steps_total"]
    prompt = [5 + token % 1000 for token in range(PROMPT)]
    began = time.monotonic()
    request = asyncio.create_task(asyncio.to_thread(engine.complete, 1, prompt=prompt))
    await asyncio.to_thread(stretch_step, engine, PROMPT, stall_s + 10)
    answer = await request
    took = time.monotonic() - began
    print(f"a prefill of {PROMPT} tokens took {took:.1f} s, stallSeconds are {stall_s}")
    assert answer.status_code == 200
    assert took > stall_s + 10
    assert engine.metrics()["fleetkeeper_steps_total"] - steps <= 3, "it was one long step"
    assert (engine.health("live"), engine.health("ready")) == (200, 200)
    await asyncio.to_thread(full_load, engine)
    assert_within_cap(engine, 6)

    async with a_session() as session:
        streams = [asyncio.create_task(engine.stream(session, TOKENS)) for _ in range(STREAMS)]
        await running(engine, STREAMS)
        engine.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(engine.wait_for, lambda: engine.health("ready") == 503, "not ready")
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
    assert await asyncio.to_thread(engine.wait_end) == 0
    assert not (engine.directory / "termination").exists(), "a drain is no death"

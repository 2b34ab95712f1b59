"""A hostile client against one engine: a real vLLM behind the supervisor, whose log nobody reads meanwhile.

`make test` sends 200 requests, `make test-all` 1,000, `make test-fault` 10,000. FLEETKEEPER_TEST_SEED sets other ones.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import psutil
import pytest
import requests

from tests.support.engine.hostile_requests import HostileRequest, hostile_request
from tests.support.engine.supervised_engine import COMPILED, RunningEngine, StartEngine
from tests.support.lanes import keep_first

FEW, REQUESTS = 200, 10_000 if os.environ.get("FLEETKEEPER_CAMPAIGN") == "long" else 1_000
SEED = int(os.environ.get("FLEETKEEPER_TEST_SEED", "20261123"))
AT_ONCE = 32
ANSWER_S = 300.0
MIB = 1024**2
MAX_KEPT_BYTES = 256 * MIB
"""Of memory beyond what the API server had before: it keeps caches, and no bodies."""


@dataclass
class Prober:
    """Asks what the event loop of the API server answers at once, and the pod's probes, all the time."""

    engine: RunningEngine
    waits_s: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    """Probes that were not answered 200, by name and reason."""
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with requests.Session() as session:
            while not self.over.wait(0.02):
                began = time.perf_counter()
                session.get(f"{self.engine.url}/version", timeout=ANSWER_S)
                self.waits_s.append(time.perf_counter() - began)
                for name in ("live", "ready"):
                    url = f"{self.engine.control_url}/healthz/{name}"
                    answer = session.get(url, timeout=ANSWER_S)
                    if answer.status_code != 200:
                        self.failed[f"{name}: {answer.text.strip()}"] += 1


async def send_hostile(port: int, request: HostileRequest) -> int | None:
    """The status of its answer; None when its client left, or its connection was closed on it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        lines = [f"POST {request.path} HTTP/1.1".encode(), b"host: engine", b"connection: close"]
        lines += [name + b": " + value for name, value in request.headers]
        lines.append(b"content-length: %d" % len(request.body))
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
        body, step = request.body[: request.sent], max(1, request.sent // request.parts)
        with suppress(ConnectionError):
            for at in range(0, len(body), step):
                writer.write(body[at : at + step])
                await writer.drain()
        if not request.is_whole:
            return None
        async with asyncio.timeout(ANSWER_S):
            with suppress(ConnectionError):
                line = await reader.readline()
                await reader.read()
                return int(line.split()[1]) if line else None
        return None
    finally:
        writer.transport.abort()


async def campaign(port: int, dice: random.Random, count: int) -> Counter[int | None]:
    """All requests, so many at once; how they were answered."""
    statuses: Counter[int | None] = Counter()
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            statuses[await send_hostile(port, hostile_request(dice))] += 1

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return statuses


@pytest.mark.exhaustive
def test_logprobs_are_compiled_before_the_engine_is_ready(start: StartEngine) -> None:
    """Compilation takes up to 15 s on two cores, in which no step of the engine ends."""
    engine = start(fresh=True)
    engine.wait_ready()
    compiled = set((engine.directory / COMPILED).rglob("*"))
    assert compiled, "nothing was compiled before the engine was ready"
    assert engine.complete(logprobs=1).status_code == 200
    assert set((engine.directory / COMPILED).rglob("*")) == compiled


@pytest.mark.promise("bounded-requests")
@pytest.mark.parametrize("count", keep_first(1, (FEW, REQUESTS), pytest.mark.exhaustive))
def test_a_hostile_client_gets_no_5xx_ends_no_engine_and_leaves_no_memory(
    engine: RunningEngine, count: int
) -> None:
    """Prints how the event loop lagged and what memory the API server took."""
    print(f"\nseed {SEED}")
    log = engine.output
    assert log is not None
    server: psutil.Process = engine.vllm_process("APIServer")
    for _ in range(20):
        assert engine.complete().status_code == 200
    before = server.memory_info().rss
    quiet, busy = Prober(engine), Prober(engine)
    thread = threading.Thread(target=quiet.run)
    thread.start()
    time.sleep(3.0)
    quiet.over.set()
    thread.join()
    log.stall()
    thread = threading.Thread(target=busy.run)
    thread.start()
    began = time.monotonic()
    try:
        statuses = asyncio.run(
            campaign(engine.document["ports"]["serving"], random.Random(SEED), count)
        )
    finally:
        busy.over.set()
        thread.join()
        log.resume()
    took_s = time.monotonic() - began
    engine.wait_idle(ANSWER_S)
    metrics = engine.metrics()
    after = server.memory_info().rss
    answered = sum(count for status, count in statuses.items() if status is not None)
    print(f"{count} requests in {took_s:.0f} s, {answered} answered: {dict(statuses)}")
    for name, prober in (("quiet", quiet), ("campaign", busy)):
        waits = sorted(prober.waits_s)
        p50, p99 = (waits[int(part * (len(waits) - 1))] for part in (0.5, 0.99))
        print(
            f"/version, {name}: p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms, "
            f"max {1e3 * waits[-1]:.0f} ms ({len(waits)} probes)"
        )
    print(f"RSS of the API server: {before / MIB:.0f} MiB before, {after / MIB:.0f} MiB after")
    print(f"log bytes dropped: {metrics['fleetkeeper_log_dropped_bytes_total']:.0f}")
    assert not [status for status in statuses if status is not None and status >= 500]
    print(f"probes that failed: {dict(busy.failed)}")
    assert not busy.failed
    assert after - before < MAX_KEPT_BYTES
    assert engine.complete().status_code == 200

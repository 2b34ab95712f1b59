"""Alive means that resyncs end and the loop is not behind; ready means that the caches are complete."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

import aiohttp
import pytest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from fleetkeeper.runtime.telemetry.health import HealthServer, Vitals
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from tests.support.guards import GUARD_S


class _Slow(Collector):
    """Series that take as long as the test wants."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def describe(self) -> Iterable[Metric]:
        """Nothing is known of them."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Wait for the test."""
        self.began.set()
        assert self.may_end.wait(GUARD_S)
        return ()


@pytest.mark.parametrize(
    ("vitals", "now", "ill"),
    [
        (Vitals(started=0.0, resync_period_s=100.0), 299.0, False),
        (Vitals(started=0.0, resync_period_s=100.0), 301.0, True),
        (Vitals(started=0.0, resync_period_s=100.0, last_resync=250.0), 549.0, False),
        (Vitals(started=0.0, resync_period_s=100.0, last_resync=250.0), 551.0, True),
        (Vitals(started=0.0, resync_period_s=100.0, loop_lag_s=14.0), 1.0, False),
        (Vitals(started=0.0, resync_period_s=100.0, loop_lag_s=16.0), 1.0, True),
    ],
)
def test_a_process_is_ill_when_resyncs_stop_or_its_loop_lags(
    vitals: Vitals, now: float, ill: bool
) -> None:
    assert bool(vitals.ill(now)) is ill


async def test_health_readiness_and_metrics_are_served_on_one_port() -> None:
    vitals = Vitals(started=0.0, resync_period_s=100.0)
    moment = 1.0
    server = HealthServer(vitals, OperatorMetrics(), monotonic=lambda: moment, refresh=lambda: None)
    port = await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

            async def status(path: str) -> int:
                async with session.get(path) as answer:
                    await answer.read()
                    return answer.status

            assert await status("/healthz") == 200
            assert await status("/readyz") == 503
            vitals.synced = True
            assert await status("/readyz") == 200
            moment = 301.0
            assert await status("/healthz") == 500
            async with session.get("/metrics") as answer:
                text = await answer.text()
            assert "fleetkeeper_leader 0.0" in text
    finally:
        await server.stop()


async def test_a_large_scrape_delays_no_probe() -> None:
    metrics, slow = OperatorMetrics(), _Slow()
    metrics.registry.register(slow)
    vitals = Vitals(started=0.0, resync_period_s=100.0)
    server = HealthServer(vitals, metrics, monotonic=lambda: 1.0, refresh=lambda: None)
    port = await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            scrape = asyncio.create_task(session.get("/metrics"))
            assert await asyncio.to_thread(slow.began.wait, GUARD_S)
            async with session.get("/healthz") as answer:
                assert answer.status == 200
            slow.may_end.set()
            async with await scrape as answer:
                assert answer.status == 200
    finally:
        await server.stop()

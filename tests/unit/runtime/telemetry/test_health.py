"""Alive means that resyncs end and the loop is not behind; ready means that the caches are complete."""

from __future__ import annotations

import aiohttp
import pytest

from fleetkeeper.runtime.telemetry.health import HealthServer, Vitals
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics


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

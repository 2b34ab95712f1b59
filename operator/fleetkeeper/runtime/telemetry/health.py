"""Health, readiness and metrics on one port.

The process is alive if the last full resync ended, with or without success, less than three periods
ago and the event loop is not behind. A restart does not help if the API server is down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics

LAG_PERIOD_S: Final = 1.0
MAX_LAG_S: Final = 15.0
"""An event loop this late no longer serves. A long garbage collection takes a tenth of a second."""
PERIODS: Final = 3


@dataclass(slots=True)
class Vitals:
    """The inputs of the health check. Times are of the monotonic clock."""

    started: float
    resync_period_s: float
    last_resync: float | None = None
    loop_lag_s: float = 0.0
    synced: bool = False

    def ill(self, now: float) -> str:
        """Return why this process should be restarted; "" if it should not."""
        silent_s = now - (self.started if self.last_resync is None else self.last_resync)
        if silent_s >= PERIODS * self.resync_period_s:
            return f"no resync ended for {silent_s:.0f} s (limit: {PERIODS} periods of {self.resync_period_s:.0f} s)"
        if self.loop_lag_s >= MAX_LAG_S:
            return f"event loop is {self.loop_lag_s:.0f} s behind"
        return ""


async def watch_lag(
    vitals: Vitals, metrics: OperatorMetrics, monotonic: Callable[[], float]
) -> None:
    """Measure how late the event loop is; never return."""
    while True:
        before = monotonic()
        await asyncio.sleep(LAG_PERIOD_S)
        vitals.loop_lag_s = max(0.0, monotonic() - before - LAG_PERIOD_S)
        metrics.loop_lag_seconds.set(vitals.loop_lag_s)


class HealthServer:
    """The HTTP server of /healthz, /readyz and /metrics."""

    def __init__(
        self,
        vitals: Vitals,
        metrics: OperatorMetrics,
        *,
        monotonic: Callable[[], float],
        refresh: Callable[[], None],
    ) -> None:
        self._vitals = vitals
        self._metrics = metrics
        self._monotonic = monotonic
        self._refresh = refresh
        self._scrape = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def start(self, address: str, port: int) -> int:
        """Listen and return the port; with 0 the system chooses a free one.

        Raises:
            OSError: the port is taken.
        """
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._serve_metrics)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, address, port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, request: web.Request) -> web.Response:
        del request
        self._refresh()
        ill = self._vitals.ill(self._monotonic())
        return web.Response(text=ill or "ok", status=500 if ill else 200)

    async def _readyz(self, request: web.Request) -> web.Response:
        del request
        ready = self._vitals.synced
        return web.Response(
            text="ok" if ready else "caches are not synced yet", status=200 if ready else 503
        )

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        del request
        async with self._scrape:
            self._refresh()
            # A thousand services take most of a second: leases and probes must not wait for it.
            body = await asyncio.to_thread(generate_latest, self._metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

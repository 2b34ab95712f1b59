"""A real Prometheus, and a proxy in front of it that can answer in its place."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import aiohttp
from aiohttp import web

from fleetkeeper_local.control_plane.programs import program_path

PROMETHEUS: Final = """
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs:
- job_name: engines
  body_size_limit: 4MB
  http_sd_configs: [{url: "%s/targets", refresh_interval: 1s}]
"""


class PrometheusProxy:
    """A Prometheus process. `fault` replaces its answers; `authorizations` are those received."""

    def __init__(self, directory: Path) -> None:
        self.fault = ""
        self.authorizations: set[str] = set()
        self.prometheus: asyncio.subprocess.Process | None = None
        self._directory = directory
        self._prometheus_url = ""

    def configure(self, targets_url: str, port: int) -> None:
        """Let Prometheus listen at this port and scrape the targets that the URL lists."""
        self._prometheus_url = f"http://127.0.0.1:{port}"
        (self._directory / "prometheus.yaml").write_text(PROMETHEUS % targets_url)

    def signal(self, number: int) -> None:
        """Send Prometheus a signal."""
        assert self.prometheus is not None
        self.prometheus.send_signal(number)

    async def start_prometheus(self) -> None:
        """Start it with the data that it stored before."""
        self.prometheus = await asyncio.create_subprocess_exec(
            str(program_path("prometheus")),
            f"--config.file={self._directory / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self._directory / 'prometheus'}",
            f"--web.listen-address={self._prometheus_url.removeprefix('http://')}",
            "--log.level=error",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )

    async def stop_prometheus(self) -> None:
        """Stop it, so that nothing listens at its address."""
        assert self.prometheus is not None
        self.prometheus.terminate()
        await self.prometheus.wait()

    async def _proxy(self, request: web.Request) -> web.Response:
        """Return Prometheus' answer, or `fault` if it is set."""
        self.authorizations.add(request.headers.get("Authorization", ""))
        if self.fault:
            return web.Response(text=self.fault, content_type="application/json")
        url = f"{self._prometheus_url}/{request.match_info['path']}"
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.request(
                    request.method, url, params=request.query, data=await request.read()
                ) as answer,
            ):
                return web.Response(
                    body=await answer.read(),
                    status=answer.status,
                    content_type=answer.content_type,
                )
        except aiohttp.ClientError as problem:
            raise web.HTTPBadGateway(text=str(problem)) from problem

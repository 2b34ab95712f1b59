"""The Prometheus adapter against a real Prometheus that scrapes modelled engines."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Self

import pytest
from aiohttp import ClientError, ClientSession, web

from fleetkeeper.adapters.prometheus import Prometheus, PrometheusError, PrometheusSettings
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.observe import observe_service
from fleetkeeper.autoscale.signals.samples import PodSample
from fleetkeeper.autoscale.signals.service_signals import SignalsMemory
from fleetkeeper.autoscale.types import Grade, PodView
from fleetkeeper.simulate.engine import H100_8B, Engine
from fleetkeeper.simulate.requests import Request
from fleetkeeper_local.control_plane.programs import program_path
from tests.support.autoscale.engine_metrics import metrics_text
from tests.support.autoscale.exporters import batch_text
from tests.support.engine.engine_environment import free_port
from tests.support.guards import GUARD_S

EDGES = Edges(0.5, 0.05)
SERVICES = [("team-a", "chat"), ("team-b", "code")]
SCRAPE_S = 1
NOT_MODELLED = (
    "fleetkeeper:refused:",
    "fleetkeeper:time_to_first_token_seconds:",
    "fleetkeeper:inter_token_latency_seconds:",
)
"""Rules over what the modelled engines do not export, as engines of an older image."""
RULES = Path(__file__).parents[3] / "charts/fleetkeeper/files/rules/signals.yaml"

CONFIG = """
rule_files: [%(rules)s]
global: {evaluation_interval: 1s, scrape_interval: %(scrape)ss, scrape_timeout: %(scrape)ss}
scrape_configs:
- job_name: batch
  metrics_path: /batch
  static_configs:
%(batch)s
- job_name: engines
  static_configs:
%(targets)s
  relabel_configs:
  - {source_labels: [pod], target_label: __metrics_path__, replacement: "/metrics/$1"}
"""


class World:
    """Modelled engines that serve their metrics, and a Prometheus that scrapes them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engines: dict[str, Engine] = {}
        self.services: dict[str, tuple[str, str]] = {}
        for namespace, name in SERVICES:
            for i in range(2):
                pod = f"{name}-{i}"
                self.engines[pod] = Engine(H100_8B, pod, time.time())
                self.services[pod] = (namespace, name)
        self.random = Random(1)
        self.garbage = ""
        self.batches = True
        self.url = ""
        self.process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/metrics/{pod}", self._metrics)
        app.router.add_get("/batch", self._batch)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port, own = self._runner.addresses[0][1], free_port()
        targets = "\n".join(
            f"  - targets: ['127.0.0.1:{port}']\n    labels: {{namespace: {ns}, inference_service: {name}, pod: {pod}}}"
            for pod, (ns, name) in self.services.items()
        )
        batch = "\n".join(
            f"  - targets: ['127.0.0.1:{port}']\n    labels: {{namespace: {namespace}, pod: batch-0}}"
            for namespace in ("fleetkeeper-system", "team-c")
        )
        config = self.directory / "prometheus.yaml"
        config.write_text(
            CONFIG
            % {"scrape": SCRAPE_S, "targets": targets, "rules": self._rules(), "batch": batch}
        )
        self.url = f"http://127.0.0.1:{own}"
        self.process = await asyncio.create_subprocess_exec(
            str(program_path("prometheus")),
            f"--config.file={config}",
            f"--storage.tsdb.path={self.directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{own}",
            "--log.level=error",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        self._load = asyncio.create_task(self._serve_requests())
        await self._until_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._load.cancel()
        await asyncio.gather(self._load, return_exceptions=True)
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            await self.process.wait()
        await self._runner.cleanup()

    def _rules(self) -> Path:
        """The shipped rules, evaluated every second so that a test need not wait."""
        copy = self.directory / "rules.yaml"
        copy.write_text(RULES.read_text().replace("interval: 15s", "interval: 1s"))
        return copy

    async def _until_ready(self) -> None:
        deadline = time.monotonic() + GUARD_S
        async with ClientSession() as session:
            while time.monotonic() < deadline:
                try:
                    async with session.get(f"{self.url}/-/ready") as response:
                        if response.status == 200:
                            return
                except ClientError:
                    pass
                await asyncio.sleep(0.2)
        raise TimeoutError("Prometheus did not become ready")

    async def _serve_requests(self) -> None:
        """4 requests a second and engine, in real time."""
        last = time.time()
        while True:
            await asyncio.sleep(0.25)
            now = time.time()
            for engine in self.engines.values():
                engine.advance(now)
                if self.random.random() < 4 * (now - last):
                    engine.arrive(Request(now, 1, 500, 100))
            last = now

    async def _batch(self, request: web.Request) -> web.Response:
        """The batch process has work for team-a/chat, and for a service of no fleet."""
        del request
        text = batch_text(SERVICES[0], ("team-x", "chat")) if self.batches else batch_text()
        return web.Response(text=text)

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.garbage:
            return web.Response(text=self.garbage)
        engine = self.engines[request.match_info["pod"]]
        return web.Response(text=metrics_text(engine.sample(time.time()), EDGES))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """The engines and Prometheus of one test."""
    async with World(tmp_path) as held:
        yield held


async def observed(
    world: World, prometheus: Prometheus, *, step_class: str = "decode"
) -> dict[tuple[str, str], list[PodSample]]:
    """The samples of now, by service."""
    pods = {(namespace, pod): EDGES for pod, (namespace, _) in world.services.items()}
    found = await prometheus.observe_samples(pods, time.time(), step_class=step_class)
    by_service: dict[tuple[str, str], list[PodSample]] = {}
    for (_, pod), row in found.samples.items():
        by_service.setdefault(world.services[pod], []).append(row)
    return by_service


async def until_complete(
    world: World, prometheus: Prometheus
) -> dict[tuple[str, str], list[PodSample]]:
    """The samples once every pod was scraped."""
    deadline = time.monotonic() + GUARD_S
    while time.monotonic() < deadline:
        try:
            got = await observed(world, prometheus)
        except PrometheusError:
            got = {}
        if sum(len(rows) for rows in got.values()) == 4 and not any(
            row.missing for rows in got.values() for row in rows
        ):
            return got
        await asyncio.sleep(0.3)
    raise TimeoutError("not every pod was scraped")


async def until_none(world: World, prometheus: Prometheus) -> None:
    """Return once a target that fails has left no samples behind."""
    deadline = time.monotonic() + GUARD_S
    while await observed(world, prometheus):
        assert time.monotonic() < deadline, "samples are left of a target that fails"
        await asyncio.sleep(0.3)


async def test_real_samples_become_signals(world: World) -> None:
    """All pods, all metrics, real scrape times; rates agree with what was sent; outages are errors and end."""
    prometheus = Prometheus(PrometheusSettings(world.url, deadline_s=20.0))
    try:
        got = await until_complete(world, prometheus)
        for service in SERVICES:
            for row in got[service]:
                assert 0 <= time.time() - row.time < 120
                assert row.decode is not None
                assert row.prefill is None
                now = world.engines[row.pod].sample(time.time()).counters
                assert row.counters.arrivals_standard <= now.arrivals_standard
        await signals_agree(world, prometheus)
        await rules_evaluate(world)
        world.garbage = "<html>"
        await until_none(world, prometheus)
        world.garbage = ""
        await until_complete(world, prometheus)
        await frozen_and_back(world, prometheus)
    finally:
        await prometheus.close()


async def test_real_backlogs_have_their_scrape_time_and_end(world: World) -> None:
    """With the selector of the batch process alone; a series that ends is gone at the next scrape."""
    ours = PrometheusSettings(
        world.url, deadline_s=20.0, batch_selector='namespace="fleetkeeper-system"'
    )
    other = PrometheusSettings(world.url, deadline_s=20.0, batch_selector='namespace="team-b"')
    pods = {(namespace, pod): EDGES for pod, (namespace, _) in world.services.items()}
    prometheus, elsewhere = (Prometheus(one) for one in (ours, other))
    deadline = time.monotonic() + GUARD_S
    try:
        await until_complete(world, prometheus)
        while not (found := (await prometheus.observe_samples(pods, time.time())).backlogs):
            assert time.monotonic() < deadline, "the batch process was not scraped"
            await asyncio.sleep(0.3)
        assert found.keys() == {SERVICES[0]}
        backlog = found[SERVICES[0]]
        assert 0 <= time.time() - backlog.time < 120
        assert backlog.tokens == 1e6
        assert backlog.tokens_per_s == pytest.approx(1e6 / 3600)
        assert 3500 < backlog.deadline - backlog.time <= 3601
        assert (await elsewhere.observe_samples(pods, time.time())).backlogs == {}
        world.batches = False
        while (await prometheus.observe_samples(pods, time.time())).backlogs:
            assert time.monotonic() < deadline, "the series did not end"
            await asyncio.sleep(0.3)
    finally:
        await prometheus.close()
        await elsewhere.close()


async def signals_agree(world: World, prometheus: Prometheus) -> None:
    """Rates made from real samples are those of the load."""
    views = tuple(
        PodView(f"chat-{i}", f"u{i}", time.time() - 900, True, time.time() - 800) for i in range(2)
    )
    memory = SignalsMemory()
    for _ in range(8):
        rows = (await observed(world, prometheus))[SERVICES[0]]
        signals, memory = observe_service(rows, views, memory, time.time())
        await asyncio.sleep(1.0)
    assert signals.grade is Grade.FRESH
    assert 2.0 < signals.arrivals_per_s < 14.0
    assert signals.batch_time_s > 0


async def rules_evaluate(world: World) -> None:
    """Every shipped recording rule evaluates without error, and those of present series have a value."""
    async with ClientSession() as session:
        async with session.get(f"{world.url}/api/v1/rules") as response:
            groups = (await response.json())["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert len(rules) >= 19
        assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
        for rule in rules:
            if rule["name"].startswith(NOT_MODELLED):
                continue
            async with session.get(
                f"{world.url}/api/v1/query", params={"query": rule["name"]}
            ) as response:
                rows = (await response.json())["data"]["result"]
            assert {row["metric"]["inference_service"] for row in rows} == {"chat", "code"}, rule[
                "name"
            ]


async def frozen_and_back(world: World, prometheus: Prometheus) -> None:
    """SIGSTOP is an error within the deadline; after SIGCONT samples come again."""
    assert world.process is not None
    os.kill(world.process.pid, signal.SIGSTOP)
    short = Prometheus(PrometheusSettings(world.url, deadline_s=1.0))
    with pytest.raises(PrometheusError):
        async with asyncio.timeout(GUARD_S):
            await observed(world, short)
    await short.close()
    os.kill(world.process.pid, signal.SIGCONT)
    await until_complete(world, prometheus)

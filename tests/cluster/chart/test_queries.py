"""Every query of the alerts and dashboards, answered by a real Prometheus that scrapes the real exporters."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
from aiohttp import ClientError, ClientSession, web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from fleetkeeper_local.control_plane.ports import free_ports
from fleetkeeper_local.control_plane.programs import program_path
from tests.support.autoscale.exporters import EngineExporter, OperatorExporter, batch_text
from tests.support.chart.shipped_queries import (
    RULES,
    SELECTOR,
    alerts,
    annotated,
    chosen,
    gateway_registry,
    judged,
    shown,
    variables,
)
from tests.support.guards import GUARD_S

NAMESPACE: Final = "team-a"
SERVICE: Final = "chat"
OPERATOR: Final = "fleetkeeper-system"
OURS: Final = f'service_namespace="{NAMESPACE}", inference_service="{SERVICE}"'


class Prometheus:
    """A real Prometheus, by its API."""

    def __init__(self, session: ClientSession, url: str) -> None:
        self._session = session
        self.url = url

    async def get(self, path: str, **query: str) -> Any:
        """Return the data of an answer; fail with Prometheus' own error."""
        async with self._session.get(f"{self.url}/api/v1/{path}", params=query) as response:
            answer = await response.json()
        assert answer["status"] == "success", f"{query}: {answer.get('error')}"
        return answer["data"]

    async def values(self, query: str) -> list[str]:
        """Return the present values of a query."""
        return [row["value"][1] for row in (await self.get("query", query=query))["result"]]

    async def data(self, where: str, query: str) -> list[str]:
        """Return the values of a query as soon as it has some: a scrape that times out leaves none."""
        deadline = time.monotonic() + GUARD_S
        while not (found := await self.values(query)):
            assert time.monotonic() < deadline, f"{where}: no data for {query}"
            await asyncio.sleep(0.2)
        return found

    async def scraped(self, times: int) -> None:
        """Wait until each target was scraped that many times."""
        deadline = time.monotonic() + GUARD_S
        while time.monotonic() < deadline:
            try:
                counts = await self.values("count_over_time(up[5m])")
            except ClientError:
                counts = []
            if len(counts) == 4 and min(map(int, counts)) >= times:
                return
            await asyncio.sleep(0.2)
        raise TimeoutError("Prometheus did not scrape all targets")


@asynccontextmanager
async def _exporters(directory: Path, operator: Callable[[], bytes]) -> AsyncIterator[str]:
    """Serve an engine, an operator, a gateway and a batch process; yield the address."""
    texts: dict[str, Callable[[], bytes]] = {
        "engine": EngineExporter(directory).text,
        "operator": operator,
        "gateway": lambda: generate_latest(gateway_registry()),
        "batch": lambda: batch_text((NAMESPACE, SERVICE)).encode(),
    }

    async def serve(request: web.Request) -> web.Response:
        text = texts[request.match_info["part"]]()
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/{part}", serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _config(target: str) -> dict[str, Any]:
    """Scrape them as in a cluster: the labels of a target are those of its pod."""
    engine = {"namespace": NAMESPACE, "pod": "chat-0", "inference_service": SERVICE}
    operator = {"namespace": OPERATOR, "pod": "fleetkeeper-0"}
    gateway = {"namespace": OPERATOR, "pod": "fleetkeeper-gateway-0"}
    batch = {"namespace": OPERATOR, "pod": "fleetkeeper-gateway-batch-0"}
    return {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES / "alerts.yaml")],
        "scrape_configs": [
            {
                "job_name": part,
                "metrics_path": f"/{part}",
                "static_configs": [{"targets": [target], "labels": labels}],
            }
            for part, labels in (
                ("engine", engine),
                ("operator", operator),
                ("gateway", gateway),
                ("batch", batch),
            )
        ],
    }


@asynccontextmanager
async def _prometheus(
    directory: Path, operator: Callable[[], bytes] | None = None
) -> AsyncIterator[Prometheus]:
    """Run Prometheus over the exporters until each was scraped three times."""
    text = operator or OperatorExporter(NAMESPACE, SERVICE).text
    async with _exporters(directory, text) as target, ClientSession() as session:
        (port,) = free_ports(1)
        (directory / "prometheus.yaml").write_text(json.dumps(_config(target)))
        process = await asyncio.create_subprocess_exec(
            str(program_path("prometheus")),
            f"--config.file={directory / 'prometheus.yaml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        )
        try:
            prometheus = Prometheus(session, f"http://127.0.0.1:{port}")
            await prometheus.scraped(3)
            yield prometheus
        finally:
            process.kill()
            await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prometheus(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Prometheus]:
    async with _prometheus(tmp_path_factory.mktemp("prometheus")) as found:
        yield found


@pytest.mark.asyncio(loop_scope="module")
async def test_every_query_has_an_answer(prometheus: Prometheus) -> None:
    """No error; each selector returns series, and each panel numbers."""
    values_of = variables(NAMESPACE, SERVICE, OPERATOR)
    drawn, alerting = shown(values_of) | annotated(values_of), judged()
    assert len(drawn) > 60
    selectors: dict[str, str] = {}
    for where, query in (drawn | chosen(values_of) | alerting).items():
        named = SELECTOR.findall(query)
        assert named, where
        selectors |= dict.fromkeys(named, where)
    for selector, where in selectors.items():
        await prometheus.data(where, selector)
    for query in alerting.values():
        await prometheus.values(query)
    for where, query in drawn.items():
        values = await prometheus.data(where, query)
        assert "NaN" not in values, f"{where}: {query}"


@pytest.mark.asyncio(loop_scope="module")
async def test_prometheus_evaluates_every_alert(prometheus: Prometheus) -> None:
    deadline = time.monotonic() + GUARD_S
    health: dict[str, str] = {}
    while "unknown" in health.values() or not health:
        assert time.monotonic() < deadline, health
        groups = (await prometheus.get("rules"))["groups"]
        health = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
        await asyncio.sleep(0.2)
    assert health == {rule["alert"]: "ok" for rule in alerts()}


@pytest.mark.exhaustive
async def test_the_annotation_marks_a_decision_and_no_restart_of_the_operator(
    tmp_path: Path,
) -> None:
    """Nothing at rest, one subject after its first decision, nothing new when the counter begins again."""
    (query,) = annotated(variables(NAMESPACE, SERVICE, OPERATOR)).values()
    leader = OperatorExporter(NAMESPACE, SERVICE, decides=())

    def of_leader() -> bytes:
        return leader.text()

    async with _prometheus(tmp_path, of_leader) as prometheus:

        async def subjects() -> list[str]:
            answer = await prometheus.get("query", query=query)
            return [row["metric"]["subject"] for row in answer["result"]]

        counter = f"fleetkeeper_service_decisions_total{{{OURS}}}"
        limits = f'fleetkeeper_service_decisions_total{{{OURS}, subject="limits"}}'
        assert set(await prometheus.data("at rest", counter)) == {"0"}
        assert await subjects() == []
        leader.decides = ("limits",)
        await prometheus.data("decisions", f"{limits} > 2")
        assert await subjects() == ["limits"]

        leader.decides = ()
        short = query.replace("[1m]", "[3s]")
        await prometheus.data("at rest again", f"increase({limits}[3s]) == 0")
        rested = time.time()
        leader = OperatorExporter(NAMESPACE, SERVICE, decides=())
        await prometheus.data("a restart", f"{limits} == 0 and {limits} offset 3s == 0")
        marks = await prometheus.get(
            "query_range", query=short, start=str(rested), end=str(time.time()), step="0.5"
        )
        assert marks["result"] == []

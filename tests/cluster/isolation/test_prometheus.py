"""A real Prometheus that scrapes a hostile pod and a forging neighbor beside good pods."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from math import prod
from pathlib import Path

import pytest
import pytest_asyncio
import yaml
from aiohttp import ClientError, ClientSession, web

from fleetkeeper.adapters.prometheus import Prometheus, PrometheusReading, PrometheusSettings
from fleetkeeper.adapters.prometheus.client import ANSWER_BYTES
from fleetkeeper.adapters.prometheus.queries import queries_for
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper_local.control_plane.programs import program_path
from tests.support.autoscale.control_cases import sample
from tests.support.autoscale.engine_metrics import metrics_text
from tests.support.chart.helm_chart import CHART, rendered
from tests.support.guards import GUARD_S

ROOT = Path(__file__).parents[3]
EDGES = Edges(0.5, 0.05)
MANY = 10_000
MEGABYTE = 1 << 20
CHAT, CODE, EVIL = ("team-a", "chat-0"), ("team-b", "code-0"), ("evil", "evil-0")
LIMITED = ("evil", "evil-1")
PODS = dict.fromkeys((CHAT, CODE, EVIL, LIMITED), EDGES)
LIMITS = yaml.safe_load((CHART / "values.yaml").read_text())["prometheus"]["podMonitor"]["limits"]
SNAKE = {
    "sampleLimit": "sample_limit",
    "labelLimit": "label_limit",
    "labelNameLengthLimit": "label_name_length_limit",
    "labelValueLengthLimit": "label_value_length_limit",
    "bodySizeLimit": "body_size_limit",
}


def good(pod: str) -> str:
    """What an engine exposes."""
    return metrics_text(sample(time.time(), pod, origin=time.time() - 3600), EDGES)


def hostile() -> str:
    """The same, and label values without end on the names that queries ask for."""
    lines = [good("evil-0")]
    lines += [f'fleetkeeper_waiting{{tier="t{i}"}} 1' for i in range(MANY)]
    lines += [
        f'fleetkeeper_queue_wait_seconds_bucket{{tier="standard",le="{i}.125"}} 1'
        for i in range(MANY)
    ]
    for i, name in enumerate(
        ("running", "arrivals_total", "queue_wait_seconds_sum", "steps_total")
    ):
        lines.append(f'fleetkeeper_{name}{{tier="{i}{"x" * MEGABYTE}"}} 1')
    lines.append(f'fleetkeeper_limit_sequences{{kind="{"y" * MEGABYTE}"}} 1')
    lines += [f'fleetkeeper_steps_total{{other="{i}"}} 1e18' for i in range(1_000)]
    return "\n".join(lines) + "\n"


def forged() -> str:
    """Series of another tenant's pod, as a target with honor_labels can write them; and of ghosts."""
    name = 'namespace="team-a",pod="chat-0",inference_service="chat"'
    lines = [
        line.replace("{", f"{{{name},", 1) if "{" in line else line.replace(" ", f"{{{name}}} ", 1)
        for line in metrics_text(sample(0.0, "chat-0", origin=0.0), EDGES).splitlines()
        if line.startswith("fleetkeeper_")
    ]
    lines += [
        f'fleetkeeper_waiting{{namespace="team-b",pod="ghost-{i}",inference_service="x",tier="standard"}} 9'
        for i in range(MANY)
    ]
    return "\n".join(lines) + "\n"


BODIES = {
    "chat-0": lambda: good("chat-0"),
    "code-0": lambda: good("code-0"),
    "evil-0": hostile,
    "evil-1": hostile,
    "neighbor": forged,
}


def config(port: int) -> str:
    """Good pods, the hostile one without limits and with those of the chart, and the neighbor."""

    def job(name: str, pods: list[tuple[str, str]], **more: object) -> dict[str, object]:
        labels = [
            {
                "targets": [f"127.0.0.1:{port}"],
                "labels": {
                    "namespace": namespace,
                    "pod": pod,
                    "inference_service": pod.partition("-")[0],
                    "__metrics_path__": f"/metrics/{pod}",
                    "job": "fleetkeeper-engines",
                },
            }
            for namespace, pod in pods
        ]
        return {"job_name": name, "static_configs": labels} | more

    neighbor = {
        "targets": [f"127.0.0.1:{port}"],
        "labels": {"__metrics_path__": "/metrics/neighbor"},
    }
    slow = {"scrape_interval": "5s", "scrape_timeout": "5s"}
    limits = {SNAKE[name]: value for name, value in LIMITS.items()}
    return yaml.safe_dump(
        {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [
                job("good", [CHAT, CODE]),
                job("evil", [EVIL], **slow),
                job("limited", [LIMITED], **slow, **limits),
                {
                    "job_name": "neighbor",
                    "honor_labels": True,
                    "static_configs": [neighbor],
                    **slow,
                },
            ],
        }
    )


@pytest_asyncio.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """The address of a Prometheus that scrapes all of these."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=await asyncio.to_thread(BODIES[request.match_info["pod"]]))

    app = web.Application()
    app.router.add_get("/metrics/{pod}", metrics)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        own = held.getsockname()[1]
    file = tmp_path / "prometheus.yaml"
    file.write_text(config(runner.addresses[0][1]))
    process = await asyncio.create_subprocess_exec(
        str(program_path("prometheus")),
        f"--config.file={file}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{own}",
        "--log.level=error",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{own}"
    try:
        for pod in ("evil-0", "evil-1", "code-0", "chat-0"):
            await until_value(address, f'up{{pod="{pod}"}}', 0.0 if pod == "evil-1" else 1.0)
        await until_value(address, 'count(fleetkeeper_waiting{pod=~"ghost.*"})', MANY)
        yield address
    finally:
        process.kill()
        await process.wait()
        await runner.cleanup()


async def until_value(address: str, query: str, value: float) -> None:
    """Waits until a query has this value."""
    async with asyncio.timeout(GUARD_S), ClientSession() as session:
        while True:
            try:
                async with session.get(
                    f"{address}/api/v1/query", params={"query": query}
                ) as answer:
                    rows = (await answer.json())["data"]["result"]
                if rows and float(rows[0]["value"][1]) == value:
                    return
            except (ClientError, KeyError):
                pass
            await asyncio.sleep(0.2)


async def observed(address: str, selector: str = "") -> PrometheusReading:
    """What the operator reads of the pods."""
    settings = PrometheusSettings(address, deadline_s=GUARD_S, selector=selector)
    prometheus = Prometheus(settings)
    try:
        return await prometheus.observe_samples(PODS, time.time(), step_class="decode")
    finally:
        await prometheus.close()


@pytest.mark.promise("forged-series")
async def test_hostile_series_reach_nobody_else(url: str) -> None:
    """The good pod's sample is whole, forged ones are noticed, and with a selector not even returned."""
    reading = await observed(url)
    assert reading.problems == ()
    assert reading.samples[CODE].missing == ()
    assert reading.samples[CODE].gauges.waiting_standard == 0.0
    assert reading.disputed == {CHAT, EVIL}
    assert CHAT not in reading.samples
    selected = await observed(url, 'job="fleetkeeper-engines"')
    assert selected.problems == ()
    assert selected.disputed == {EVIL}
    assert selected.samples[CHAT].missing == ()
    assert selected.samples[CHAT].counters.steps > 0, "the pod's own word, not the neighbor's zeros"
    await answers_are_small(url)


async def answers_are_small(url: str) -> None:
    """No label value of a pod's making comes back; what a neighbor may write is bounded by its scrape."""
    async with ClientSession() as session:
        for query in queries_for([EDGES], step_class="decode"):
            params = {"query": query.text(sorted({namespace for namespace, _ in PODS}))}
            async with session.get(f"{url}/api/v1/query", params=params) as answer:
                body = await answer.read()
            assert len(body) < ANSWER_BYTES, query.name
            rows = json.loads(body)["data"]["result"]
            ghosts = [row for row in rows if row["metric"]["pod"].startswith("ghost")]
            assert len(rows) - len(ghosts) <= 20 * len(PODS), query.name
            for row in rows:
                assert all(len(value) < 100 for value in row["metric"].values()), query.name


def test_the_documented_scrape_has_the_limits_of_the_monitors() -> None:
    """One job of engines with labels from the service discovery, in the words of docs/prometheus.md."""
    page = (ROOT / "docs/prometheus.md").read_text()
    job = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])["scrape_configs"][0]
    assert {name: job[SNAKE[name]] for name in LIMITS} == LIMITS
    assert job["honor_labels"] is False
    targets = {rule.get("target_label") for rule in job["relabel_configs"]}
    assert targets >= {"namespace", "pod", "inference_service"}


def test_monitors_bound_a_scrape_and_an_engine_stays_far_below() -> None:
    """Ten times the contract's series; labels and bytes are bounded too."""
    metrics = json.loads((ROOT / "engine_image/schemas/metrics.json").read_text())["metrics"]
    series = sum(
        prod(len(values) for values in (row.get("values") or {}).values())
        * (len(row["edges"]) + 3 if row["type"] == "histogram" else 1)
        for row in metrics
    )
    labels = max(len(row["labels"]) for row in metrics)
    monitors = [
        item
        for item in rendered({"prometheus": {"podMonitor": {"enabled": True}}})
        if item["kind"] == "PodMonitor"
        and "fleetkeeper.io/component" in item["spec"]["selector"]["matchLabels"]
    ]
    assert len(monitors) == 2
    for monitor in monitors:
        spec = monitor["spec"]
        assert 10 * series <= spec["sampleLimit"] <= 50 * series
        assert spec["labelLimit"] >= labels + 20, "target labels, and vLLM's own information series"
        assert 1_000 <= spec["labelValueLengthLimit"] <= 10_000
        assert spec["bodySizeLimit"] == LIMITS["bodySizeLimit"]
        assert all(not endpoint["honorLabels"] for endpoint in spec["podMetricsEndpoints"])

"""One query, one answer, one namespace that is bad: what the other queries gave is used.

Faults come from a loopback server that serves the rest of a modelled fleet well.
"""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from fleetkeeper.adapters.prometheus import (
    Prometheus,
    PrometheusError,
    PrometheusReading,
    PrometheusSettings,
)
from fleetkeeper.adapters.prometheus.client import answer_bytes
from fleetkeeper.adapters.prometheus.queries import queries_for
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.series_map import OPTIONAL
from tests.support.autoscale.control_cases import NOW, sample
from tests.support.autoscale.engine_metrics import metrics_series

EDGES = Edges(0.5, 0.05)
PODS = {("team-a", "chat-0"): EDGES, ("team-b", "code-0"): EDGES}
Fault = Callable[[web.Request], Awaitable[web.StreamResponse]]
PATIENT_S = 60.0


def rows_of(query: str) -> list[dict[str, Any]]:
    """What a Prometheus with these two pods would answer; matchers on `namespace` are obeyed."""
    if query.startswith("count"):
        return []
    scope = re.search(r'namespace=~"([^"]*)"', query)
    namespaces = set(scope[1].split("|")) if scope else {"team-a", "team-b"}
    found = []
    for namespace, pod in PODS:
        if namespace not in namespaces:
            continue
        labels = {"namespace": namespace, "pod": pod}
        if "timestamp(" in query:
            found.append({"metric": labels, "value": [NOW, str(NOW - 1)]})
            continue
        wanted = re.search(r'__name__=~"([^"]*)"', query)
        assert wanted is not None
        for name, more, value in metrics_series(sample(NOW, pod), EDGES):
            if re.fullmatch(wanted[1], name):
                metric = {**labels, **more, "__name__": name}
                found.append({"metric": metric, "value": [NOW, str(value)]})
    return found


def vector(rows: list[Any]) -> web.Response:
    """An answer."""
    return web.json_response(
        {"status": "success", "data": {"resultType": "vector", "result": rows}}
    )


async def observed(fault: Fault, bad: Callable[[str], bool], **settings: Any) -> PrometheusReading:
    """One tick against a server that answers the bad queries with the fault and the others well."""

    async def handler(request: web.Request) -> web.StreamResponse:
        query = request.query["query"]
        return await fault(request) if bad(query) else vector(rows_of(query))

    app = web.Application()
    app.router.add_get("/api/v1/query", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    changes = {"deadline_s": PATIENT_S} | settings
    prometheus = Prometheus(PrometheusSettings(url, **changes))
    try:
        return await prometheus.observe_samples(PODS, NOW, step_class="decode")
    finally:
        await prometheus.close()
        await runner.cleanup()


async def error(_: web.Request) -> web.Response:
    """A refusal, not to be retried."""
    return web.json_response({"status": "error", "error": "too many samples"}, status=422)


async def garbage(_: web.Request) -> web.Response:
    """No JSON."""
    return web.Response(body=b"<html>\xff", content_type="application/json")


async def wrong_shape(_: web.Request) -> web.Response:
    """JSON of another shape."""
    return web.json_response({"data": {"result": {"metric": 7}}})


async def gigabytes(request: web.Request) -> web.StreamResponse:
    """A body that does not end."""
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" " * (1 << 20))


async def bomb(_: web.Request) -> web.Response:
    """A few hundred kilobytes that stand for 256 MiB."""
    packed = gzip.compress(b" " * (256 << 20), compresslevel=1)
    return web.Response(body=packed, headers={"Content-Encoding": "gzip"})


async def broken_gzip(_: web.Request) -> web.Response:
    """Bytes that are not what the header says."""
    return web.Response(body=b"x" * 5000, headers={"Content-Encoding": "gzip"})


async def cut_off(request: web.Request) -> web.StreamResponse:
    """A connection that ends in the middle of a chunk."""
    response = web.StreamResponse()
    response.enable_chunked_encoding()
    await response.prepare(request)
    await response.write(b'{"status":')
    assert request.transport is not None
    request.transport.abort()
    return response


FAULTS = [error, garbage, wrong_shape, gigabytes, bomb, broken_gzip, cut_off]


def is_about_memory(query: str) -> bool:
    """The query for values that decisions can do without."""
    return query.startswith("max") and "memory_(" in query


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_a_bad_answer_costs_its_own_values_alone(fault: Fault) -> None:
    """Every pod has a sample with all that decisions need; the problem is told."""
    reading = await observed(fault, is_about_memory)
    assert set(reading.samples) == set(PODS)
    for (_, pod), found in reading.samples.items():
        assert found.missing == ()
        assert found.counters == pytest.approx(sample(NOW, pod).counters)
        assert found.gauges.kv_capacity_tokens == sample(NOW, pod).gauges.kv_capacity_tokens
    assert len(reading.problems) == 1


@pytest.mark.slow
async def test_a_slow_answer_costs_its_own_values_alone() -> None:
    """The others are there when the deadline passes."""

    async def slow(_: web.Request) -> web.Response:
        await asyncio.sleep(PATIENT_S)
        return vector([])

    reading = await observed(slow, is_about_memory, deadline_s=4.0)
    assert set(reading.samples) == set(PODS)
    assert len(reading.problems) == 1


@pytest.mark.parametrize("name", ["arrivals", "kv_", "queue_wait_seconds_bucket", "timestamp("])
async def test_no_sample_is_made_of_half_the_values_that_decisions_need(name: str) -> None:
    """Zeros in place of counters would look like a restart: such a pod is read in another way."""
    with pytest.raises(PrometheusError, match="422"):
        await observed(error, lambda query: name in query and not query.startswith("count"))


@pytest.mark.parametrize("fault", [error, gigabytes], ids=lambda fault: fault.__name__)
async def test_a_namespace_that_spoils_an_answer_spoils_its_own_alone(fault: Fault) -> None:
    """The query is put again for parts of the fleet: the other namespaces' pods have whole samples."""

    def spoiled(query: str) -> bool:
        return "arrivals" in query and "team-b" in query

    reading = await observed(fault, spoiled)
    assert set(reading.samples) == {("team-a", "chat-0")}
    assert reading.samples["team-a", "chat-0"].missing == ()
    assert reading.problems


def texts() -> Iterator[tuple[str, str]]:
    """Every query, with its grouping labels."""
    for query in queries_for([EDGES], step_class="prefill"):
        text = query.text(("team-a", "team-b"))
        yield text, " ".join(re.findall(r"by \(([^)]*)\)", text))


def test_every_label_that_is_grouped_by_is_matched() -> None:
    """Else ten thousand values of one pod's making would come back; `pod` is matched by its namespace."""
    for text, grouped in texts():
        for label in set(re.findall(r"\w+", grouped)) - {"by", "pod"}:
            assert re.search(rf'\b{label}=~"[^"]+"', text), (label, text)


def test_the_answers_of_a_tick_are_bounded_by_what_the_fleet_can_need() -> None:
    """A small fleet does not wait for 32 MiB; ten thousand pods have room for 15 sums each."""
    assert answer_bytes(2, 1 << 30) < 5 << 20
    assert answer_bytes(10_000, 1 << 30) > 10_000 * 15 * 300
    assert answer_bytes(10_000_000, 1 << 20) == 1 << 20


def test_values_left_out_are_optional_ones() -> None:
    """What the test above takes for dispensable is what the table of series says."""
    assert "fleetkeeper_memory_used_ratio" in OPTIONAL

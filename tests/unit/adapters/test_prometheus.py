"""Prometheus from the operator's side: bounded, checked, fanned out. Faults come from a loopback server."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fleetkeeper.adapters.prometheus import Prometheus, PrometheusError, PrometheusSettings
from fleetkeeper.adapters.prometheus.answers import Fan
from fleetkeeper.adapters.prometheus.queries import (
    BACKLOG,
    DISPUTED,
    TIMES,
    bucket_matcher,
    label_value,
    queries_for,
)
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.series_map import SHOWN, STEP_CLASSES
from tests.support.autoscale.control_cases import NOW, sample
from tests.support.autoscale.engine_metrics import metrics_series

EDGES = Edges(0.5, 0.05)
CHAT = ("team-a", "chat-0")
CHAT_SERVICE = ("team-a", "chat")
PODS = {("team-a", f"chat-{i}"): EDGES for i in range(2)}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def asked(
    handler: Handler, tmp_path: Path | None = None, *, whole: bool = False, **changes: Any
) -> Any:
    """One tick against a server with this handler: its samples, or the whole reading."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    settings = PrometheusSettings(url, **({"deadline_s": 2.0} | changes))
    prometheus = Prometheus(settings)
    try:
        reading = await prometheus.observe_samples(PODS, NOW, step_class="decode")
        return reading if whole else reading.samples
    finally:
        await prometheus.close()
        await runner.cleanup()


def row(value: object = "1", **labels: str) -> dict[str, Any]:
    """A series of pod chat-0."""
    metric = {"namespace": "team-a", "pod": "chat-0"} | labels
    return {"metric": metric, "value": [NOW, value]}


def answer(rows: list[Any]) -> web.Response:
    """A vector."""
    return web.json_response(
        {"status": "success", "data": {"resultType": "vector", "result": rows}}
    )


async def test_twelve_queries_a_tick_at_one_instant() -> None:
    """Whatever the number of services; eleven where the step-time model is left out."""
    seen: list[tuple[str, str]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.query["query"], request.query["time"]))
        return answer([])

    assert await asked(handler) == {}
    assert len(seen) == 12
    assert {instant for _, instant in seen} == {f"{NOW:.3f}"}
    many = [Edges(0.1 * i, 0.01 * i) for i in range(1, 100)]
    assert len(queries_for(many, step_class="prefill")) == 12
    assert len(queries_for(many)) == 11


BATCH = 'namespace="fleetkeeper-system"'


async def test_backlogs_are_read_by_one_query_with_a_selector_of_its_own() -> None:
    """Only with that selector; the namespaces of the fleet are those of services, not of the pod."""
    assert BACKLOG not in {query.name for query in queries_for([EDGES], selector='job="engines"')}
    (query,) = (
        query
        for query in queries_for([EDGES], selector='job="engines"', batch_selector=BATCH)
        if query.name == BACKLOG
    )
    assert not query.required
    text = query.text(["team-a", "team-b"])
    assert text.count(BATCH) == 2
    assert text.count('service_namespace=~"team-a|team-b"') == 2
    assert "engines" not in text


async def read_backlogs(rows: list[Any], fails: bool = False) -> Any:
    """The reading of a tick in which the query of the backlogs has these rows."""

    async def handler(request: web.Request) -> web.Response:
        query = request.query["query"]
        if "backlog" in query:
            return web.Response(status=400) if fails else answer(rows)
        if query.startswith("max by (namespace, pod) (timestamp"):
            return answer([row(str(NOW - 1))])
        limits = [row("64", __name__="fleetkeeper_limit_sequences", kind="effective")]
        is_asked = "limit_" in query and not query.startswith("count")
        return answer(limits if is_asked else [])

    return await asked(handler, whole=True, batch_selector=BATCH)


def backlog_row(series: str, value: str, name: str = "chat", namespace: str = "team-a") -> Any:
    """A row of the query; the time has no name of a series."""
    own = {"scraped": "1"} if series == "time" else {"__name__": f"fleetkeeper_batch_{series}"}
    labels = {"service_namespace": namespace, "inference_service": name}
    return {"metric": own | labels, "value": [NOW, value]}


WHOLE = {
    "backlog_tokens": "5e6", "deadline_timestamp_seconds": str(NOW + 60),
    "required_tokens_per_second": "NaN", "time": str(NOW - 9),
}  # fmt: skip


async def test_a_backlog_is_taken_if_it_is_whole_and_of_a_namespace_of_the_fleet() -> None:
    """NaN is judged later. Whatever else the answer has is dropped."""
    rows = [backlog_row(series, value) for series, value in WHOLE.items()]
    rows += [backlog_row(series, value, "code") for series, value in WHOLE.items()][:3]
    rows += [backlog_row(*item, "chat", "team-x") for item in WHOLE.items()]
    reading = await read_backlogs([*rows, *HOSTILE_ROWS])
    assert reading.backlogs.keys() == {CHAT_SERVICE}
    backlog = reading.backlogs[CHAT_SERVICE]
    assert (backlog.tokens, backlog.deadline, backlog.time) == (5e6, NOW + 60, NOW - 9)
    assert math.isnan(backlog.tokens_per_s)
    assert reading.samples.keys() == {CHAT}


async def test_a_failed_query_of_backlogs_costs_nothing_else() -> None:
    reading = await read_backlogs([], fails=True)
    assert reading.backlogs == {}
    assert reading.samples.keys() == {CHAT}
    assert [problem.partition(":")[0] for problem in reading.problems] == [BACKLOG]


def test_the_sums_of_one_class_of_steps_are_asked_for_at_a_time() -> None:
    """Decode-only steps bear no prefill tokens: their sums of them are not asked for."""
    decode, prefill = (queries_for([EDGES], step_class=name)[-1].text() for name in STEP_CLASSES)
    assert 'step_class=~"decode"' in decode
    assert "prefill" not in decode
    assert 'step_class=~"prefill"' in prefill
    assert "prefill_prefill" in prefill


async def test_series_are_fanned_out_to_pods() -> None:
    """By namespace and pod; with the scrape's own time; unknown ones dropped."""

    async def handler(request: web.Request) -> web.Response:
        query = request.query["query"]
        if query.startswith("count"):
            return answer([])
        if "timestamp" in query:
            return answer(
                [
                    row(str(NOW - 3)),
                    row(str(NOW - 2), pod="chat-1"),
                    row(str(NOW), namespace="team-b"),
                ]
            )
        if "limit_" in query:
            name = "fleetkeeper_limit_sequences"
            return answer(
                [
                    row("64", __name__=name, kind="effective"),
                    row("32", __name__=name, kind="effective", pod="chat-1"),
                    row("9", __name__=name, kind="effective", pod="ghost"),
                ]
            )
        if "bucket" in query and "queue_wait" in query:
            name = "fleetkeeper_queue_wait_seconds_bucket"
            return answer(
                [
                    row("7", __name__=name, tier="standard", le="0.5"),
                    row("3", __name__=name, tier="standard", le="0.25"),
                ]
            )
        return answer([])

    samples = await asked(handler)
    by_pod = {sample.pod: sample for sample in samples.values()}
    assert set(by_pod) == {"chat-0", "chat-1"}
    assert by_pod["chat-0"].time == NOW - 3
    assert by_pod["chat-0"].gauges.limit_sequences == 64
    assert by_pod["chat-0"].counters.wait_within_standard == 7
    assert by_pod["chat-1"].gauges.limit_sequences == 32
    assert "fleetkeeper_steps_total" in by_pod["chat-0"].missing


BAD_BODIES = [
    b"",
    b"<html>Bad gateway</html>",
    b"[]",
    b"7",
    b"null",
    b"{}",
    b'{"status":"success"}',
    b'{"data":{}}',
    b'{"data":{"result":7}}',
    b'{"data":{"result":{"a":1}}}',
    b"\xff\xfe\x00",
    b'{"status":"success","data":{"result":[',
    b"[" * 200_000,
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: repr(body[:60]))
async def test_garbage_is_an_error(body: bytes) -> None:
    """Never an empty answer, which would read as no pods."""

    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    with pytest.raises(PrometheusError):
        await asked(handler)


@pytest.mark.parametrize("status", [301, 302, 400, 401, 403, 404, 422, 429, 500, 502, 503, 504])
async def test_every_other_status_is_an_error(status: int) -> None:
    """Redirects are not followed; a Retry-After of an hour is not obeyed."""

    async def handler(_: web.Request) -> web.Response:
        return web.Response(
            status=status, headers={"Location": "http://127.0.0.1:9/", "Retry-After": "3600"}
        )

    began = time.monotonic()
    with pytest.raises(PrometheusError):
        await asked(handler)
    assert time.monotonic() - began < 60


async def test_short_failures_are_retried() -> None:
    """One 503 a query."""
    failed: set[str] = set()

    async def handler(request: web.Request) -> web.Response:
        query = request.query["query"]
        if query not in failed:
            failed.add(query)
            return web.Response(status=503)
        return answer([])

    assert await asked(handler, deadline_s=20.0) == {}


async def test_a_large_answer_is_cut_off() -> None:
    """At the limit, not after it was read."""
    sent = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for _ in range(160):
                await response.write(b" " * 65_536)
                sent += 65_536
        except ConnectionError:
            pass
        return response

    with pytest.raises(PrometheusError, match="larger than 1000000 bytes"):
        await asked(handler, response_bytes=1_000_000, deadline_s=20.0)
    assert sent < 10 * 160 * 65_536


@pytest.mark.promise("bounded-numbers")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["silent", "dripping"])
async def test_a_slow_server_costs_the_deadline(kind: str) -> None:
    """Silent, or a byte now and then."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if kind == "dripping":
            await response.prepare(request)
        for _ in range(200):
            await asyncio.sleep(0.2)
            if kind == "dripping":
                await response.write(b" ")
        return response

    began = time.monotonic()
    with pytest.raises(PrometheusError):
        await asked(handler, deadline_s=1.0)
    assert time.monotonic() - began < 20


async def test_nobody_there_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """Connection refused. No library logs a line per attempt: that would be 30 lines a tick."""
    caplog.set_level("INFO")
    prometheus = Prometheus(PrometheusSettings("http://127.0.0.1:9", deadline_s=2.0))
    with pytest.raises(PrometheusError):
        await prometheus.observe_samples(PODS, NOW)
    await prometheus.close()
    assert caplog.text == ""


async def test_the_token_is_read_anew_and_sent(tmp_path: Path) -> None:
    """And a missing one is an error, without its text."""
    file, seen = tmp_path / "token", set()
    file.write_text("secret-1\n")

    async def handler(request: web.Request) -> web.Response:
        seen.add(request.headers.get("Authorization"))
        return answer([])

    await asked(handler, token_file=file)
    file.write_text("secret-2\n")
    await asked(handler, token_file=file)
    assert seen == {"Bearer secret-1", "Bearer secret-2"}
    file.unlink()
    with pytest.raises(PrometheusError, match="token file"):
        await asked(handler, token_file=file)


@pytest.mark.promise("no-addresses")
async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the variables say."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    async def handler(_: web.Request) -> web.Response:
        return answer([])

    assert await asked(handler) == {}


HOSTILE_ROWS: list[object] = [
    None,
    7,
    "x",
    [],
    {},
    {"metric": 7, "value": [0, "1"]},
    {"metric": {}, "value": 7},
    {"metric": {}, "value": [1]},
    {"metric": {}, "value": [0, "abc"]},
    {"metric": {}, "value": [0, None]},
    {"metric": {}, "value": [0, {}]},
    {"value": [0, "1"]},
    {"metric": {"namespace": "team-a", "pod": []}, "value": [0, "1"]},
    {"metric": {"namespace": "team-a", "pod": "chat-0", "tier": {}}, "value": [0, "1"]},
    {"metric": {"namespace": "team-a", "pod": "chat-0"}, "value": "12"},
    {"metric": {"namespace": "team-a", "pod": "chat-0"}, "value": [0, 10**400]},
]


@pytest.mark.parametrize("bad", HOSTILE_ROWS, ids=str)
def test_one_bad_row_spoils_no_other(bad: object) -> None:
    """It is left out."""
    name = "fleetkeeper_steps_total"
    fan = Fan(PODS)
    fan.take(TIMES, [bad, row(str(NOW))])
    fan.take("steps", [bad, row("41", __name__=name), bad])
    assert fan.reading().samples[CHAT].counters.steps == 41


@pytest.mark.parametrize(
    ("value", "want"),
    [
        ('a"b', 'a\\"b'),
        ("a\\b", "a\\\\b"),
        ("a\nb", "a\\nb"),
        ('"} or vector(0) #', '\\"} or vector(0) #'),
        ("plain", "plain"),
    ],
)
def test_label_values_are_escaped(value: str, want: str) -> None:
    """Nothing breaks out of its quotes."""
    assert label_value(value) == want


def test_bucket_edges_match_both_spellings() -> None:
    """Prometheus 3 writes 1.0 where older ones wrote 1; dots are literal."""
    assert set(bucket_matcher([1.0]).split("|")) == {"1", "1\\\\.0"}
    assert bucket_matcher([0.5]) == "0\\\\.5"


async def test_series_that_no_decision_uses_cost_no_pod_its_sample() -> None:
    """Neither if their query fails, nor if a pod has two of one name."""

    async def handler(request: web.Request) -> web.Response:
        query = request.query["query"]
        if "time_to_first_token" in query:
            return web.json_response({"status": "error", "error": "too much"}, status=400)
        if "timestamp(" in query:
            return answer([row(f"{NOW}")])
        names = re.search(r'__name__=~"(.+?)"', query)
        assert names is not None
        return answer(
            [
                row(str(value), __name__=name, **labels)
                for name, labels, value in metrics_series(sample(NOW), EDGES)
                if re.fullmatch(names[1], name) and " > 1" not in query
            ]
        )

    named = {name.removeprefix("fleetkeeper_") for name in SHOWN}
    (disputed,) = (query.text() for query in queries_for([EDGES]) if query.name == DISPUTED)
    assert not [name for name in named if name in disputed]
    assert not [
        query for query in queries_for([EDGES]) if query.required and query.name == "latencies"
    ]
    (found,) = (await asked(handler)).values()
    assert (found.missing, found.latencies) == ((), None)


async def test_a_failed_query_opens_no_engine_and_lets_none_sleep() -> None:
    """A sample without this series says that its engine demands no grant, or that it has requests."""
    wanted = sample(NOW)
    wanted = replace(wanted, gauges=wanted.gauges._replace(grants_demanded=1.0, idle_s=900.0))
    optional = [
        query.text() for query in queries_for([EDGES], step_class="decode") if not query.required
    ]

    async def handler(request: web.Request) -> web.Response:
        query = request.query["query"]
        if query.replace(', namespace=~"team-a"', "") in optional:
            failed.append(query)
            return web.json_response({"status": "error", "error": "too slow"}, status=400)
        if "timestamp" in query:
            return answer([row(f"{NOW}")])
        names = re.search(r'__name__=~"(.+?)"', query)
        assert names is not None
        return answer(
            [
                row(str(value), __name__=name, **labels)
                for name, labels, value in metrics_series(wanted, EDGES)
                if re.fullmatch(names[1], name)
            ]
        )

    failed: list[str] = []
    (found,) = (await asked(handler)).values()
    assert len(set(failed)) == len(optional)
    assert (found.gauges.grants_demanded, found.gauges.idle_s) == (1.0, 0.0)
    optional[:] = [query for query in optional if query.startswith("count")]
    (found,) = (await asked(handler)).values()
    assert found.gauges.idle_s == 900.0

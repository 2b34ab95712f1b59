"""Spans of admission: parentage, outcome, and what they cost and say when nobody takes them."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import SpanKind, StatusCode

from fleetkeeper_engine.in_vllm.http.asgi import App, Receive, Scope, Send
from fleetkeeper_engine.in_vllm.http.middleware import TierMiddleware
from fleetkeeper_engine.in_vllm.http.span_export import (
    LOG_PERIOD_S,
    ReportingExporter,
    start_tracer,
)
from fleetkeeper_engine.in_vllm.http.tracing import TracedTierMiddleware
from fleetkeeper_engine.in_vllm.vllm_settings import INTERNAL_HEADER, VllmSettings
from fleetkeeper_engine.shm.layout import SupervisorBlock
from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.supervisor.launch.argv import desired_environment
from tests.support.engine.engine_documents import a_document
from tests.support.engine.middleware_calls import Call, StandInVllm
from tests.support.guards import GUARD_S
from tests.support.services.trace_collector import Collector
from tests.unit.engine.test_argv import LAUNCH, PLAN

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT = "b7ad6b7169203331"
SAMPLED = (b"traceparent", f"00-{TRACE}-{CLIENT}-01".encode())
NOT_SAMPLED = (b"traceparent", f"00-{TRACE}-{CLIENT}-00".encode())
SECRET = "a-secret-word-of-the-prompt"
BODY = f'{{"prompt": "{SECRET}"}}'.encode()

Make = Callable[..., TracedTierMiddleware]


class Vllm(StandInVllm):
    """Keeps the headers of what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.headers: list[dict[str, str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = {str(k, "latin-1"): str(v, "latin-1") for k, v in scope["headers"]}
        assert len(found) == len(scope["headers"]), "vLLM reads the first of two headers"
        self.headers.append(found)
        await super().__call__(scope, receive, send)


@pytest.fixture
def vllm() -> Vllm:
    return Vllm()


@pytest.fixture
def region(tmp_path: Path) -> Region:
    return Region.create(tmp_path / "region")


@pytest.fixture
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def make(vllm: Vllm, region: Region, exported: InMemorySpanExporter) -> AsyncIterator[Make]:
    made: list[TierMiddleware] = []

    def build(ratio: float = 1.0, **settings: Any) -> TracedTierMiddleware:
        provider = TracerProvider(sampler=ParentBasedTraceIdRatio(ratio), resource=Resource({}))
        provider.add_span_processor(SimpleSpanProcessor(exported))

        def tiers(app: App) -> TierMiddleware:
            values = {"max_sequences": 4, "min_sequences": 1, **settings}
            made.append(TierMiddleware(app, VllmSettings(**values), region))
            return made[-1]

        return TracedTierMiddleware(vllm, provider.get_tracer("test"), tiers)

    yield build
    for app in made:
        if app._dispatcher._ticker is not None:
            app._dispatcher._ticker.cancel()


def only(exported: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exported.get_finished_spans()
    return span


def outcome(span: ReadableSpan) -> tuple[Any, ...]:
    """Outcome, reason and status."""
    names = ("fleetkeeper.admission.outcome", "fleetkeeper.admission.reason")
    found = told(span)
    return (*(found.get(name) for name in names), found.get("http.response.status_code"))


def ids(span: ReadableSpan) -> tuple[str, str]:
    """The trace's and the span's own, as headers have them."""
    assert span.context is not None
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


def sampled(traceparent: str) -> bool:
    """What a header's flags say; another flag says that the trace's number is random."""
    return bool(int(traceparent.rpartition("-")[2], 16) & 1)


def told(span: ReadableSpan) -> dict[str, Any]:
    """The attributes, without the time."""
    found = dict(span.attributes or {})
    found.pop("fleetkeeper.admission.wait_seconds", None)
    return found


async def test_the_span_of_admission_is_between_the_clients_and_vllms(
    make: Make, vllm: Vllm, exported: InMemorySpanExporter
) -> None:
    given = [SAMPLED, (b"tracestate", b"vendor=1"), (b"x-inference-tier", b"batch")]
    assert (await Call(make(), BODY, headers=given).answer())[0] == 200
    span = only(exported)
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, CLIENT)
    assert span.kind is SpanKind.SERVER
    assert vllm.headers[0]["traceparent"] == f"00-{TRACE}-{ids(span)[1]}-01"
    assert vllm.headers[0]["tracestate"] == "vendor=1"
    assert told(span) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "gen_ai.operation.name": "text_completion",
        "fleetkeeper.tier": "batch",
        "fleetkeeper.admission.outcome": "admitted",
    }
    assert SECRET not in span.to_json()


async def test_the_wait_is_the_time_in_the_queue_and_the_span_ends_with_it(
    make: Make, vllm: Vllm, exported: InMemorySpanExporter
) -> None:
    """Six fit in, the seventh waits until the first has gone."""
    app = make()
    vllm.go.clear()
    calls = [Call(app) for _ in range(6)]
    await vllm.until_taken(6)
    exported.clear()
    late = Call(app, headers=[(b"x-inference-tier", b"realtime")])
    await asyncio.sleep(0.2)
    assert exported.get_finished_spans() == ()
    calls[0].hang_up()
    await vllm.until_taken(7)
    span = only(exported)
    assert not late.task.done(), "the span ends at the release, not with the answer"
    wait = dict(span.attributes or {})["fleetkeeper.admission.wait_seconds"]
    assert isinstance(wait, float)
    assert wait >= 0.15
    assert span.start_time is not None
    assert span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 >= wait - 0.01
    vllm.go.set()
    await asyncio.gather(late.task, *(call.task for call in calls))


async def test_a_refused_request_says_why_and_when_to_come_again(
    make: Make, vllm: Vllm, region: Region, exported: InMemorySpanExporter
) -> None:
    region.write_supervisor(SupervisorBlock(closed=(False, True, False)))
    status, headers, _ = await Call(make(), headers=[SAMPLED]).answer()
    span = only(exported)
    assert (status, vllm.headers) == (429, [])
    assert told(span) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "gen_ai.operation.name": "text_completion",
        "fleetkeeper.tier": "standard",
        "fleetkeeper.admission.outcome": "refused",
        "fleetkeeper.admission.reason": "tier_closed",
        "fleetkeeper.admission.retry_after_seconds": int(headers["retry-after"]),
        "http.response.status_code": 429,
    }
    assert span.status.status_code is StatusCode.UNSET, "the client's, as HTTP's conventions say"


@pytest.mark.parametrize(
    ("tier", "body", "expected"),
    [
        (b"gold", BODY, ("refused", "unknown_tier", 400)),
        (b"", b'{"n": 99, "prompt": "x"}', ("refused", "too_many_sequences", 422)),
        (b"", b"{oops", ("refused", "invalid_json", 400)),
    ],
)
async def test_what_is_wrong_with_a_request_is_in_its_span(
    make: Make, exported: InMemorySpanExporter, tier: bytes, body: bytes, expected: tuple[Any, ...]
) -> None:
    """A priority of the client's makes no request look admitted."""
    given = [(b"x-inference-tier", tier), (b"x-vllm-priority", b"-5")]
    await Call(make(), body, headers=given).answer()
    span = only(exported)
    assert outcome(span) == expected
    assert span.status.is_ok


async def test_a_draining_replica_is_an_error_in_the_trace(
    make: Make, region: Region, exported: InMemorySpanExporter
) -> None:
    region.write_supervisor(SupervisorBlock(draining=True))
    assert (await Call(make()).answer())[0] == 503
    span = only(exported)
    assert outcome(span) == ("refused", "draining", 503)
    assert span.status.status_code is StatusCode.ERROR


async def test_a_full_queue_and_a_hang_up_in_it(
    make: Make, vllm: Vllm, exported: InMemorySpanExporter
) -> None:
    app = make(standard_queue_limit=1)
    vllm.go.clear()
    calls = [Call(app) for _ in range(6)]
    await vllm.until_taken(6)
    exported.clear()
    waiting = Call(app)
    await asyncio.sleep(0)
    assert (await Call(app).answer())[0] == 429
    waiting.hang_up()
    await waiting.task
    outcomes = [outcome(span)[0] for span in exported.get_finished_spans()]
    assert outcomes == ["refused", "cancelled"]
    vllm.go.set()
    await asyncio.gather(*(call.task for call in calls))


async def test_without_the_key_nobody_causes_spans(
    make: Make, exported: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k1")
    assert (await Call(make(), headers=[SAMPLED]).answer())[0] == 401
    assert exported.get_finished_spans() == ()


async def test_a_request_that_its_client_does_not_sample_is_sampled_nowhere(
    make: Make, vllm: Vllm, exported: InMemorySpanExporter
) -> None:
    """vLLM follows the header: it says no, in the client's trace."""
    assert (await Call(make(), headers=[NOT_SAMPLED]).answer())[0] == 200
    assert exported.get_finished_spans() == ()
    version, trace, _, flags = vllm.headers[0]["traceparent"].split("-")
    assert (version, trace, flags) == ("00", TRACE, "00")


@pytest.mark.parametrize("given", [[], [(b"traceparent", b"00-nonsense-01")]])
async def test_without_a_context_the_ratio_decides_for_vllm_too(
    make: Make, vllm: Vllm, exported: InMemorySpanExporter, given: list[tuple[bytes, bytes]]
) -> None:
    assert (await Call(make(0.0), headers=given).answer())[0] == 200
    assert exported.get_finished_spans() == ()
    assert not sampled(vllm.headers[0]["traceparent"])
    assert (await Call(make(1.0), headers=given).answer())[0] == 200
    span = only(exported)
    assert span.parent is None
    assert tuple(vllm.headers[1]["traceparent"].split("-")[1:3]) == ids(span)
    assert sampled(vllm.headers[1]["traceparent"])


@pytest.mark.parametrize(
    "scope",
    [
        {"path": "/health", "method": "GET"},
        {"path": "/v1/models", "method": "GET"},
        {"path": "/tokenize"},
        {"headers": [(INTERNAL_HEADER.encode(), b"secret"), SAMPLED]},
    ],
)
async def test_only_what_admission_decides_has_spans(
    make: Make, exported: InMemorySpanExporter, scope: dict[str, Any]
) -> None:
    assert (await Call(make(internal_token="secret"), **scope).answer())[0] == 200
    assert exported.get_finished_spans() == ()


def test_off_neither_loads_the_sdk_nor_our_spans() -> None:
    """The classes that vLLM loads without `tracing` in the document, in a process of their own."""
    program = (
        "import sys\n"
        "from fleetkeeper_engine.in_vllm import plugin, scheduler\n"
        "from fleetkeeper_engine.in_vllm.http.middleware import TierMiddleware\n"
        "from fleetkeeper_engine.supervisor import supervisor\n"
        "TierMiddleware(lambda *_: None)\n"
        "print([name for name in sys.modules if 'opentelemetry' in name or 'tracing' in name\n"
        "       and name.startswith('fleetkeeper')])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"


class Failing(SpanExporter):
    """Takes spans when told."""

    def __init__(self) -> None:
        self.takes = False

    def export(self, spans: object) -> SpanExportResult:  # noqa: ARG002 - as the SDK's
        return SpanExportResult.SUCCESS if self.takes else SpanExportResult.FAILURE


def test_losses_are_logged_at_once_then_once_a_minute_and_their_end_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now, exporter = 0.0, Failing()
    reporting = ReportingExporter(exporter, lambda: now)
    caplog.set_level(logging.INFO, "vllm.fleetkeeper")
    spans: list[ReadableSpan] = [ReadableSpan("a"), ReadableSpan("b")]
    for _ in range(48):
        reporting.export(spans)
        now += LOG_PERIOD_S / 24
    exporter.takes = True
    reporting.export(spans)
    reporting.export(spans)
    assert [record.message.partition(", ")[2] for record in caplog.records] == [
        "lost=2 so far; requests are not affected",
        "lost=50 so far; requests are not affected",
        "lost=96 so far",
    ]


class Hanging(SpanExporter):
    """Takes no span until it is released."""

    def __init__(self) -> None:
        self.called, self.released = threading.Event(), threading.Event()
        self.taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.called.set()
        self.released.wait(GUARD_S)
        self.taken += len(spans)
        return SpanExportResult.SUCCESS


async def test_no_request_waits_for_a_collector_that_hangs_and_what_does_not_fit_is_dropped(
    vllm: Vllm, region: Region
) -> None:
    """The first export hangs from the first request to the last."""
    exporter = Hanging()
    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(1.0), resource=Resource({}))
    processor = BatchSpanProcessor(
        exporter, max_queue_size=16, max_export_batch_size=4, schedule_delay_millis=10
    )
    provider.add_span_processor(processor)
    app = TracedTierMiddleware(
        vllm,
        provider.get_tracer("test"),
        lambda inner: TierMiddleware(inner, VllmSettings(max_sequences=4), region),
    )
    try:
        assert (await Call(app).answer())[0] == 200
        assert await asyncio.to_thread(exporter.called.wait, GUARD_S)
        for _ in range(100):
            assert (await Call(app).answer())[0] == 200
        assert exporter.taken == 0
    finally:
        exporter.released.set()
        await asyncio.to_thread(provider.shutdown)
    assert 16 < exporter.taken <= 16 + 4


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_spans_reach_a_collector_by_the_variables_of_the_supervisor(
    vllm: Vllm, region: Region, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """The same variables configure vLLM: endpoint, protocol, sampling and what names the service."""
    collector = Collector(protocol)
    tracing = {
        "endpoint": collector.endpoint,
        "protocol": protocol,
        "sampleRatio": 1,
        "service": "chat",
        "namespace": "team-a",
    }
    for name, value in _environment(tracing).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")

    def tiers(app: App) -> TierMiddleware:
        return TierMiddleware(app, VllmSettings(), region)

    try:
        app = TracedTierMiddleware(vllm, start_tracer(), tiers)
        assert (await Call(app, BODY).answer())[0] == 200
        (span,) = await asyncio.to_thread(collector.wait_for, lambda _: True)
    finally:
        collector.stop()
    assert span.name == "fleetkeeper.admission"
    assert span.parent == ""
    assert SECRET.encode() not in span.raw
    wanted = {
        "service.name": "chat",
        "service.namespace": "team-a",
        "service.instance.id": "uid-1",
        "k8s.pod.name": "chat-engine-1",
    }
    assert wanted.items() <= span.resource.items()


def _environment(tracing: dict[str, Any]) -> dict[str, str]:
    pod = {"POD_UID": "uid-1", "HOSTNAME": "chat-engine-1"}
    child = desired_environment(a_document(tracing=tracing), PLAN, LAUNCH, pod)
    return {name: value for name, value in child.items() if name.startswith("OTEL_")}

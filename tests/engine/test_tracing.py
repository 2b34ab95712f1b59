"""A request's trace through a real vLLM: the client's span, admission's, vLLM's; and a lost collector."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

import pytest
import requests

from fleetkeeper_engine.in_vllm.http.span_export import LOG_PERIOD_S
from tests.support.engine.supervised_engine import RunningEngine, StartEngine
from tests.support.services.trace_collector import CollectedSpan, Collector

SECRET = "zirconium"
ADMISSION, VLLM = "fleetkeeper.admission", "llm_request"
LOST = "tracing: the collector does not take spans"

pytestmark = pytest.mark.timeout(1200)
"""The first test waits for the engine to start."""


@dataclass
class Client:
    """A caller with a span of its own."""

    trace: str
    span: str

    @classmethod
    def new(cls) -> Client:
        return cls(secrets.token_hex(16), secrets.token_hex(8))

    def ask(
        self, engine: RunningEngine, tier: str = "standard", *, sampled: bool = True, n: int = 1
    ) -> requests.Response:
        """One completion of 4 tokens, n times."""
        return engine.session.post(
            f"{engine.url}/v1/completions",
            json={
                "model": "tiny",
                "prompt": SECRET,
                "max_tokens": 4,
                "ignore_eos": True,
                "n": n,
            },
            headers={
                "traceparent": f"00-{self.trace}-{self.span}-{sampled:02d}",
                "X-Inference-Tier": tier,
                "X-Request-Id": f"request-{self.span}",
            },
            timeout=300,
        )

    def owns(self, span: CollectedSpan) -> bool:
        return span.trace == self.trace


def test_one_trace_from_the_client_through_admission_to_vllm(
    engine: RunningEngine, collector: Collector
) -> None:
    client, silent = Client.new(), Client.new()
    assert silent.ask(engine, sampled=False).status_code == 200
    assert engine.complete(2).status_code == 200, "without a context: the ratio is 0"
    assert client.ask(engine, "batch").status_code == 200
    spans = {span.name: span for span in collector.wait_for(client.owns, 2)}
    assert set(spans) == {ADMISSION, VLLM}
    admission, vllm = spans[ADMISSION], spans[VLLM]
    assert (admission.parent, vllm.parent) == (client.span, admission.span)
    told = admission.attributes
    assert 0 <= told.pop("fleetkeeper.admission.wait_seconds") < 10
    assert told == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "gen_ai.operation.name": "text_completion",
        "fleetkeeper.tier": "batch",
        "fleetkeeper.admission.outcome": "admitted",
    }
    assert vllm.attributes["gen_ai.usage.completion_tokens"] == 4
    assert f"request-{client.span}" in vllm.attributes["gen_ai.request.id"]
    assert admission.start_ns <= admission.end_ns <= vllm.start_ns <= vllm.end_ns
    wanted = {"service.name": "tiny-service", "service.namespace": "team-a"}
    for span in (admission, vllm):
        assert {**wanted, "service.instance.id": engine.uid}.items() <= span.resource.items()
        assert SECRET.encode() not in span.raw
    assert {span.trace for span in collector.spans} == {client.trace}


def test_every_sequence_of_a_request_is_a_child_of_its_admission(
    engine: RunningEngine, collector: Collector
) -> None:
    client = Client.new()
    assert client.ask(engine, n=3).status_code == 200
    spans = collector.wait_for(client.owns, 4)
    (admission,) = [span for span in spans if span.name == ADMISSION]
    assert [span.parent for span in spans if span.name == VLLM] == [admission.span] * 3


def test_a_refused_request_ends_in_the_span_of_admission(
    engine: RunningEngine, collector: Collector
) -> None:
    client = Client.new()
    closed = {"realtime": 1.0, "standard": 0.0, "batch": 1.0}
    assert engine.put_limits(64, 2048, admit=closed).status_code == 200
    try:
        engine.wait_for(lambda: engine.complete(1).status_code == 429, "a closed tier")
        answer = client.ask(engine)
    finally:
        engine.put_limits(64, 2048)
    assert answer.status_code == 429
    (span,) = collector.wait_for(client.owns)
    assert (span.name, span.parent) == (ADMISSION, client.span)
    told = span.attributes
    assert told["fleetkeeper.admission.outcome"] == "refused"
    assert told["fleetkeeper.admission.reason"] == "tier_closed"
    assert told["fleetkeeper.admission.retry_after_seconds"] == int(answer.headers["Retry-After"])
    assert told["http.response.status_code"] == 429
    engine.wait_for(lambda: engine.complete(1).status_code == 200, "an open tier")


def test_without_its_collector_the_engine_serves_as_before_and_logs_the_loss(
    engine: RunningEngine, collector: Collector
) -> None:
    """It sends again when the collector is back, and stops cleanly when it is not.

    Last, for it ends the shared engine.
    """
    collector.stop()
    began = time.monotonic()
    lost = Client.new()
    engine.wait_for(
        lambda: lost.ask(engine).status_code == 200 and LOST in engine.log, "a logged loss"
    )
    for _ in range(20):
        assert Client.new().ask(engine).status_code == 200
    assert engine.log.count(LOST) <= 1 + (time.monotonic() - began) / LOG_PERIOD_S
    collector.start()
    back = Client.new()
    engine.wait_for(
        lambda: (
            back.ask(engine).status_code == 200
            and {span.name for span in collector.spans if back.owns(span)} == {ADMISSION, VLLM}
        ),
        "spans after the collector's return",
    )
    engine.wait_for(
        lambda: "tracing: the collector takes spans again" in engine.log, "the line about it"
    )
    collector.stop()
    assert Client.new().ask(engine).status_code == 200
    began = time.monotonic()
    assert engine.stop() == 0
    print(f"stopped in {time.monotonic() - began:.1f} s without a collector")


@pytest.mark.exhaustive
def test_over_http_a_request_without_a_context_begins_a_trace(start: StartEngine) -> None:
    """By the ratio; vLLM follows, and its span is not the root of another trace."""
    collector = Collector("http")
    tracing = {"endpoint": collector.endpoint, "protocol": "http", "sampleRatio": 1}
    try:
        engine = start(sections={"tracing": tracing})
        engine.wait_ready()
        assert engine.complete(3).status_code == 200
        (admission,) = collector.wait_for(lambda span: span.name == ADMISSION)
        # The supervisor's own request at the start has a root of vLLM's.
        (vllm,) = collector.wait_for(lambda span: span.name == VLLM and span.parent)
        assert engine.stop() == 0
    finally:
        collector.stop()
    assert (admission.parent, vllm.parent) == ("", admission.span)
    assert admission.trace == vllm.trace
    assert vllm.resource["service.name"] == "tiny"

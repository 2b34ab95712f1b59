"""The tracer of the middleware, and what is logged if its collector does not take spans.

The supervisor configures it by the standard OTEL_ variables, which vLLM's own tracer reads too. Spans
are sent by a thread of their own from a queue of 2048; what does not fit is dropped, and no request
waits.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

from fleetkeeper_contract.version import VERSION

logger = logging.getLogger("vllm.fleetkeeper")

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
LOG_PERIOD_S = 60.0
_EXPORTERS = "opentelemetry.exporter"


class ReportingExporter(SpanExporter):
    """An exporter that logs losses: the first at once, then at most one line a minute, and the recovery."""

    def __init__(self, exporter: SpanExporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._exporter = exporter
        self._clock = clock
        self._lost = 0
        self._logged: float | None = None
        self._is_loss_known = False
        """A loss was logged, and no recovery since."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; called by the sending thread alone."""
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._delivered()
        else:
            self._failed(len(spans))
        return result

    def shutdown(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Return whether everything was sent."""
        return self._exporter.force_flush(timeout_millis)

    def _failed(self, spans: int) -> None:
        self._lost += spans
        now = self._clock()
        if self._logged is None or now - self._logged >= LOG_PERIOD_S:
            self._logged = now
            self._is_loss_known = True
            logger.warning(
                "tracing: the collector does not take spans, lost=%d so far; requests are not affected",
                self._lost,
            )

    def _delivered(self) -> None:
        if self._is_loss_known:
            self._is_loss_known = False
            logger.info("tracing: the collector takes spans again, lost=%d so far", self._lost)


def start_tracer() -> Tracer:
    """Return the tracer that the OTEL_ variables of this process configure."""
    # Our line replaces theirs, of which two exporters would write several a minute.
    logging.getLogger(_EXPORTERS).setLevel(logging.CRITICAL)
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(ReportingExporter(_exporter())))
    return provider.get_tracer("fleetkeeper", VERSION)


def _exporter() -> SpanExporter:
    if os.environ.get(PROTOCOL) == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 - one of two
            OTLPSpanExporter as OverHttp,
        )

        return OverHttp()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415 - one of two
        OTLPSpanExporter as OverGrpc,
    )

    return OverGrpc()

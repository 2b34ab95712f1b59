"""Spans of admission: `TierMiddleware` between two thin layers, loaded instead of it if tracing is on.

The outer layer starts a span when a request arrives and puts the span's context into the headers, so
that vLLM's own span becomes its child. The inner layer sees the request again when admission has
released it, and ends the span. So the span lasts from arrival to release or refusal, and
`TierMiddleware` knows nothing of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from fleetkeeper_contract.headers import TIER_HEADER
from fleetkeeper_engine.in_vllm.http.access import INTERNAL
from fleetkeeper_engine.in_vllm.http.asgi import (
    App,
    Headers,
    Message,
    Receive,
    Scope,
    Send,
    first_headers,
    without_headers,
)
from fleetkeeper_engine.in_vllm.http.middleware import TierMiddleware, tier_of
from fleetkeeper_engine.in_vllm.http.request_shape import Route, route_of
from fleetkeeper_engine.in_vllm.http.span_export import start_tracer

OUTCOME = "fleetkeeper.admission.outcome"
"""admitted, refused, or cancelled."""
REASON = "fleetkeeper.admission.reason"
"""Attribute of a refusal: the `code` of its error, for example queue_full."""
RETRY_AFTER = "fleetkeeper.admission.retry_after_seconds"
WAIT = "fleetkeeper.admission.wait_seconds"
"""From the last byte of the body to the outcome."""
TIER = "fleetkeeper.tier"

_SPAN = "fleetkeeper.span"
"""Key of the span in the ASGI scope."""
_TIER = TIER_HEADER.lower().encode()
_PRIORITY = b"x-vllm-priority"
_CONTEXT = (b"traceparent", b"tracestate")
_REPLACED = frozenset((*_CONTEXT, _PRIORITY))
_W3C = TraceContextTextMapPropagator()
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_UNAUTHORIZED = 401


class TracedTierMiddleware:
    """`TierMiddleware` whose generation requests have spans."""

    def __init__(
        self,
        app: App,
        tracer: Tracer | None = None,
        tiers: Callable[[App], App] = TierMiddleware,
    ) -> None:
        self._app = app
        self._tracer = tracer or start_tracer()
        self._tiers = tiers(self._inner)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one connection's scope."""
        if (
            scope["type"] != "http"
            or route_of(scope["method"], scope["path"]) is not Route.GENERATION
        ):
            return self._tiers(scope, receive, send)
        headers = first_headers(scope)
        if INTERNAL in headers:  # the supervisor's own
            return self._tiers(scope, receive, send)
        return self._traced(scope, headers, receive, send)

    async def _traced(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        span = self._tracer.start_span(
            "fleetkeeper.admission",
            context=_context_of(headers),
            kind=SpanKind.SERVER,
        )
        scope = without_headers(scope, _REPLACED, _context_headers(span))
        if not span.is_recording():
            # The headers still make vLLM not record.
            await self._tiers(scope, receive, send)
            return
        admission = AdmissionSpan(span, scope["path"], headers.get(_TIER, b""), receive, send)
        scope[_SPAN] = admission
        try:
            await self._tiers(scope, admission.receive, admission.send)
        finally:
            admission.end("cancelled")

    def _inner(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        admission = scope.get(_SPAN)
        if admission is not None:
            admission.end("admitted")
        return self._app(scope, receive, send)


class AdmissionSpan:
    """The span of one request, with the messages from and to its client."""

    def __init__(
        self, span: Span, path: str, tier_name: bytes, receive: Receive, send: Send
    ) -> None:
        self._span: Span | None = span
        self._receive = receive
        self._send = send
        self._body_read: float | None = None
        self._status = 0
        attributes = {"http.request.method": "POST", "http.route": path}
        tier = tier_of(tier_name)
        if tier is not None:
            attributes[TIER] = tier.label
        if path in _OPERATIONS:
            attributes["gen_ai.operation.name"] = _OPERATIONS[path]
        span.set_attributes(attributes)

    async def receive(self) -> Message:
        """Return the client's next message, and note the end of its body."""
        message = await self._receive()
        if self._body_read is None and not message.get("more_body", False):
            self._body_read = time.monotonic()
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Forward a message to the client. Before the span's end it is a refusal."""
        if self._span is not None:
            self._refused(message, self._span)
        return self._send(message)

    def end(self, outcome: str) -> None:
        """End the span, unless it has ended."""
        span, self._span = self._span, None
        if span is None:
            return
        span.set_attribute(OUTCOME, outcome)
        if self._body_read is not None:
            span.set_attribute(WAIT, time.monotonic() - self._body_read)
        span.end()

    def _refused(self, message: Message, span: Span) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if self._status == _UNAUTHORIZED:
                # Not ended, so not sent: a client without the key must not cause spans.
                self._span = None
                return
            span.set_attribute("http.response.status_code", self._status)
            retry_after = first_headers(message).get(b"retry-after")
            if retry_after is not None:
                span.set_attribute(RETRY_AFTER, int(retry_after))
        else:
            span.set_attribute(REASON, json.loads(message["body"])["error"]["code"])
            if self._status >= 500:
                span.set_status(StatusCode.ERROR)
            self.end("refused")


def _context_of(headers: Mapping[bytes, bytes]) -> Context:
    carrier = {
        str(name, "latin-1"): str(headers[name], "latin-1") for name in _CONTEXT if name in headers
    }
    # An empty context, not the current one: a request without headers begins a trace.
    return _W3C.extract(carrier, Context())


def _context_headers(span: Span) -> Headers:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, set_span_in_context(span, Context()))
    return [(name.encode(), value.encode()) for name, value in carrier.items()]

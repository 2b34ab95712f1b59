"""A receiver of OTLP traces, over gRPC or HTTP, that decodes and keeps spans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

import grpc  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from tests.support.engine.engine_environment import free_port
from tests.support.guards import GUARD_S


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it was received."""

    name: str
    trace: str
    span: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    raw: bytes
    """Everything that was sent for it."""


class _Server(Protocol):
    def stop(self) -> None: ...


class Collector:
    """Receives spans until it is stopped, and again after `start`."""

    def __init__(self, protocol: str = "grpc") -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._spans: list[CollectedSpan] = []
        self._arrived = threading.Condition()
        self._serve = _GrpcServer if protocol == "grpc" else _HttpServer
        self.start()

    def start(self) -> None:
        """Open the port."""
        self._server: _Server = self._serve(self.port, self._take)

    @property
    def spans(self) -> list[CollectedSpan]:
        """What has arrived."""
        with self._arrived:
            return list(self._spans)

    def wait_for(
        self, chosen: Callable[[CollectedSpan], object], count: int = 1, timeout_s: float = GUARD_S
    ) -> list[CollectedSpan]:
        """Returns the chosen spans once there are so many.

        Raises:
            AssertionError: when they do not come in time.
        """

        def found() -> list[CollectedSpan]:
            return [span for span in self._spans if chosen(span)]

        with self._arrived:
            if not self._arrived.wait_for(lambda: len(found()) >= count, timeout_s):
                raise AssertionError(
                    f"{len(found())} of {count} spans came in {timeout_s:.0f} s; "
                    f"all: {[(span.name, span.attributes) for span in self._spans]}"
                )
            return found()

    def stop(self) -> None:
        """Closes the port at once."""
        self._server.stop()

    def _take(self, request: ExportTraceServiceRequest) -> None:
        with self._arrived:
            for of in request.resource_spans:
                resource = _values(of.resource.attributes)
                for scope in of.scope_spans:
                    self._spans += [
                        CollectedSpan(
                            name=span.name,
                            trace=span.trace_id.hex(),
                            span=span.span_id.hex(),
                            parent=span.parent_span_id.hex(),
                            start_ns=span.start_time_unix_nano,
                            end_ns=span.end_time_unix_nano,
                            attributes=_values(span.attributes),
                            resource=resource,
                            raw=span.SerializeToString(),
                        )
                        for span in scope.spans
                    ]
            self._arrived.notify_all()


def _values(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}


Take = Callable[[ExportTraceServiceRequest], None]


class _GrpcServer(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, port: int, take: Take) -> None:
        self._take = take
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
            self, self._server
        )
        self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    def Export(
        self, request: ExportTraceServiceRequest, _context: object
    ) -> ExportTraceServiceResponse:
        self._take(request)
        return ExportTraceServiceResponse()

    def stop(self) -> None:
        self._server.stop(grace=None).wait(GUARD_S)


class _HttpServer:
    def __init__(self, port: int, take: Take) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                wanted = (self.path, self.headers["content-type"])
                if wanted == ("/v1/traces", "application/x-protobuf"):
                    take(ExportTraceServiceRequest.FromString(body))
                    self.send_response(200)
                else:
                    self.send_response(404)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_arguments: object) -> None:
                """Write nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

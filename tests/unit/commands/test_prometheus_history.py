"""Range queries of a Prometheus that the user names: bounded, without redirects, credentials in no message."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from fleetkeeper.commands.fleet.prometheus_history import HistoryError, PrometheusHistory
from tests.support.guards import GUARD_S

pytestmark = pytest.mark.slow

ROWS = [{"metric": {"series": "ready"}, "values": [[60, "1"], [120, "2"]]}]


@contextmanager
def prometheus(status: int = 200, **headers: str) -> Iterator[tuple[str, list[str]]]:
    """A server that answers like Prometheus; yields its address and the requests."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            body = json.dumps(
                {"status": "success", "data": {"resultType": "matrix", "result": ROWS}}
            )
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def test_the_answer_is_that_of_one_range_query() -> None:
    with prometheus() as (address, seen):
        history = PrometheusHistory(f"http://{address}", deadline_s=GUARD_S)
        assert history.range("up", 60.0, 120.0, 60.0) == ROWS
    (path,) = seen
    assert urlsplit(path).path == "/api/v1/query_range"
    asked = parse_qs(urlsplit(path).query)
    assert asked == {"query": ["up"], "start": ["60"], "end": ["120"], "step": ["60s"]}


@pytest.mark.parametrize("status", [401, 403, 404, 422, 500, 503])
def test_a_refusal_is_an_error_without_the_password(status: int) -> None:
    with prometheus(status) as (address, _):
        history = PrometheusHistory(f"http://user:s3cr3t@{address}", deadline_s=GUARD_S)
        with pytest.raises(HistoryError, match="Prometheus did not answer") as raised:
            history.range("up", 60.0, 120.0, 60.0)
    assert "s3cr3t" not in str(raised.value)


def test_no_redirect_is_followed() -> None:
    with (
        prometheus() as (other, elsewhere),
        prometheus(302, Location=f"http://{other}/") as (address, _),
    ):
        history = PrometheusHistory(f"http://{address}", deadline_s=GUARD_S)
        with pytest.raises(HistoryError, match="TooManyRedirects"):
            history.range("up", 60.0, 120.0, 60.0)
    assert elsewhere == []


def test_an_answer_that_is_too_large_is_refused() -> None:
    with prometheus() as (address, _):
        history = PrometheusHistory(f"http://{address}", deadline_s=GUARD_S, answer_bytes=10)
        with pytest.raises(HistoryError, match="larger than 10 bytes"):
            history.range("up", 60.0, 120.0, 60.0)


@pytest.mark.parametrize(
    "url", ["prometheus:9090", "ftp://user:s3cr3t@x", "http://", "http://x/?q=1"]
)
def test_an_unusable_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="must be a URL such as") as raised:
        PrometheusHistory(url, deadline_s=GUARD_S)
    assert "s3cr3t" not in str(raised.value)

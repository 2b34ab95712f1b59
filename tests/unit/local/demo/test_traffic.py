"""Load in a thread: everything planned is sent, and `stop` loses nothing that was."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.demo.traffic import Traffic, measure_capacity
from fleetkeeper_local.load.client import Patience
from fleetkeeper_local.load.schedule import Phase, Shape, plan_arrivals

pytestmark = pytest.mark.exhaustive

ANSWER = (
    f"data: {json.dumps({'choices': [{'text': 'a'}]})}\n\n"
    f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': 1}})}\n\n"
    "data: [DONE]\n\n"
).encode()


@pytest.fixture
def base_url() -> Iterator[str]:
    """Serves completions of one token, a tenth of a second each."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(0.1)
            self.send_response(200)
            self.send_header("Content-Length", str(len(ANSWER)))
            self.end_headers()
            self.wfile.write(ANSWER)

        def log_message(self, *_: object) -> None:
            """Silence."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def _traffic(base_url: str, seconds: float, rate: float) -> Traffic:
    arrivals = plan_arrivals([Phase("x1", seconds, rate)], Shape(), 1)
    return Traffic(base_url, "tiny", arrivals, Patience(attempts=1))


def test_everything_planned_is_sent_and_answered(base_url: str) -> None:
    """`wait` returns when the last answer is there."""
    traffic = _traffic(base_url, 1.0, 20.0).start()
    samples = traffic.wait()
    assert traffic.over
    assert len(samples) == traffic.sent > 5
    assert all(sample.outcome.ok for sample in samples)


def test_stop_sends_no_more_and_waits_for_what_is_under_way(base_url: str) -> None:
    """An hour's plan ends at once; nothing that was sent is left without its sample."""
    traffic = _traffic(base_url, 3600.0, 50.0).start()
    while traffic.sent < 10:
        time.sleep(0.01)
    began = time.monotonic()
    samples = traffic.stop()
    assert time.monotonic() - began < 20
    assert len(samples) == traffic.sent >= 10
    assert all(sample.outcome.ok for sample in samples)


def test_leaving_the_block_stops(base_url: str) -> None:
    """Even when the block fails."""
    with pytest.raises(ZeroDivisionError), _traffic(base_url, 3600.0, 5.0) as traffic:
        raise ZeroDivisionError
    assert traffic.over


def test_a_broken_generator_is_told_to_who_waits(base_url: str) -> None:
    """Its own mistakes are no failed requests."""
    traffic = _traffic(base_url, 1.0, 20.0)
    traffic._arrivals = [None]  # type: ignore[list-item]
    with pytest.raises(ExceptionGroup):
        traffic.start().wait()


def test_capacity_is_what_is_answered_while_one_is_always_waiting(base_url: str) -> None:
    """Sixteen at once, a tenth of a second each, are at most 160 a second."""
    capacity = measure_capacity(base_url, "tiny", Shape(), seconds=1.0, warm_up_s=0.2)
    assert 16 <= capacity <= 176


def test_nothing_answered_is_no_capacity(unused_tcp_port: int) -> None:
    """Load of zero requests a second would look like a fine run."""
    with pytest.raises(LocalError, match=f"127.0.0.1:{unused_tcp_port}"):
        measure_capacity(
            f"http://127.0.0.1:{unused_tcp_port}/v1", "tiny", Shape(), seconds=0.2, warm_up_s=0.1
        )

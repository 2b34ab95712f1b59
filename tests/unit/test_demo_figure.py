"""The demo's figure and its numbers: what Prometheus says is what is drawn."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from math import isnan
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest

from fleetkeeper_local.demo.figure import PANELS, draw, with_gaps
from fleetkeeper_local.demo.record import FLEET, OURS, Moment
from fleetkeeper_local.demo.series import Series, queries, read_series
from fleetkeeper_local.errors import LocalError

ROWS = [
    {"metric": {"tier": "batch"}, "values": [[100, "1.5"], [102, "NaN"], [104, "2"]]},
    {"metric": {}, "values": []},
]


@pytest.fixture
def prometheus() -> Iterator[tuple[str, list[dict[str, list[str]]]]]:
    """Answers every range query with the same rows, and remembers what was asked."""
    asked: list[dict[str, list[str]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(parse_qs(urlparse(self.path).query))
            body = json.dumps({"status": "success", "data": {"result": ROWS}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Silence."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def test_series_count_from_the_start_and_leave_out_what_is_no_number(
    prometheus: tuple[str, list[dict[str, list[str]]]],
) -> None:
    """NaN is where nothing was measured: a gap, not a zero."""
    url, asked = prometheus
    lines = read_series(url, "up", 90.0, 110.0)
    assert lines == [Series("batch", ((10.0, 1.5), (14.0, 2.0))), Series("", ())]
    assert (asked[0]["query"], asked[0]["start"]) == (["up"], ["90.000"])


def test_a_silent_prometheus_is_told(unused_tcp_port: int) -> None:
    """With its address."""
    with pytest.raises(LocalError, match=f"127.0.0.1:{unused_tcp_port}"):
        read_series(f"http://127.0.0.1:{unused_tcp_port}", "up", 0.0, 1.0)


def test_every_panel_has_its_query() -> None:
    """And both objectives theirs."""
    assert {name for name, _ in PANELS} <= set(queries("a", "chat"))
    assert all('inference_service="chat"' in text for text in queries("a", "chat").values())


def test_the_figure_is_written_whatever_there_was_to_see(tmp_path: Path) -> None:
    """With all lines, with none, and with marks of both kinds."""
    moments = [Moment(105.0, OURS, "SIGSTOP", "frozen"), Moment(109.0, FLEET, "Replicas 1 -> 2")]
    line = Series("standard", tuple((float(t), t / 7 + 0.1) for t in range(30)))
    full = {name: [line] for name in queries("a", "chat")}
    draw(full, moments, 100.0, tmp_path / "out" / "full.png")
    draw({}, moments, 100.0, tmp_path / "empty.png")
    assert (tmp_path / "out" / "full.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "full.png").stat().st_size > (tmp_path / "empty.png").stat().st_size


def test_no_line_is_drawn_across_what_was_not_measured() -> None:
    """While Prometheus was stopped there is nothing, and nothing is shown."""
    points = with_gaps([(0.0, 1.0), (2.0, 1.0), (30.0, 2.0), (32.0, 2.0)])
    assert [at_s for at_s, _ in points] == [0.0, 2.0, 30.0, 30.0, 32.0]
    assert [isnan(value) for _, value in points] == [False, False, True, False, False]

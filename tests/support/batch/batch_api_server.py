"""A small server that speaks OpenAI's API of files and batches, for tests of clients.

It keeps what it is sent, and does what a test sets: progress, ends, refusals and broken connections.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Live = dict[str, Any]
KEY = "fk_test"
NOW = 1_790_000_000


@dataclass
class BatchServer:
    """The state of the server, which tests read and change."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    batches: dict[str, Live] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""
    headers: list[dict[str, str]] = field(default_factory=list)
    """Headers of each request, with names in lower case."""
    refusals: list[tuple[int, Live, dict[str, str]]] = field(default_factory=list)
    """Status, body and headers of the next requests, before all else."""
    refuse_creation: str = ""
    steps: dict[str, list[Live]] = field(default_factory=dict)
    """By batch: what changes at each later GET of it."""
    cut: set[str] = field(default_factory=set)
    """Files whose content ends after half of it, once."""

    def add_batch(self, batch_id: str, **changes: Any) -> Live:
        """Add a batch as the server would tell it."""
        self.batches[batch_id] = {
            "id": batch_id,
            "object": "batch",
            "endpoint": "/v1/chat/completions",
            "errors": None,
            "input_file_id": "file-in",
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": NOW,
            "expires_at": NOW + 86_400,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": None,
            **changes,
        }
        return self.batches[batch_id]

    def ended(self, batch_id: str, output: bytes, error: bytes | None = None) -> Live:
        """Add a batch that is completed, with its files."""
        self.files["file-out"] = output
        if error is not None:
            self.files["file-err"] = error
        return self.add_batch(
            batch_id,
            status="completed",
            completed_at=NOW + 60,
            output_file_id="file-out",
            error_file_id=None if error is None else "file-err",
            request_counts={"total": 2, "completed": 1, "failed": 1},
        )


@contextmanager
def batch_server() -> Iterator[BatchServer]:
    """Serve until the block ends."""
    state = BatchServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _handler(state: BatchServer) -> type[BaseHTTPRequestHandler]:  # noqa: C901 - one case a route
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def do_DELETE(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            body = self._body()
            path = urlsplit(self.path)
            state.asked.append(f"{self.command} {path.path}")
            state.headers.append({name.lower(): value for name, value in self.headers.items()})
            try:
                if state.refusals:
                    status, told, headers = state.refusals.pop(0)
                    self._send(status, json.dumps(told).encode(), headers)
                    return
                found = self._found(path.path, parse_qs(path.query), body)
            except _Refused as refused:
                error = {"message": str(refused), "type": "invalid_request_error"}
                self._send(refused.status, json.dumps({"error": error}).encode())
                return
            if isinstance(found, bytes):
                self._send_file(path.path.split("/")[3], found)
            else:
                self._send(200, json.dumps(found).encode())

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _send_file(self, file_id: str, data: bytes) -> None:
            if file_id not in state.cut:
                self._send(200, data)
                return
            state.cut.remove(file_id)
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True

        def _found(  # noqa: C901, PLR0911 - one case a route
            self, path: str, query: dict[str, list[str]], body: bytes
        ) -> Live | bytes:
            if self.headers["Authorization"] != f"Bearer {KEY}":
                raise _Refused(401, "Incorrect API key provided.")
            match (self.command, *path.split("/")[2:]):
                case ("POST", "files"):
                    return self._uploaded(body)
                case ("DELETE", "files", file_id):
                    del state.files[file_id]
                    return {"id": file_id, "object": "file", "deleted": True}
                case ("GET", "files", file_id) if file_id in state.files:
                    return _file(file_id, state.files[file_id])
                case ("GET", "files", file_id, "content") if file_id in state.files:
                    return state.files[file_id]
                case ("POST", "batches"):
                    if state.refuse_creation:
                        raise _Refused(400, state.refuse_creation)
                    batch_id = f"batch_{len(state.batches)}"
                    return state.add_batch(batch_id, **json.loads(body))
                case ("GET", "batches"):
                    return _page(list(reversed(state.batches.values())), query)
                case ("GET", "batches", batch_id) if batch_id in state.batches:
                    if state.steps.get(batch_id):
                        state.batches[batch_id].update(state.steps[batch_id].pop(0))
                    return state.batches[batch_id]
                case ("POST", "batches", batch_id, "cancel") if batch_id in state.batches:
                    state.batches[batch_id]["status"] = "cancelling"
                    return state.batches[batch_id]
            raise _Refused(404, f"No such thing: {path}")

        def _uploaded(self, body: bytes) -> Live:
            head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            parts = {
                str(part.get_param("name", header="content-disposition")): part
                for part in BytesParser(policy=HTTP).parsebytes(head + body).iter_parts()
            }
            assert parts["purpose"].get_payload() == "batch"
            file_id = f"file-{len(state.files)}"
            data = parts["file"].get_payload(decode=True)
            assert isinstance(data, bytes)
            state.files[file_id] = data
            return _file(file_id, state.files[file_id], str(parts["file"].get_filename()))

    return Handler


def _file(file_id: str, data: bytes, name: str = "x.jsonl") -> Live:
    return {
        "id": file_id,
        "object": "file",
        "bytes": len(data),
        "created_at": NOW,
        "filename": name,
        "purpose": "batch",
    }


def _page(batches: list[Live], query: dict[str, list[str]]) -> Live:
    limit = int(query.get("limit", ["20"])[0])
    ids = [batch["id"] for batch in batches]
    begin = ids.index(query["after"][0]) + 1 if "after" in query else 0
    data = batches[begin : begin + limit]
    return {"object": "list", "data": data, "has_more": begin + limit < len(batches)}

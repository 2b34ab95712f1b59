"""An API server of a support bundle's tests: recorded objects on loopback, in a thread of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

Answer = tuple[int, bytes]


class Recorded:
    """Answers by path. `asked` has each request, `patched` the body of each patch.

    After `dies_after` requests none is answered.
    """

    def __init__(self, answers: dict[str, object]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.patched: list[tuple[str, object]] = []
        self.dies_after: int | None = None

    def answer(self, target: str) -> Answer | None:
        """Return status and content, or None to close the connection without a response."""
        parts = urlsplit(target)
        query = dict(parse_qsl(parts.query))
        self.asked.append((parts.path, query))
        if self.dies_after is not None and len(self.asked) > self.dies_after:
            return None
        container = query.get("container", "") + ("?previous" if "previous" in query else "")
        found = self.answers.get(f"{parts.path}#{container}" if container else parts.path)
        if found is None:
            return status_of(404, "not found")
        if isinstance(found, tuple):
            return found
        if isinstance(found, list):
            found = {"apiVersion": "v1", "kind": "ThingList", "items": found}
        return 200, found.encode() if isinstance(found, str) else json.dumps(found).encode()


def status_of(code: int, message: str) -> Answer:
    """Return a Status object as the API server does."""
    return code, json.dumps({"kind": "Status", "code": code, "message": message}).encode()


@contextmanager
def recorded_cluster(recorded: Recorded, folder: Path) -> Iterator[Path]:
    """Yield a kubeconfig of a server that gives these answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = recorded.answer(self.path)
            if answer is None:
                self.close_connection = True
                return
            self.send_response(answer[0])
            self.send_header("Content-Length", str(len(answer[1])))
            self.end_headers()
            self.wfile.write(answer[1])

        def do_PATCH(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            recorded.patched.append((self.headers["Content-Type"], json.loads(body)))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    kubeconfig = folder / "kubeconfig"
    url = f"http://127.0.0.1:{server.server_address[1]}"
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "clusters": [{"name": "here", "cluster": {"server": url}}],
                "users": [{"name": "me", "user": {"token": "user-token"}}],
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            }
        )
    )
    try:
        yield kubeconfig
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

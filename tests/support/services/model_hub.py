"""A model hub on loopback: what `snapshot_download` asks for, over HTTP, with revisions and access."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_token_of_a_test"


class ModelHub:
    """Serves one directory as ORG/NAME; another name needs a token, every other is unknown."""

    def __init__(self, directory: Path, name: str, gated: str) -> None:
        self.files = {path.name: path for path in directory.iterdir() if path.is_file()}
        self.name = name
        self.gated = gated
        self.asked: list[str] = []
        """Method and path of every request."""
        self.url = ""

    def answer(self, path: str, token: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        name = self.name if self.name in path else self.gated if self.gated in path else ""
        if token and token != f"Bearer {TOKEN}":
            return 401, {}, b'{"error": "Invalid credentials in Authorization header"}'
        if not name:
            # As the real hub says it to a stranger, who shall not learn what exists.
            return 401, {"X-Error-Code": "RepoNotFound"}, b'{"error": "Repository not found"}'
        if name == self.gated and token != f"Bearer {TOKEN}":
            return 401, {"X-Error-Code": "GatedRepo"}, b'{"error": "Access is restricted"}'
        if path.startswith("/api/"):
            return self._told(path, name)
        file = self.files.get(path.rpartition("/")[2])
        if file is None or f"/{COMMIT}/" not in path:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        body = file.read_bytes()
        tag = hashlib.sha256(body).hexdigest()
        return 200, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, body

    def _told(self, path: str, name: str) -> tuple[int, dict[str, str], bytes]:
        revision = path.partition("/revision/")[2].partition("?")[0] or "main"
        if revision not in {"main", "v1", COMMIT} and "/tree/" not in path:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b'{"error": "Invalid rev id"}'
        if "/tree/" in path:
            listed: object = [
                {"type": "file", "path": file, "size": where.stat().st_size, "oid": COMMIT}
                for file, where in self.files.items()
            ]
        else:
            listed = {
                "id": name,
                "sha": COMMIT,
                "private": False,
                "siblings": [{"rfilename": file} for file in self.files],
                "tags": [],
                "downloads": 0,
            }
        return 200, {"Content-Type": "application/json"}, json.dumps(listed).encode()


@contextmanager
def model_hub(directory: Path, name: str, gated: str) -> Iterator[ModelHub]:
    """A hub that serves `directory`; its address is `url`."""
    hub = ModelHub(directory, name, gated)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            return

        def _answer(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            status, headers, body = hub.answer(self.path, self.headers.get("Authorization", ""))
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()

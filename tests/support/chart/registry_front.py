"""A front of a real registry that asks for logins, and can fail, lie and count."""

from __future__ import annotations

import base64
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import urllib3

USER, PASSWORD = "robot", "s3cret:with:colons"
HOP = {"connection", "transfer-encoding", "content-length", "date", "server", "host"}
Answer = tuple[int, bytes]
Refusal = tuple[int, bytes, dict[str, str]]


@dataclass
class Front:
    """Where it listens, how it behaves, and the requests that it passed on, by method and path."""

    backend: int
    port: int = 0
    scheme: str = ""
    """`Basic` or `Bearer`; empty for none."""
    refuse: Callable[[str, str], Refusal | None] = lambda *_: None
    """Given method and path, return an answer instead of passing the request on, or None."""
    falsify: Callable[[str, str, bytes], Answer | None] = lambda *_: None
    """Given method, path and the registry's answer, return another answer, or None for that one."""
    passed: Counter[tuple[str, str]] = field(default_factory=Counter)
    tokens: list[str] = field(default_factory=list)
    """The scopes for which tokens were given."""
    token: bytes | None = None
    """What the token server answers, if not a token."""
    authorized: list[str] = field(default_factory=list)
    """The paths of requests that came with a login."""
    pool: urllib3.PoolManager = field(default_factory=lambda: urllib3.PoolManager(maxsize=16))

    def sent_blobs(self) -> int:
        """Return how many blobs were sent to the registry."""
        return sum(
            n for (m, path), n in self.passed.items() if m == "PUT" and "/blobs/uploads/" in path
        )

    def challenge(self, method: str, path: str) -> str:
        """Return how the front asks for a login."""
        if self.scheme == "Basic":
            return 'Basic realm="here"'
        repository = re.sub(r"^/v2/|/(blobs|manifests|referrers)/.*", "", path)
        scope = f"repository:{repository}:{_right(method)}"
        return f'Bearer realm="http://127.0.0.1:{self.port}/token",service="s",scope="{scope}"'

    def accepts(self, method: str, authorization: str) -> bool:
        """Return whether a request with this header may pass."""
        wanted = {"": authorization, "Basic": basic(), "Bearer": f"Bearer {_right(method)}"}
        return authorization == wanted[self.scheme]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    front: Front

    def __getattr__(self, name: str) -> Callable[[], None]:
        if not name.startswith("do_"):
            raise AttributeError(name)
        return self._handle

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts, authorization = urlsplit(self.path), self.headers.get("Authorization", "")
        if authorization:
            self.front.authorized.append(parts.path)
        if parts.path == "/token":
            if authorization != basic():
                self._answer(401, b'{"errors": [{"code": "UNAUTHORIZED"}]}', {})
                return
            (scope,) = parse_qs(parts.query)["scope"]
            self.front.tokens.append(scope)
            token = b'{"token": "%s"}' % scope.rpartition(":")[2].encode()
            self._answer(200, token if self.front.token is None else self.front.token, {})
        elif self.front.accepts(self.command, authorization):
            self._forward(parts.path, body)
        else:
            challenge = self.front.challenge(self.command, parts.path)
            self._answer(401, b"{}", {"WWW-Authenticate": challenge})

    def _forward(self, path: str, body: bytes) -> None:
        if refusal := self.front.refuse(self.command, path):
            self._answer(*refusal)
            return
        self.front.passed[self.command, path] += 1
        kept = {
            name: ", ".join(self.headers.get_all(name, []))
            for name in self.headers
            if name.lower() not in HOP
        }
        kept["Host"] = f"127.0.0.1:{self.front.port}"  # the registry makes Location of it
        answer = self.front.pool.request(
            self.command,
            f"http://127.0.0.1:{self.front.backend}{self.path}",
            body=body,
            headers=kept,
            redirect=False,
            decode_content=False,
        )
        other = self.front.falsify(self.command, path, answer.data)
        status, content = other or (answer.status, answer.data)
        self._answer(status, content, answer.headers)

    def _answer(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in HOP:
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def running_front(backend: int) -> Iterator[Front]:
    """Run a front of the registry on this port."""
    front = Front(backend)
    handler = type("Handler", (_Handler,), {"front": front})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    front.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield front
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        front.pool.clear()


def basic() -> str:
    """Return the header of the one login that the front accepts."""
    return "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


def _right(method: str) -> str:
    return "pull" if method in {"GET", "HEAD"} else "pull,push"

"""The web server of the page: loopback alone, one session, GET and HEAD."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import escape
from importlib import resources

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from fleetkeeper.console.documents import Document, fleet_document, service_document
from fleetkeeper.console.history import HOURS, History
from fleetkeeper.console.samples import Samples
from fleetkeeper.console.session import COOKIE, Session
from fleetkeeper.fleet.view import ServiceKey

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost")
METHODS = ("GET", "HEAD")
HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "fleetkeeper",
}
PAGES = {
    "index.html": "text/html",
    "app.js": "text/javascript",
    "charts.js": "text/javascript",
    "history.js": "text/javascript",
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
}
NO_SESSION = (
    "This page belongs to the browser that opened the link of `fleetkeeper console` first. "
    "Stop the command with Ctrl-C and start it again for a new link."
)
OPENED = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Fleetkeeper console</title>
<link rel="icon" href="{app}icon.svg"><meta http-equiv="refresh" content="0; url={app}"></head>
<body><p><a href="{app}">Open the console</a></p></body></html>
"""
"""A page and no redirect: a browser sends no SameSite=Strict cookie after a redirect from a link in another site."""


def console_app(
    samples: Samples, session: Session, port: int, history: History | None = None
) -> web.Application:
    """Return the application for a server at this port."""
    handlers = _Handlers(samples, session, history)
    app = web.Application(middlewares=[_guard(port), _session_only(session)])
    prefix = session.prefix
    app.router.add_get(f"{prefix}/open", handlers.open_link)
    app.router.add_get(f"{prefix}/", handlers.page)
    app.router.add_get(f"{prefix}/fleet.json", handlers.fleet)
    app.router.add_get(f"{prefix}/service.json", handlers.service)
    app.router.add_get(f"{prefix}/history.json", handlers.history)
    app.router.add_get(f"{prefix}/{{name}}", handlers.page)
    return app


@asynccontextmanager
async def serving(
    samples: Samples, session: Session, port: int = 0, history: History | None = None
) -> AsyncIterator[int]:
    """Serve on loopback and yield the port. 0: a free one.

    Raises:
        OSError: The port is in use, or may not be opened.
    """
    listener = socket.create_server((LOOPBACK, port))
    bound = int(listener.getsockname()[1])
    runner = web.AppRunner(console_app(samples, session, bound, history), access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        yield bound
    finally:
        await runner.cleanup()
        listener.close()


def _guard(port: int) -> Middleware:
    """Return the middleware that refuses other sites and methods, and adds headers to every answer.

    A site that points its name at 127.0.0.1 (DNS rebinding) sends its own name as Host.
    """
    hosts = frozenset(f"{host}:{port}" for host in HOSTS)
    origins = frozenset(f"http://{host}" for host in hosts)

    def refusal(request: web.Request) -> web.Response | None:
        if request.headers.getall("Host", []) not in [[host] for host in hosts]:
            return _text(421, f"The console answers to the hosts {', '.join(sorted(hosts))} alone.")
        if not origins.issuperset(request.headers.getall("Origin", [])):
            return _text(403, "The console answers no other site.")
        if request.method not in METHODS:
            answer = _text(405, "The console is read-only: GET and HEAD.")
            answer.headers["Allow"] = ", ".join(METHODS)
            return answer
        return None

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer: web.StreamResponse | None = refusal(request)
        if answer is None:
            try:
                answer = await handler(request)
            except web.HTTPException as problem:
                answer = _text(problem.status, problem.reason)
        answer.headers.update(HEADERS)
        return answer

    return guard


def _session_only(session: Session) -> Middleware:
    """Return the middleware that asks for the cookie everywhere but at the link."""

    @web.middleware
    async def session_only(request: web.Request, handler: Handler) -> web.StreamResponse:
        opens = request.path == f"{session.prefix}/open"
        if opens or session.knows(request.cookies.get(COOKIE)):
            return await handler(request)
        return _text(403, NO_SESSION)

    return session_only


class _Handlers:
    """The routes. All but the link need the cookie."""

    def __init__(self, samples: Samples, session: Session, history: History | None) -> None:
        self._samples = samples
        self._history = history
        self._session = session
        folder = resources.files(__package__).joinpath("pages")
        self._pages = {name: folder.joinpath(name).read_bytes() for name in PAGES}

    async def open_link(self, request: web.Request) -> web.Response:
        """Spend the token. HEAD spends none: chat programs and link checkers send it."""
        if request.method == "HEAD":
            return _text(200, "")
        home = f"{self._session.prefix}/"
        answer = web.Response(text=OPENED.format(app=escape(home)), content_type="text/html")
        if self._session.knows(request.cookies.get(COOKIE)):
            return answer
        cookie = self._session.spend(request.query.get("token", ""))
        if cookie is None:
            return _text(403, NO_SESSION)
        answer.set_cookie(COOKIE, cookie, path=home, httponly=True, samesite="Strict")
        return answer

    async def page(self, request: web.Request) -> web.Response:
        """Answer with a file of the page; the names are known, no path is built."""
        name = request.match_info.get("name", "index.html")
        if name not in PAGES:
            return _text(404, "Not Found")
        return web.Response(body=self._pages[name], content_type=PAGES[name], charset="utf-8")

    async def fleet(self, request: web.Request) -> web.Response:
        """Answer with all services."""
        return _json(request, fleet_document(self._samples))

    async def service(self, request: web.Request) -> web.Response:
        """Answer with one service, and the hours for which the page may ask the history."""
        hours = HOURS if self._history is not None else ()
        document = service_document(self._samples, _key(request))
        return _json(request, {**document, "hours": hours})

    async def history(self, request: web.Request) -> web.Response:
        """Answer with the history of a service that the user may list, for one of the known ranges."""
        key, hours = _key(request), request.query.get("hours", "")
        if self._history is None or key not in self._samples.snapshot.views:
            return _text(404, "Not Found")
        if hours not in map(str, HOURS):
            return _text(400, f"hours is one of {', '.join(map(str, HOURS))}.")
        found = await asyncio.to_thread(self._history.document, key, int(hours), time.time())
        return _json(request, found)


def _key(request: web.Request) -> ServiceKey:
    return request.query.get("namespace", ""), request.query.get("name", "")


def _json(request: web.Request, document: Document) -> web.Response:
    """Answer 304 if the page has this document already."""
    body = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    if request.headers.get("If-None-Match") == etag:
        return web.Response(status=304, headers={"ETag": etag})
    return web.Response(body=body, content_type="application/json", headers={"ETag": etag})


def _text(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text)

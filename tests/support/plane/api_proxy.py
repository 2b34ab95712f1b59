"""A proxy between the operator and a real API server; subclasses decide what passes.

It speaks plain HTTP to the operator and TLS, with the operator's own certificate, to the server.
"""

from __future__ import annotations

import base64
import ssl
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import yaml
from aiohttp import web

from fleetkeeper_local.control_plane.control_plane import ControlPlane

HOP_HEADERS = {"host", "connection", "transfer-encoding", "content-length", "keep-alive"}


class ApiProxy:
    """Forward every request; a subclass overrides `answer`."""

    def __init__(self, plane: ControlPlane, user: str) -> None:
        self._plane = plane
        self._source = plane.user_kubeconfig(user)
        self.kubeconfig = self._source.with_suffix(".proxied")
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        """Listen, and write a kubeconfig that leads here."""
        config: dict[str, Any] = yaml.safe_load(self._source.read_text())
        user = config["users"][0]["user"]
        context = ssl.create_default_context(cafile=str(self._plane.ca_file))
        context.load_cert_chain(*_certificate(user, self._source.parent))
        self._session = aiohttp.ClientSession(
            base_url=self._plane.apiserver_url,
            connector=aiohttp.TCPConnector(ssl=context, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self.answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port = self._runner.addresses[0][1]
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{port}"}
        config["users"][0]["user"] = {}
        self.kubeconfig.write_text(yaml.safe_dump(config))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request of the operator."""
        async with await self.open_upstream(request) as upstream:
            if not is_watch(request):
                return await whole(upstream)
            try:
                return await self.stream(request, upstream)
            finally:
                if upstream.connection is not None and upstream.connection.transport is not None:
                    # To close would wait for the server's end of TLS, longer than the event loop lives.
                    upstream.connection.transport.abort()

    async def open_upstream(self, request: web.Request) -> Any:
        """Return the server's answer to the same request, as an async context manager."""
        assert self._session is not None
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_HEADERS}
        return self._session.request(
            request.method, request.rel_url, data=body or None, headers=headers
        )

    async def stream(
        self, request: web.Request, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Pass a watch on until either side ends it."""
        response = await started(request, upstream.status)
        async for chunk in upstream.content.iter_any():
            await response.write(chunk)
        return response


def is_watch(request: web.Request) -> bool:
    """Return whether the request opens a watch."""
    return request.query.get("watch") == "true"


async def whole(upstream: aiohttp.ClientResponse) -> web.Response:
    """Return the server's answer as it is."""
    content = await upstream.read()
    kept = {k: v for k, v in upstream.headers.items() if k.lower() not in HOP_HEADERS}
    return web.Response(status=upstream.status, body=content, headers=kept)


async def started(request: web.Request, status: int) -> web.StreamResponse:
    """Return an answer whose headers were sent."""
    response = web.StreamResponse(status=status)
    response.content_type = "application/json"
    await response.prepare(request)
    return response


def failure(code: int, reason: str) -> dict[str, object]:
    """Return a Status object as the API server would send it."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": "made by the test",
        "reason": reason,
        "code": code,
    }


def _certificate(user: dict[str, str], folder: Path) -> tuple[str, str]:
    """Return the paths of the client certificate and its key."""
    if "client-certificate" in user:
        return (
            str(folder / user["client-certificate"]),
            str(folder / user["client-key"]),
        )
    paths = []
    for part in ("client-certificate-data", "client-key-data"):
        path = folder / f"proxy-{part}.pem"
        path.write_bytes(base64.b64decode(user[part]))
        paths.append(str(path))
    return paths[0], paths[1]

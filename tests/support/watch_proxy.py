"""A proxy in front of the real API server that can cut, silence and poison watches.

It speaks plain HTTP to the operator and TLS, with the operator's own certificate, to the server.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import yaml
from aiohttp import web

from fleetkeeper_local.controlplane import ControlPlane

HOP_HEADERS = {"host", "connection", "transfer-encoding", "content-length", "keep-alive"}


class WatchProxy:
    """Forwards everything; watches as long as they are let."""

    def __init__(self, plane: ControlPlane, user: str) -> None:
        self._plane = plane
        self._source = plane.user_kubeconfig(user)
        self.kubeconfig = self._source.with_suffix(".proxied")
        self._cut = False
        self._expired = False
        self._ends: set[asyncio.Event] = set()
        self._told: set[str] = set()
        self._poison: dict[str, int] = {}
        self._poisoned = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        """Listens, and writes a kubeconfig that leads here."""
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
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None)
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
        """Ends every connection."""
        for end in self._ends:
            end.set()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    def cut_watches(self) -> None:
        """Ends all watches and refuses new ones."""
        self._cut = True
        for end in self._ends:
            end.set()

    def heal_watches(self, *, expired: bool) -> None:
        """Lets watches pass again; with `expired` each kind is first told once that it is too old."""
        self._cut = False
        self._expired = expired

    def send_error(self, plural: str, *, code: int) -> None:
        """Puts an ERROR event into the running watch of one resource, which then ends."""
        self._poison[plural] = code
        self._poisoned.set()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        is_watch = request.query.get("watch") == "true"
        if is_watch and self._cut:
            return web.Response(status=503, text="cut")
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_HEADERS}
        async with self._session.request(
            request.method, request.rel_url, data=body or None, headers=headers
        ) as answer:
            if is_watch:
                return await self._stream(request, answer)
            content = await answer.read()
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_HEADERS}
            return web.Response(status=answer.status, body=content, headers=kept)

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status)
        response.content_type = "application/json"
        await response.prepare(request)
        plural = request.path.rpartition("/")[2]
        if self._expired and plural not in self._told:
            self._told.add(plural)
            await response.write(_error(410, "Expired"))
            return response
        end = asyncio.Event()
        self._ends.add(end)
        pump = asyncio.create_task(_pump(answer, response))
        stop = asyncio.create_task(end.wait())
        try:
            while not pump.done() and not stop.done():
                poison = asyncio.create_task(self._poisoned.wait())
                await asyncio.wait({pump, stop, poison}, return_when=asyncio.FIRST_COMPLETED)
                poison.cancel()
                if plural in self._poison:
                    code = self._poison.pop(plural)
                    self._poisoned.clear()
                    await response.write(_error(code, "InternalError"))
                    break
                if self._poisoned.is_set():
                    await asyncio.sleep(0.01)  # the poison is another watch's
        finally:
            self._ends.discard(end)
            pump.cancel()
            stop.cancel()
        return response


async def _pump(answer: aiohttp.ClientResponse, response: web.StreamResponse) -> None:
    async for chunk in answer.content.iter_any():
        await response.write(chunk)


def _error(code: int, reason: str) -> bytes:
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": "made by the test",
        "reason": reason,
        "code": code,
    }
    return json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"


def _certificate(user: dict[str, str], folder: Path) -> tuple[str, str]:
    """Paths of the client certificate and its key."""
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

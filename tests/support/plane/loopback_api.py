"""An API server on loopback that answers as a test wants, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.credentials import Credentials

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[KubernetesClient]:
    """A client whose every request this handler answers."""
    async with (
        answering(handler) as credentials,
        KubernetesClient(credentials, in_flight=8) as client,
    ):
        yield client


@asynccontextmanager
async def answering(handler: Handler) -> AsyncIterator[Credentials]:
    """Yield the credentials of clients whose every request this handler answers."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield Credentials(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()

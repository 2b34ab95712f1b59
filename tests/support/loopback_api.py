"""An API server on loopback that answers as a test wants, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from fleetkeeper.adapters.kubernetes.client import KubernetesClient

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[KubernetesClient]:
    """A client whose every request this handler answers."""
    async with configured(handler) as configuration:
        client = KubernetesClient(configuration, in_flight=8)
        try:
            yield client
        finally:
            await client.close()


@asynccontextmanager
async def configured(handler: Handler) -> AsyncIterator[Configuration]:
    """Yield the configuration of clients whose every request this handler answers."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    configuration.connection_pool_maxsize = 0
    try:
        yield configuration
    finally:
        await runner.cleanup()

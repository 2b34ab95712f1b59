"""A proxy in front of the real API server that can hold back the events of InferenceServices."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from fleetkeeper.api.names import PLURAL
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.api_proxy import ApiProxy, started


class HeldWatchProxy(ApiProxy):
    """Forward everything; watches of services wait while they are held."""

    def __init__(self, plane: ControlPlane, user: str) -> None:
        super().__init__(plane, user)
        self._open = asyncio.Event()
        self._open.set()

    def hold(self) -> None:
        """Hold back all events of services from now on."""
        self._open.clear()

    def release(self) -> None:
        """Deliver what was held back, and hold back nothing more."""
        self._open.set()

    async def stream(
        self, request: web.Request, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Pass a watch on; one of services only while it is not held."""
        response = await started(request, upstream.status)
        is_held = request.path.endswith(f"/{PLURAL}")
        async for chunk in upstream.content.iter_any():
            if is_held:
                await self._open.wait()
            await response.write(chunk)
        return response

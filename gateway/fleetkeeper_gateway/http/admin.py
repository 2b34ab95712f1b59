"""The port for health and metrics, which clients cannot reach."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


async def own_metrics() -> bytes:
    """Return the page with the metrics of this process."""
    # In a thread: with many series it would delay the streams.
    return await run_in_threadpool(generate_latest)


def admin_application(
    state: Callable[[], Mapping[str, bool]], page: Callable[[], Awaitable[bytes]] = own_metrics
) -> Starlette:
    """Return the application of the admin port.

    Args:
        state: returns `ready` and the conditions that it depends on.
        page: returns the page of metrics.
    """

    async def live(_: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(_: Request) -> Response:
        found = dict(state())
        return JSONResponse(found, status_code=200 if found["ready"] else 503)

    async def metrics(_: Request) -> Response:
        return Response(await page(), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/healthz/live", live),
            Route("/healthz/ready", ready),
            Route("/metrics", metrics),
        ]
    )

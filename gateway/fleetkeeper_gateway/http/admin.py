"""The port of health and metrics, which clients do not reach."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fleetkeeper_gateway.http.parts import Gateway


def admin_application(gateway: Gateway) -> Starlette:
    """Return the application of the admin port."""

    async def live(_: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(_: Request) -> Response:
        status = {
            "ready": gateway.ready,
            "draining": gateway.draining,
            "keys": gateway.parts.keys.synced,
            "services": gateway.parts.services.synced,
        }
        return JSONResponse(status, status_code=200 if gateway.ready else 503)

    async def metrics(_: Request) -> Response:
        # In a thread: with many series it would delay the streams.
        return Response(await run_in_threadpool(generate_latest), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/healthz/live", live),
            Route("/healthz/ready", ready),
            Route("/metrics", metrics),
        ]
    )

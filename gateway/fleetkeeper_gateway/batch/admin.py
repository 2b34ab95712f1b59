"""The port of health and metrics of the batch process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fleetkeeper_gateway.interfaces import Keys


@dataclass(slots=True)
class AdminState:
    """What decides whether requests may come."""

    keys: Keys
    queue_up: Callable[[], bool]
    store: bool = False
    """Whether the store answered once."""
    draining: bool = False

    @property
    def ready(self) -> bool:
        """Return whether requests may come. Without Redis they may: files and batches are kept."""
        return self.store and self.keys.synced and not self.draining


def admin_application(state: AdminState) -> Starlette:
    """Return the application of the admin port."""

    async def live(_: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(_: Request) -> Response:
        status = {
            "ready": state.ready,
            "draining": state.draining,
            "keys": state.keys.synced,
            "store": state.store,
            "queue": state.queue_up(),
        }
        return JSONResponse(status, status_code=200 if state.ready else 503)

    async def metrics(_: Request) -> Response:
        return Response(await run_in_threadpool(generate_latest), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/healthz/live", live),
            Route("/healthz/ready", ready),
            Route("/metrics", metrics),
        ]
    )

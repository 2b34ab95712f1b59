"""HTTP server of the usage process: usage, health and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fleetkeeper_contract import rfc3339
from fleetkeeper_contract.usage_files import BadUsageQueryError, parse_dimensions
from fleetkeeper_gateway.usage.store import UsageStore

DEFAULT_S: Final = 30 * 86_400.0
MAX_TIME: Final = 2**40
STALE_PERIODS: Final = 20
STALE_S: Final = 120.0


class UsageApp:
    """The handlers, which read the files and the collector's state."""

    def __init__(
        self,
        store: UsageStore,
        read_age_s: Callable[[], float],
        *,
        period_s: float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._read_age_s = read_age_s
        self._stale_s = STALE_PERIODS * period_s + STALE_S
        self._wall = wall
        self._reports = asyncio.Semaphore(1)

    def app(self) -> Starlette:
        """Return the application to serve."""
        return Starlette(
            routes=[
                Route("/v1/usage", self.usage, methods=["GET"]),
                Route("/healthz", self.health, methods=["GET"]),
                Route("/metrics", self.metrics, methods=["GET"]),
            ]
        )

    async def usage(self, request: Request) -> Response:
        """Return the usage of a period, by the requested dimensions."""
        query, now = request.query_params, self._wall()
        try:
            until = parse_time("until", query.get("until", ""), now)
            since = parse_time("since", query.get("since", ""), until - DEFAULT_S)
            by = parse_dimensions(query.get("by", "key,model"))
        except BadUsageQueryError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        # One at a time: a report reads all files of its period.
        async with self._reports:
            # There may be a row for every name of the period, so encoding takes long, too.
            return await asyncio.to_thread(
                lambda: JSONResponse(self._store.report(since, until, by).document())
            )

    async def health(self, _request: Request) -> Response:
        """Return 503 if a responding engine was not read for a long time.

        Engines that do not respond show nothing about this process, so they do not count.
        """
        age_s = self._read_age_s()
        if age_s > self._stale_s:  # not while it is NaN
            return Response(f"an engine was not read for {age_s:.0f} s\n", status_code=503)
        return Response("ok\n")

    async def metrics(self, _request: Request) -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def parse_time(name: str, text: str, default: float) -> float:
    """Parse a time parameter, a number or RFC 3339, into Unix seconds.

    Raises:
        BadUsageQueryError: if it is neither.
    """
    if not text:
        return default
    try:
        found = float(text) if text[:1].isdigit() and "-" not in text else rfc3339.parse(text)
    except ValueError:
        found = None
    if found is None or not 0 <= found < MAX_TIME:
        raise BadUsageQueryError(
            f"{name} is {text[:40]!r}; it must be Unix seconds, or a time like 2026-11-25T23:00:00Z"
        )
    return found

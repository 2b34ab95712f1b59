"""The control port: metrics, health, and signed requests for live limits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from fleetkeeper_contract.grants import USAGE_PATH
from fleetkeeper_engine.supervisor.control_api.auth import UnauthorizedError, Verifier
from fleetkeeper_engine.supervisor.control_api.metrics import render_metrics
from fleetkeeper_engine.supervisor.control_api.usage import UsagePort
from fleetkeeper_engine.supervisor.limits_requests import (
    RefusedLimitsRequestError,
    parse_limits_request,
)
from fleetkeeper_engine.supervisor.state import PodState

logger = logging.getLogger("fleetkeeper.control")

MAX_BODY_BYTES = 16_384
APPLIED_POLL_S = 0.005
APPLIED_POLLS = 20
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Scrape = Callable[[], Awaitable[bytes | None]]


@dataclass(frozen=True, slots=True)
class ControlPort:
    """The handlers, over the pod's state."""

    pod: PodState
    verifier: Verifier
    scrape_engine: Scrape
    usage: UsagePort | None = None
    """None: usage is not served."""
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time

    def app(self) -> web.Application:
        """Return the application to serve."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/metrics", self.metrics),
                web.get("/healthz/startup", self.startup),
                web.get("/healthz/live", self.live),
                web.get("/healthz/ready", self.ready),
                web.get("/v1/limits", self.get_limits),
                web.put("/v1/limits", self.put_limits),
            ]
        )
        if self.usage is not None:
            app.router.add_get(USAGE_PATH, partial(self.get_usage, self.usage), allow_head=False)
        return app

    async def metrics(self, _request: web.Request) -> web.Response:
        """Return our metrics, then vLLM's."""
        engine_text = await self.scrape_engine()
        now = self.monotonic()
        self.pod.observe(now)
        body = render_metrics(self.pod, self.verifier.kids, now, engine_text)
        return web.Response(body=body, headers={"Content-Type": METRICS_TYPE})

    async def startup(self, _request: web.Request) -> web.Response:
        """Return 200 once a token was generated."""
        return _health(() if self.pod.started else ("no token was generated yet",))

    async def live(self, _request: web.Request) -> web.Response:
        """Return 503 if the engine hangs."""
        now = self.monotonic()
        self.pod.observe(now)
        hang = self.pod.hang(now)
        return _health((f"hung: {hang}",) if hang else ())

    async def ready(self, _request: web.Request) -> web.Response:
        """Return 503 with the reasons while the pod should get no requests."""
        now = self.monotonic()
        self.pod.observe(now)
        return _health(self.pod.readiness(now).obstacles)

    async def get_limits(self, request: web.Request) -> web.Response:
        """Return the limits lease and the limits in force."""
        if self._bearer(request) is None:
            return self._refused_bearer()
        return self._counted(200, self._state())

    async def put_limits(self, request: web.Request) -> web.Response:
        """Accept a request for limits. Respond once the scheduler has read it, or after 100 ms."""
        epoch = self._bearer(request)
        if epoch is None:
            return self._refused_bearer()
        try:
            limits_request = parse_limits_request(await request.read(), self.pod.ranges())
            self.pod.accept(limits_request, epoch, self.monotonic())
        except RefusedLimitsRequestError as error:
            return self._counted(error.status, {"error": str(error), **error.detail})
        for _ in range(APPLIED_POLLS):
            if self.pod.is_applied():
                break
            # Another process writes this memory, so there is no event to wait for.
            await asyncio.sleep(APPLIED_POLL_S)
        return self._counted(200, self._state())

    async def get_usage(self, usage: UsagePort, request: web.Request) -> web.StreamResponse:
        """Return a page of the ledger."""
        try:
            return await usage.get(request, self.wall())
        except UnauthorizedError as error:
            logger.warning("request for usage refused remote=%s: %s", request.remote, error)
            return self._refused_bearer()

    def _bearer(self, request: web.Request) -> int | None:
        try:
            bearer = self.verifier.verify(request.headers.get("Authorization"), self.wall())
        except UnauthorizedError as error:
            logger.warning("request for limits refused remote=%s: %s", request.remote, error)
            return None
        return bearer.epoch

    def _refused_bearer(self) -> web.Response:
        response = self._counted(401, {"error": "a valid token is required"})
        response.headers["WWW-Authenticate"] = "Bearer"
        return response

    def _counted(self, code: int, body: dict[str, Any]) -> web.Response:
        self.pod.control_answers[code] = self.pod.control_answers.get(code, 0) + 1
        return web.json_response(body, status=code)

    def _state(self) -> dict[str, Any]:
        pod, now = self.pod, self.monotonic()
        scheduler, limits_request = pod.scheduler(), pod.lease.request
        running = sum(scheduler.running) if scheduler else 0
        limit = scheduler.limit_sequences if scheduler else 0
        return {
            "accepted": limits_request.generation if limits_request else 0,
            "applied": scheduler.generation if scheduler else 0,
            "supported": bool(scheduler and scheduler.supported),
            "idle": pod.is_applied() and running == 0,
            "epoch": pod.lease.epoch,
            "leaseSeconds": round(pod.lease.seconds_left(now), 3),
            "wanted": {
                "sequences": limits_request.sequences if limits_request else None,
                "tokens": limits_request.tokens if limits_request else None,
            },
            "effective": {
                "sequences": limit,
                "tokens": scheduler.limit_tokens if scheduler else 0,
            },
            "draining": {"above": max(0, running - limit)} if scheduler else {"above": 0},
            "allowed": pod.ranges(),
            "policy": {
                "queueLimits": list(pod.policy.queue_limits),
                "batchShareRatio": pod.policy.batch_share_ratio,
                "batchFloorRatio": pod.policy.batch_floor_ratio,
                "queueWaitObjectiveSeconds": pod.policy.queue_wait_objective_s,
            },
        }


def _health(obstacles: tuple[str, ...]) -> web.Response:
    if obstacles:
        return web.Response(status=503, text="; ".join(obstacles) + "\n")
    return web.Response(text="ok\n")


async def serve_control(port: ControlPort, host: str, number: int) -> web.AppRunner:
    """Listen; the caller cleans the runner up.

    Raises:
        OSError: if the address is in use.
    """
    runner = web.AppRunner(port.app(), access_log=None, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, host, number).start()
    return runner

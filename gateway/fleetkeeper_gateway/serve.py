"""The process of the request path: `fleetkeeper-gateway serve`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import structlog
import uvicorn
import uvloop
from pydantic import ValidationError

from fleetkeeper_gateway.http.admin import admin_application
from fleetkeeper_gateway.http.application import Application
from fleetkeeper_gateway.http.connections.budget import ConnectionBudget
from fleetkeeper_gateway.http.connections.connection import connection_class
from fleetkeeper_gateway.http.cross_origin import CrossOrigin
from fleetkeeper_gateway.http.parts import Gateway, Parts
from fleetkeeper_gateway.http.settings import ServeSettings
from fleetkeeper_gateway.server import (
    CannotStart,
    Server,
    allow_open_files,
    listen,
    server_config,
)
from fleetkeeper_gateway.telemetry import metrics
from fleetkeeper_gateway.telemetry.logs import configure_logs
from fleetkeeper_gateway.upstream.attempts import Upstream
from fleetkeeper_gateway.upstream.client import create_session

logger: structlog.stdlib.BoundLogger = structlog.get_logger("fleetkeeper_gateway.serve")

_SYNC_PERIOD_S = 0.5
_FORGET_S = 60.0
"""Period of removing the series of deleted services."""
_ABORT_S = 5.0
"""Time in which aborted requests end."""


@dataclass(slots=True)
class Signals:
    """Signals to the process: the first means drain, the second means end at once."""

    drain: asyncio.Event = field(default_factory=asyncio.Event)
    end: asyncio.Event = field(default_factory=asyncio.Event)

    def receive(self) -> None:
        """Take one SIGTERM or SIGINT."""
        if self.drain.is_set():
            self.end.set()
        self.drain.set()


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses on which the process listens."""

    requests: tuple[str, int]
    admin: tuple[str, int]


def main() -> int:
    """Serve until a signal ends it. Return the exit status."""
    try:
        settings = ServeSettings()
        configure_logs(settings.log_level, settings.log_format)
        allow_open_files()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve_with_default_parts(settings))
    except ValidationError as error:
        sys.stderr.write(f"invalid settings (variables FLEETKEEPER_GATEWAY_*): {error}\n")
        return 2
    except CannotStart as error:
        sys.stderr.write(f"the gateway cannot start: {error}\n")
        return 1


async def _serve_with_default_parts(settings: ServeSettings) -> int:
    signals = Signals()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.receive)
    async with default_parts() as parts:
        await serve(settings, parts, signals)
    return 0


@contextlib.asynccontextmanager
async def default_parts() -> AsyncIterator[Parts]:
    """Yield the parts of a gateway in a cluster. Each reads settings of its own.

    Raises:
        CannotStart: if the API server's address or our credentials cannot be loaded.
    """
    # Imported here: tests and the benchmark bring parts of their own, without a cluster.
    from fleetkeeper_gateway.audit import create_audit_log  # noqa: PLC0415
    from fleetkeeper_gateway.grants.settings import GrantSettings  # noqa: PLC0415
    from fleetkeeper_gateway.grants.signer import (  # noqa: PLC0415
        BatchTokenReader,
        GrantReader,
        Signer,
        create_key_files,
    )
    from fleetkeeper_gateway.hold import HoldSettings, create_hold  # noqa: PLC0415
    from fleetkeeper_gateway.keys import KeysSettings, create_keys  # noqa: PLC0415
    from fleetkeeper_gateway.limits import (  # noqa: PLC0415
        LimitSettings,
        create_limiter,
        estimate_tokens,
    )
    from fleetkeeper_gateway.services import ServicesSettings, create_services  # noqa: PLC0415
    from fleetkeeper_kube.credentials import NoCredentials  # noqa: PLC0415

    audit = create_audit_log()
    try:
        keys = create_keys(KeysSettings(), audit)
        services = create_services(ServicesSettings())
        hold = create_hold(HoldSettings(), services)
    except NoCredentials as error:
        raise CannotStart(str(error)) from error
    grant_keys = create_key_files(GrantSettings())
    limit_settings = LimitSettings()
    limiter = create_limiter(limit_settings)
    try:
        yield Parts(
            services=services,
            keys=keys,
            limiter=limiter,
            hold=hold,
            signer=Signer(grant_keys),
            grants=GrantReader(grant_keys),
            batch_tokens=BatchTokenReader(grant_keys),
            audit=audit,
            estimate=functools.partial(estimate_tokens, cap=limit_settings.max_tokens_cap),
            background=(keys.run, services.run, hold.run),
        )
    finally:
        audit.flush()
        await limiter.close()


async def serve(
    settings: ServeSettings,
    parts: Parts,
    signals: Signals,
    started: Callable[[Addresses, Gateway], None] = lambda _addresses, _gateway: None,
) -> None:
    """Serve until the signals end it.

    Args:
        settings: of the request path.
        parts: the parts that `default_parts` or a test made.
        signals: when to drain and to end.
        started: called once both ports accept connections.

    Raises:
        CannotStart: if an address cannot be listened on.
    """
    with (
        listen(settings.host, settings.port) as requests_socket,
        listen(settings.host, settings.admin_port) as admin_socket,
    ):
        async with create_session(settings.connect_timeout_seconds) as session:
            gateway = Gateway(settings, parts, Upstream(session, settings.wait_seconds))
            requests = Server(_requests_config(gateway))
            admin = Server(server_config(admin_application(gateway.state)))
            addresses = Addresses(requests_socket.getsockname()[:2], admin_socket.getsockname()[:2])
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(run()) for run in parts.background]
                background.append(tasks.create_task(gateway.open_requests.watch()))
                background.append(tasks.create_task(_keep_known(gateway)))
                background.append(tasks.create_task(_forget_services(gateway)))
                admin_task = tasks.create_task(admin.serve(sockets=[admin_socket]))
                requests_task = tasks.create_task(requests.serve(sockets=[requests_socket]))
                logger.info("gateway serves", requests=addresses.requests, admin=addresses.admin)
                started(addresses, gateway)
                await signals.drain.wait()
                await _drain(gateway, requests, requests_task, signals)
                admin.should_exit = True
                await admin_task
                for task in background:
                    task.cancel()
    logger.info("gateway ended")


async def _keep_known(gateway: Gateway) -> None:
    """Exclude the objects that exist at start from garbage collection.

    With thousands of keys and services a full collection would delay streams by tens of
    milliseconds.
    """
    while not gateway.synced:  # noqa: ASYNC110 - the parts have no event for it
        await asyncio.sleep(_SYNC_PERIOD_S)
    gc.collect()
    gc.freeze()


async def _forget_services(gateway: Gateway) -> None:
    """Remove the series of deleted services, until cancelled."""
    while True:
        await asyncio.sleep(_FORGET_S)
        if gateway.synced:
            metrics.forget_services({service.path for service in gateway.parts.services.all()})


async def _drain(
    gateway: Gateway, server: uvicorn.Server, task: asyncio.Task[None], signals: Signals
) -> None:
    """End the held requests, wait for the other open ones for a bounded time, and abort the rest."""
    gateway.draining = True
    gateway.parts.hold.drain()
    server.should_exit = True
    logger.info(
        "draining", open=gateway.open_requests.count, seconds=gateway.settings.drain_seconds
    )
    end = asyncio.ensure_future(signals.end.wait())
    try:
        await asyncio.wait(
            {task, end},
            timeout=gateway.settings.drain_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
    finally:
        end.cancel()
    if not task.done():
        if gateway.open_requests.count:
            logger.warning(
                "requests aborted at the end of the drain", open=gateway.open_requests.count
            )
        gateway.open_requests.abort_all("draining")
        await asyncio.wait({task}, timeout=_ABORT_S)
        server.force_exit = True
    await task


def _requests_config(gateway: Gateway) -> uvicorn.Config:
    origins = gateway.settings.allowed_origins
    application = Application(gateway)
    config = server_config(CrossOrigin(application, origins) if origins else application)
    budget = ConnectionBudget(closed=lambda reason: metrics.CLOSED.labels(reason).inc())
    config.http = connection_class(gateway.settings.client_timeout_seconds, budget)
    return config

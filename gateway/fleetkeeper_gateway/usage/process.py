"""The process `usage`: reads the engines' ledgers and serves reports of their counts."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from typing import Final

import structlog
import uvicorn
from pydantic import ValidationError

from fleetkeeper_gateway.grants.attempts import AttemptChecker
from fleetkeeper_gateway.grants.settings import GrantSettings
from fleetkeeper_gateway.grants.signer import UsageTokenSigner, create_key_files
from fleetkeeper_gateway.interfaces import Limiter
from fleetkeeper_gateway.kubernetes.settings import load_credentials
from fleetkeeper_gateway.kubernetes.watch import USER_AGENT, Watch
from fleetkeeper_gateway.limits import LimitSettings, create_limiter
from fleetkeeper_gateway.server import Server
from fleetkeeper_gateway.telemetry.logs import configure_logs
from fleetkeeper_gateway.usage import metrics
from fleetkeeper_gateway.usage.app import UsageApp
from fleetkeeper_gateway.usage.collector import Collector
from fleetkeeper_gateway.usage.pods import SELECTOR, Pods
from fleetkeeper_gateway.usage.settings import UsageSettings
from fleetkeeper_gateway.usage.store import UsageStore
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.credentials import NoCredentials
from fleetkeeper_kube.resource import Resource

PODS: Final = Resource("Pod", "pods", "v1")

log = structlog.get_logger(__name__)


def main() -> int:
    """Run until SIGTERM. Return the exit status."""
    try:
        settings, grants, limits = UsageSettings(), GrantSettings(), LimitSettings()
    except ValidationError as error:
        sys.stderr.write(f"fleetkeeper-gateway usage: {error}\n")
        return 2
    configure_logs(settings.log_level, settings.log_format)
    store = UsageStore(settings.usage_directory, settings.usage_retention_days)
    try:
        store.open(time.time())
    except OSError as error:
        log.error("usage directory cannot be used", error=str(error))  # noqa: TRY400 - no defect
        return 1
    try:
        asyncio.run(_run(settings, grants, limits, store))
    except NoCredentials as error:
        log.error("no credentials", error=str(error))  # noqa: TRY400 - no defect
        return 1
    finally:
        store.close()
    return 0


async def _run(
    settings: UsageSettings, grants: GrantSettings, limits: LimitSettings, store: UsageStore
) -> None:
    limiter = create_limiter(limits) if limits.shared else None
    keys = create_key_files(grants)
    collector = Collector(
        store,
        UsageTokenSigner(keys),
        AttemptChecker(keys),
        limiter,
        period_s=settings.usage_period_seconds,
    )

    metrics.READ_AGE.set_function(collector.read_age_s)
    app = UsageApp(store, collector.read_age_s, period_s=settings.usage_period_seconds)
    config = uvicorn.Config(
        app.app(),
        host=settings.host,
        port=settings.usage_port,
        log_config=None,
        access_log=False,
        lifespan="off",
        limit_concurrency=64,
        timeout_graceful_shutdown=2,
    )
    client = KubernetesClient(load_credentials(settings.kubeconfig), user_agent=USER_AGENT)
    async with client:
        watch = Watch(
            client, PODS, Pods(collector), namespaces=settings.namespaces, selector=SELECTOR
        )
        work = [asyncio.create_task(watch.run()), asyncio.create_task(collector.run())]
        http = Server(config)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, http.stop)
        server = asyncio.create_task(http.serve())
        try:
            await asyncio.wait([server, *work], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end([*work, server], limiter)


async def _end(tasks: list[asyncio.Task[None]], limiter: Limiter | None) -> None:
    """Cancel all tasks. A task that failed fails the process.

    Raises:
        Exception: the error of a failed task.
    """
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    if limiter is not None:
        await limiter.close()
    for result in results:
        if isinstance(result, Exception):
            raise result

"""The operator as a process: credentials, exit codes, and namespaces of older releases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from fleetkeeper.adapters.clock import ClockApart
from fleetkeeper.adapters.kubernetes.credentials import load_credentials
from fleetkeeper.adapters.kubernetes.lease import LeaseLost
from fleetkeeper.adapters.kubernetes.writes import WriteHook, no_hook
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.runtime import heap
from fleetkeeper.runtime.operator import Operator
from fleetkeeper.runtime.parts import build_parts
from fleetkeeper.runtime.service_feed import ServiceWatch
from fleetkeeper.runtime.settings import Settings
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.credentials import NoCredentials
from fleetkeeper_kube.errors import ApiError

log = structlog.get_logger(__name__)

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2


async def run_operator(
    settings: Settings,
    context: PlanContext,
    *,
    watch: ServiceWatch,
    hook: WriteHook = no_hook,
) -> int:
    """Run the operator until SIGTERM or a failure; return the exit code of the process.

    0 after SIGTERM or SIGINT. 1 if it lost the lease, a watch ended for good, or a defect occurred:
    it must be restarted. 2 if it cannot run at all: no credentials, no right to read, or an older
    release serves all its namespaces.
    """
    log.info("starting", settings=settings.shown)
    try:
        credentials = await load_credentials(settings.kubeconfig)
    except NoCredentials as problem:
        log.error("no credentials", error=str(problem))  # noqa: TRY400 -- the message says it all
        return EXIT_USAGE
    heap.reduce_frequency()
    try:
        async with (
            KubernetesClient(credentials, in_flight=settings.requests_in_flight) as client,
            KubernetesClient(credentials, retries_429=0) as lease_client,
        ):

            def build(settings: Settings) -> Operator:
                parts = build_parts(settings, context, client, lease_client=lease_client, hook=hook)
                return Operator(parts, watch)

            code = await _run_where_free(settings, build)
    except* LeaseLost as lost:
        log.error("leader lease lost", error=str(_first_of(lost)))  # noqa: TRY400 -- expected
        code = EXIT_FAILED
    except* ClockApart as set_clock:
        log.error("restart required", error=str(set_clock.exceptions[0]))  # noqa: TRY400 -- not a defect
        code = EXIT_FAILED
    except* ApiError as refused:
        log.error("operator cannot run", error=str(_first_of(refused)))  # noqa: TRY400 -- not a defect
        code = EXIT_USAGE
    except* Exception:
        log.exception("operator failed")
        code = EXIT_FAILED
    log.info("stopped", code=code)
    return code


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error that is not a group, at any depth."""
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


async def _run_where_free(settings: Settings, build: Callable[[Settings], Operator]) -> int:
    """Run the operator, if needed again without namespaces of older releases; return the exit code.

    Each namespace is refused on its own, because anyone with write access to it could forge a marker.
    """
    while True:
        operator = build(settings)
        await operator.run()
        if operator.taken is None:
            return EXIT_OK
        log.error("namespaces refused", error=str(operator.taken))
        free = tuple(n for n in settings.namespaces if n not in operator.taken.by_namespace)
        if not free:
            return EXIT_USAGE
        settings = settings.model_copy(update={"namespaces": free})

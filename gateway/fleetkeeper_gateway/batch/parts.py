"""The parts of the batch process, made from the settings."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import structlog

from fleetkeeper_gateway.audit import create_audit_log
from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.api import ApiParts
from fleetkeeper_gateway.batch.common import AllSettings, create_common
from fleetkeeper_gateway.batch.interfaces import Route
from fleetkeeper_gateway.batch.lifecycle.backlog import Destinations
from fleetkeeper_gateway.batch.lifecycle.finalize import Finalizer
from fleetkeeper_gateway.batch.lifecycle.leader import Lifecycle
from fleetkeeper_gateway.batch.lifecycle.life import Shared
from fleetkeeper_gateway.batch.model import BatchRecord
from fleetkeeper_gateway.batch.processes import child
from fleetkeeper_gateway.batch.processes.pool import Pool, Slot
from fleetkeeper_gateway.batch.queue import RedisQueue
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.batch.storage import Storage
from fleetkeeper_gateway.batch.validation.validator import Validator
from fleetkeeper_gateway.batch.workers.handling import Handling, create_memory
from fleetkeeper_gateway.batch.workers.inputs import Inputs
from fleetkeeper_gateway.batch.workers.places import Places, create_rows
from fleetkeeper_gateway.interfaces import AuditLog
from fleetkeeper_gateway.keys import AnonymousKeys, WatchedKeys, create_keys
from fleetkeeper_gateway.limits import estimate_tokens
from fleetkeeper_gateway.server import CannotStart
from fleetkeeper_gateway.services import WatchedServices, create_services
from fleetkeeper_kube.credentials import NoCredentials

__all__ = ["CLIENT_TIMEOUT_S", "AllSettings", "BatchParts", "create_parts"]

log = structlog.get_logger(__name__)

CLIENT_TIMEOUT_S = 60.0
"""Maximum time in which a client sends or reads nothing."""
RECORD_S: Final = 20.0
"""Time for worker processes to write results after their drain."""
_MAX_ANSWERS: Final = 256
"""Maximum answers to one line in the backlog: the default of maxSequences. Engines refuse lines with more."""


@dataclass(frozen=True, slots=True)
class BatchParts:
    """The parts of the process."""

    storage: Storage
    queue: RedisQueue
    keys: WatchedKeys | AnonymousKeys
    services: WatchedServices | None
    api: ApiParts
    lifecycle: Lifecycle
    pool: Pool
    shown: metrics.OfAllProcesses


@contextlib.asynccontextmanager
async def create_parts(settings: AllSettings) -> AsyncIterator[BatchParts]:
    """Create the parts, and close them at the end.

    Raises:
        CannotStart: if the settings are not valid, or the API server's address cannot be found.
    """
    batch = settings.batch
    if not _is_base_url(batch.batch_upstream):
        raise CannotStart(
            "set FLEETKEEPER_GATEWAY_BATCH_UPSTREAM to the URL that answers lines, without /v1, such as http://fleetkeeper-gateway:8080"
        )
    audit = create_audit_log()
    keys, services = _cluster_parts(settings, audit)
    # Unique to this start: chunks that an earlier process of this pod held are not ours.
    name = f"{socket.gethostname()}-{secrets.token_hex(4)}"
    async with create_common(settings, name) as (storage, queue):
        try:
            destinations = Destinations(services, keys)
            lifecycle = _lifecycle(settings, storage, queue, destinations)

            def created(_record: BatchRecord) -> None:
                lifecycle.wake()

            api = ApiParts(
                keys=keys,
                audit=audit,
                objects=storage.objects,
                files=storage.files,
                batches=storage.batches,
                settings=batch,
                on_created=created,
                client_timeout_s=CLIENT_TIMEOUT_S,
            )
            shown = metrics.OfAllProcesses()
            pool = _pool(batch, storage, queue, name=name, route=destinations.route, shown=shown)
            yield BatchParts(storage, queue, keys, services, api, lifecycle, pool, shown)
        finally:
            audit.flush()


def _lifecycle(
    settings: AllSettings, storage: Storage, queue: RedisQueue, destinations: Destinations
) -> Lifecycle:
    objects, files, batches = storage.objects, storage.files, storage.batches
    estimate = functools.partial(_line_tokens, cap=settings.limits.max_tokens_cap)
    shared = Shared(
        batches=batches,
        queue=queue,
        validate=Validator(objects, files, estimate).validate,
        finalizer=Finalizer(objects, files, batches, Inputs(objects, files)),
        end_s=settings.batch.batch_end_seconds,
    )
    return Lifecycle(shared, destinations.show)


def _line_tokens(prompt_bytes: int, max_tokens: int | None, answers: int, *, cap: int) -> int:
    """Return the tokens that a line adds to the backlog, for which the operator provides capacity."""
    return estimate_tokens(prompt_bytes, max_tokens, min(answers, _MAX_ANSWERS), cap)


def _pool(
    batch: BatchSettings,
    storage: Storage,
    queue: RedisQueue,
    *,
    name: str,
    route: Callable[[str, str], Route],
    shown: metrics.OfAllProcesses,
) -> Pool:
    # Not a fork of this process: it has threads, and the store's library in use.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([child.__name__])
    rows = create_rows(batch.batch_processes)

    def slot(index: int) -> Slot:
        memory, process_name = create_memory(), f"{name}-{index}"
        return Slot(
            process_name,
            Handling(memory),
            lambda theirs: context.Process(
                target=child.main,
                args=(process_name, index, rows, memory, theirs),
                name=process_name,
                daemon=True,
            ),
            Places(rows, index, batch.batch_concurrency).clear,
        )

    return Pool(
        [slot(index) for index in range(batch.batch_processes)],
        storage.batches,
        queue,
        route=route,
        shown=shown,
        stop_s=batch.batch_drain_seconds + RECORD_S,
    )


def _is_base_url(text: str) -> bool:
    """Return whether lines can be sent to a URL, to which paths that begin with /v1 are appended."""
    try:
        url = urlsplit(text)
    except ValueError:
        return False
    has_version = url.path.rstrip("/").endswith("/v1")
    return url.scheme in {"http", "https"} and bool(url.hostname) and not has_version


def _cluster_parts(
    settings: AllSettings, audit: AuditLog
) -> tuple[WatchedKeys | AnonymousKeys, WatchedServices | None]:
    """Return the keys, and the services if lines go to a gateway of this cluster."""
    try:
        keys = create_keys(settings.keys, audit)
    except NoCredentials as error:
        raise CannotStart(str(error)) from error
    if settings.batch.batch_upstream_key_file is not None:
        return keys, None
    try:
        return keys, create_services(settings.services)
    except NoCredentials as error:
        log.info("no cluster: the backlog of services is not exported", reason=str(error))
        return keys, None

"""What the batch process consists of, made from the settings."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import structlog

from fleetkeeper_gateway.audit import create_audit_log
from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.api import ApiParts
from fleetkeeper_gateway.batch.model import BatchRecord
from fleetkeeper_gateway.batch.queue import RedisQueue, create_queue
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.batch.storage import Storage, StoreRefused, create_storage
from fleetkeeper_gateway.batch.validation.validator import Validator
from fleetkeeper_gateway.batch.workers.backlog import BacklogReport, route_by
from fleetkeeper_gateway.batch.workers.clock import Clock
from fleetkeeper_gateway.batch.workers.finalize import Finalizer
from fleetkeeper_gateway.batch.workers.inputs import Inputs
from fleetkeeper_gateway.batch.workers.lifecycle import Lifecycle
from fleetkeeper_gateway.batch.workers.sender import UpstreamSender
from fleetkeeper_gateway.batch.workers.steps import Parts as LifecycleParts
from fleetkeeper_gateway.batch.workers.worker import Worker
from fleetkeeper_gateway.grants.settings import GrantSettings
from fleetkeeper_gateway.grants.signer import BatchTokenSigner, create_key_files
from fleetkeeper_gateway.interfaces import AuditLog
from fleetkeeper_gateway.keys import AnonymousKeys, KeysSettings, WatchedKeys, create_keys
from fleetkeeper_gateway.kubernetes.credentials import NoCredentials
from fleetkeeper_gateway.limits import LimitSettings, estimate_tokens
from fleetkeeper_gateway.server import CannotStart
from fleetkeeper_gateway.services import ServicesSettings, WatchedServices, create_services

log = structlog.get_logger(__name__)

CLIENT_TIMEOUT_S = 60.0
"""Longest time that a client may send or read nothing."""


@dataclass(frozen=True, slots=True)
class AllSettings:
    """Settings of all parts."""

    batch: BatchSettings = field(default_factory=BatchSettings)
    keys: KeysSettings = field(default_factory=KeysSettings)
    grants: GrantSettings = field(default_factory=GrantSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    services: ServicesSettings = field(default_factory=ServicesSettings)


@dataclass(frozen=True, slots=True)
class BatchParts:
    """What the process consists of."""

    storage: Storage
    queue: RedisQueue
    keys: WatchedKeys | AnonymousKeys
    services: WatchedServices | None
    api: ApiParts
    lifecycle: Lifecycle
    worker: Worker


@contextlib.asynccontextmanager
async def create_parts(settings: AllSettings) -> AsyncIterator[BatchParts]:
    """Make the parts, and close them at the end.

    Raises:
        CannotStart: if the settings do not fit, or the API server's address cannot be found.
    """
    batch = settings.batch
    if not _is_base_url(batch.batch_upstream):
        raise CannotStart(
            "set FLEETKEEPER_GATEWAY_BATCH_UPSTREAM to the URL that answers lines, without /v1, such as http://fleetkeeper-gateway:8080"
        )
    audit = create_audit_log()
    keys, services = _cluster_parts(settings, audit)
    try:
        storage = create_storage(batch)
    except StoreRefused as error:
        raise CannotStart(str(error)) from error
    sender = UpstreamSender(
        batch.batch_upstream,
        tokens=BatchTokenSigner(create_key_files(settings.grants)),
        key_file=batch.batch_upstream_key_file,
        timeout_s=batch.batch_line_timeout_seconds,
    )
    try:
        objects, files, batches = storage.objects, storage.files, storage.batches
        queue = _queue(settings, storage)
        clock = Clock()
        inputs = Inputs(objects, files)
        estimate = functools.partial(estimate_tokens, cap=settings.limits.max_tokens_cap)
        lifecycle_parts = LifecycleParts(
            batches=batches,
            queue=queue,
            finalizer=Finalizer(objects, files, batches, inputs),
            validate=Validator(objects, files, estimate).validate,
        )
        if services is not None:
            lifecycle_parts.looked = BacklogReport(metrics.BACKLOG, services, keys, clock)
        lifecycle = Lifecycle(lifecycle_parts, wall=clock, end_s=batch.batch_end_seconds)

        def created(_record: BatchRecord) -> None:
            lifecycle.wake()

        worker = Worker(
            queue,
            batches,
            inputs,
            sender,
            concurrency=batch.batch_concurrency,
            drain_s=batch.batch_drain_seconds,
            end_s=batch.batch_end_seconds,
            route=route_by(services, keys, clock),
        )
        api = ApiParts(
            keys=keys,
            audit=audit,
            objects=objects,
            files=files,
            batches=batches,
            queue=queue,
            settings=batch,
            on_created=created,
            client_timeout_s=CLIENT_TIMEOUT_S,
        )
        yield BatchParts(storage, queue, keys, services, api, lifecycle, worker)
    finally:
        audit.flush()
        await sender.close()
        storage.close()


def _is_base_url(text: str) -> bool:
    """Return whether lines can be sent to a URL, which is followed by paths that begin with /v1."""
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


def _queue(settings: AllSettings, storage: Storage) -> RedisQueue:
    try:
        return create_queue(
            settings.batch, settings.limits, storage.objects, storage.batches, socket.gethostname()
        )
    except ValueError as error:
        raise CannotStart(str(error)) from error

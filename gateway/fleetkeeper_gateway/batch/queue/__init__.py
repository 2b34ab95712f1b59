"""Lines that wait and run, in Redis: one stream for each batch, leases with fences, and epochs.

    redis_queue  the queue itself, and the order in which lines are given out
    link         the connection, given up at the first sign that Redis was reset
    recovery     which epoch this process may work in; `epochs`: who makes the next one; `rebuild`: how
    wake         wakes those who wait for lines
    lua/         what is done in Redis, and its keys (common.lua)

One primary holds the queue: not a Redis cluster. Its policy is `noeviction`.
"""

from __future__ import annotations

import secrets
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry

from fleetkeeper_gateway.batch.interfaces import Batches, Objects
from fleetkeeper_gateway.batch.queue.epochs import Epochs
from fleetkeeper_gateway.batch.queue.link import Link
from fleetkeeper_gateway.batch.queue.metrics import queue_metrics
from fleetkeeper_gateway.batch.queue.recovery import Recovery
from fleetkeeper_gateway.batch.queue.redis_queue import RedisQueue
from fleetkeeper_gateway.batch.queue.timing import Timing
from fleetkeeper_gateway.batch.queue.wake import Wake
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.limits import LimitSettings
from fleetkeeper_gateway.limits.connect import new_connection

__all__ = ["RedisQueue", "Timing", "create_queue"]


def create_queue(
    settings: BatchSettings,
    limit_settings: LimitSettings,
    objects: Objects,
    batches: Batches,
    name: str,
    *,
    registry: CollectorRegistry = REGISTRY,
    timing: Timing | None = None,
) -> RedisQueue:
    """Return the queue of a process. It connects once `run` runs.

    Args:
        settings: with the URL of the queue's Redis, if it is another than that of the limits.
        limit_settings: with the other settings of the connection.
        objects: where epochs are claimed.
        batches: what the queue is rebuilt from.
        name: of this process, as operators know it. A part of its own is added.
        registry: for the metrics.
        timing: for tests.

    Raises:
        ValueError: no Redis is set, or its settings do not fit.
    """
    timing = timing or Timing()
    connect = partial(new_connection, _connection_settings(settings, limit_settings))
    process = f"{name}-{secrets.token_hex(4)}"
    metrics = queue_metrics(registry)
    recovery = Recovery(Epochs(objects, process), batches, process, timing, metrics)
    link = Link(connect, recovery, process, timing, metrics)
    return RedisQueue(link, Wake(connect, timing), process, timing, metrics)


def _connection_settings(settings: BatchSettings, limit_settings: LimitSettings) -> LimitSettings:
    found = limit_settings
    if settings.batch_redis_url.get_secret_value():
        values = limit_settings.model_dump() | {"redis_url": settings.batch_redis_url}
        found = LimitSettings(**values)
    if not found.shared:
        raise ValueError(
            "batches need Redis: set FLEETKEEPER_GATEWAY_BATCH_REDIS_URL or FLEETKEEPER_GATEWAY_REDIS_URL"
        )
    return found

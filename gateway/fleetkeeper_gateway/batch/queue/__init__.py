"""The queue of chunks in Redis: one stream for each batch. It may be lost at any time.

    redis_queue  the queue itself
    link         the connection, closed at its first failure, and the checks of the server
    queue.lua    the functions in Redis, and its keys

The queue needs one primary, not a Redis cluster, with the policy `noeviction`.
"""

from __future__ import annotations

from functools import partial

from fleetkeeper_gateway.batch.queue.link import Timing
from fleetkeeper_gateway.batch.queue.redis_queue import RedisQueue
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.limits import LimitSettings
from fleetkeeper_gateway.limits.connect import new_connection

__all__ = ["RedisQueue", "Timing", "create_queue"]


def create_queue(
    settings: BatchSettings,
    limit_settings: LimitSettings,
    name: str,
    timing: Timing | None = None,
) -> RedisQueue:
    """Return the queue of a process. `run` connects it.

    The name identifies the process as the holder of chunks. It must be unique.

    Raises:
        ValueError: no Redis is set, or its settings are not valid.
    """
    if settings.batch_redis_url.get_secret_value():
        values = limit_settings.model_dump() | {"redis_url": settings.batch_redis_url}
        limit_settings = LimitSettings(**values)
    if not limit_settings.shared:
        raise ValueError(
            "batches need Redis: set FLEETKEEPER_GATEWAY_BATCH_REDIS_URL or FLEETKEEPER_GATEWAY_REDIS_URL"
        )
    return RedisQueue(partial(new_connection, limit_settings), name, timing or Timing())

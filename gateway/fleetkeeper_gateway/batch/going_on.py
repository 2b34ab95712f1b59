"""Helpers for endless loops: failures that are logged and counted, and pauses that end early."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import structlog

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import QueueDown, StorageError

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Failure:
    """The error that `noted` caught; None without an error."""

    error: Exception | None = None


@contextmanager
def noted(what: str, event: str, **facts: object) -> Iterator[Failure]:
    """Count and log an error in the block, and continue after it. A cancellation is not an error.

    Args:
        what: label in the metrics.
        event: event of the log line.
        facts: further keys of the log line.
    """
    failure = Failure()
    try:
        yield failure
    except StorageError as error:
        metrics.STORE_FAILURES.labels(what).inc()
        log.warning(event, error=str(error), **facts)
        failure.error = error
    except QueueDown as error:
        metrics.QUEUE_FAILURES.labels(what).inc()
        log.info(event, reason=str(error), **facts)
        failure.error = error
    except Exception as error:
        metrics.DEFECTS.labels(what).inc()
        log.exception(event, **facts)
        failure.error = error


async def happens_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most for this time. Return whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()

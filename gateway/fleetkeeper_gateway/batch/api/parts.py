"""The parts of the API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog

from fleetkeeper_gateway.batch.api.checks import no_file
from fleetkeeper_gateway.batch.interfaces import Batches, Files, Objects
from fleetkeeper_gateway.batch.model import MAX_FILE_BYTES, BatchRecord, FileRecord
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.batch.storage import BrokenObject
from fleetkeeper_gateway.interfaces import AuditLog, Keys

log: structlog.stdlib.BoundLogger = structlog.get_logger("fleetkeeper_gateway.batch.api")

T = TypeVar("T")

_DAY_S = 86_400
_AT_ONCE: Final = 16
"""Number of batches whose objects are read concurrently."""


@dataclass(frozen=True, slots=True)
class ApiParts:
    """The parts that other packages provide."""

    keys: Keys
    audit: AuditLog
    objects: Objects
    files: Files
    batches: Batches
    settings: BatchSettings
    on_created: Callable[[BatchRecord], None]
    """Called with each new batch, to start its validation. It must not block."""
    clock: Callable[[], float] = time.time
    """Returns Unix seconds."""
    client_timeout_s: float = 60.0
    """Maximum time in which a client sends or reads nothing."""
    max_file_bytes: int = MAX_FILE_BYTES

    @property
    def now(self) -> int:
        """Return whole Unix seconds."""
        return int(self.clock())

    def expiry(self, record: FileRecord) -> int:
        """Return the Unix seconds at which a file expires."""
        if record.expires is not None:
            return record.expires
        return record.created + self.settings.batch_retention_days * _DAY_S

    async def file(self, key_id: str, file_id: str, param: str = "id") -> FileRecord:
        """Return a file of a key.

        Raises:
            Refusal: if the key has no file with that ID. It names the parameter.
        """
        record = await self.files.get(key_id, file_id)
        if record is None:
            raise no_file(file_id, param)
        return record

    async def of_batches(
        self, key_id: str, batch_ids: Sequence[str], read: Callable[[BatchRecord], Awaitable[T]]
    ) -> list[T]:
        """Return the results of `read` for batches, without missing and broken ones."""

        async def unbroken(record: BatchRecord) -> list[T]:
            try:
                return [await read(record)]
            except BrokenObject as error:
                log.warning("a batch is left out", batch=record.id, error=str(error))
                return []

        found: list[T] = []
        for start in range(0, len(batch_ids), _AT_ONCE):
            some = await self.batches.several(key_id, batch_ids[start : start + _AT_ONCE])
            for values in await asyncio.gather(*map(unbroken, some)):
                found += values
        return found

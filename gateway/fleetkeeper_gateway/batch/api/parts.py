"""What the API is made of."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from fleetkeeper_gateway.batch.interfaces import Batches, Files, Objects, Queue
from fleetkeeper_gateway.batch.model import MAX_FILE_BYTES, BatchRecord, FileRecord
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.interfaces import AuditLog, Keys

_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class ApiParts:
    """The parts that others made."""

    keys: Keys
    audit: AuditLog
    objects: Objects
    files: Files
    batches: Batches
    queue: Queue
    settings: BatchSettings
    on_created: Callable[[BatchRecord], None]
    """Called with each new batch, to start its validation. It must not block."""
    clock: Callable[[], float] = time.time
    """Return Unix seconds."""
    client_timeout_s: float = 60.0
    """Longest time that a client may send or read nothing."""
    max_file_bytes: int = MAX_FILE_BYTES

    @property
    def now(self) -> int:
        """Return whole Unix seconds."""
        return int(self.clock())

    def expiry(self, record: FileRecord) -> int:
        """Return the Unix seconds from which on a file does not exist any more."""
        if record.expires is not None:
            return record.expires
        return record.created + self.settings.batch_retention_days * _DAY_S

    def exists(self, record: FileRecord) -> bool:
        """Return whether a file has not expired. One that has is deleted at some time."""
        return self.clock() < self.expiry(record)

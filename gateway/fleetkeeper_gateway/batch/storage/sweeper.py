"""Deletes expired objects, and the remains of interrupted writes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from fleetkeeper_gateway.batch.interfaces import Object, StorageError
from fleetkeeper_gateway.batch.storage import paths
from fleetkeeper_gateway.batch.storage.batches import END, StoredBatches
from fleetkeeper_gateway.batch.storage.files import FILE, StoredFiles
from fleetkeeper_gateway.batch.storage.local import LocalObjects
from fleetkeeper_gateway.batch.storage.records import Records
from fleetkeeper_gateway.batch.storage.remote import RemoteObjects

log = structlog.get_logger(__name__)

HOUR_S: Final = 3600.0
DAY_S: Final = 86_400.0
"""Age from which objects without a record are deleted: no write takes that long."""
GRACE_S: Final = HOUR_S
"""Delay between the expiry of a file and its deletion, so that a batch that was created just before is seen
first."""


@dataclass(slots=True)
class Swept:
    """Counts of deleted objects."""

    files: int = 0
    batches: int = 0
    orphans: int = 0
    """Objects that belong to no file and no batch."""
    failed: int = 0
    """Keys whose sweep failed, left for the next sweep."""


class Sweeper:
    """Sweeps all keys, one after another. Two processes may sweep at the same time."""

    def __init__(
        self,
        objects: LocalObjects | RemoteObjects,
        records: Records,
        files: StoredFiles,
        batches: StoredBatches,
        *,
        retention_s: float,
    ) -> None:
        self._objects = objects
        self._records = records
        self._files = files
        self._batches = batches
        self._retention_s = retention_s

    async def sweep(self, now: float) -> Swept:
        """Delete the objects that have expired at a time in Unix seconds. Return their counts.

        A key that cannot be swept is logged and counted, and the others are swept.

        Raises:
            StorageError: if the keys cannot be listed.
        """
        swept = Swept()
        staged = await self._objects.list(paths.STAGING)
        await self._delete_orphans([file for file in staged if now - file.modified >= DAY_S], swept)
        keys = await self._objects.children(paths.KEYS)
        marked = await self._objects.children(paths.ACTIVE)
        for key_id in sorted({*keys, *marked}):
            if not paths.is_key_id(key_id):
                log.warning("a folder has no name of a key", folder=key_id)
                continue
            try:
                await self._sweep_key(key_id, now, swept)
            except StorageError as error:
                swept.failed += 1
                log.warning("a key was not swept", key=key_id, error=str(error))
            except Exception:
                # An error with one key must not stop the sweep of the others.
                swept.failed += 1
                log.exception("a key was not swept", key=key_id)
        return swept

    async def _sweep_key(self, key_id: str, now: float, swept: Swept) -> None:
        # Markers first: batches that are listed later have their marker here, or are too young to be deleted.
        markers = {
            place[1]: stored
            for stored in await self._objects.list(paths.markers_of(key_id))
            if (place := paths.parse_marker(stored.path)) is not None
        }
        listed = await self._objects.list(paths.key_root(key_id))
        groups = await asyncio.to_thread(paths.by_owner, listed)
        without_record = [
            stored
            for batch_id, stored in markers.items()
            if paths.BATCH_RECORD not in groups.get(batch_id, {})
            and now - stored.modified >= HOUR_S
        ]
        await self._delete_orphans(without_record, swept)
        for owner, group in sorted(groups.items()):
            if paths.FILE_RECORD in group or owner in markers:
                continue
            if paths.BATCH_RECORD not in group:
                # The record is written after the bytes, and deleted before them.
                if all(now - stored.modified >= DAY_S for stored in group.values()):
                    await self._delete_orphans(group.values(), swept)
            elif paths.FINAL in group:
                await self._sweep_batch(group, now, swept)
            # A broken batch is left out. Without a marker, its input file need not be kept.
            elif await self._batches.several(key_id, [owner]) and await self._objects.create(
                paths.marker(key_id, owner), b""
            ):
                # The batch may be new, or end now. Then a marker does no harm.
                log.warning("a batch had no marker, so it did not run", batch=owner)
        await self._sweep_files(key_id, groups, now, swept)

    async def _sweep_batch(self, group: paths.Group, now: float, swept: Swept) -> None:
        """Delete a batch that ended long ago, or the objects that an ended batch does not need."""
        # A batch whose end cannot be read is logged, and kept.
        for final in await self._records.all([group[paths.FINAL].path], END):
            if now - final.at >= self._retention_s:
                await self._batches.delete([group])
                swept.batches += 1
            elif now - group[paths.FINAL].modified >= HOUR_S:
                # A slow worker wrote results after the end.
                await self._delete_orphans(paths.not_needed(group.values()), swept)

    async def _sweep_files(
        self, key_id: str, groups: Mapping[str, paths.Group], now: float, swept: Swept
    ) -> None:
        names = [
            group[paths.FILE_RECORD].path for group in groups.values() if paths.FILE_RECORD in group
        ]
        expired = [
            record
            for record in await self._records.all(names, FILE)
            if self._files.has_expired(record, now - GRACE_S)
        ]
        if not expired:
            return
        ids = await self._batches.active_ids(key_id)
        active = await self._batches.several(key_id, ids)
        if len(active) < len(ids):
            # It may be in creation, so its input file is unknown.
            log.warning("files are kept, because a batch cannot be read", key=key_id)
            return
        inputs = {batch.input_file for batch in active}
        for record in expired:
            if record.id not in inputs:
                await self._files.remove(record)
                swept.files += 1

    async def _delete_orphans(self, orphans: Iterable[Object], swept: Swept) -> None:
        gone = [orphan.path for orphan in orphans]
        await self._records.delete(gone)
        swept.orphans += len(gone)

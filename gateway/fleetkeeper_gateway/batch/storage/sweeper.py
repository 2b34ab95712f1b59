"""Deletes what has expired, and what an interrupted write left behind."""

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
"""Nobody is still writing what a record is missing of after this time."""
GRACE_S: Final = HOUR_S
"""A file exists no more once it has expired, and is deleted this much later: a batch that was created
just before must be seen first."""


@dataclass(slots=True)
class Swept:
    """What was deleted."""

    files: int = 0
    batches: int = 0
    orphans: int = 0
    """Objects that belong to nothing."""
    failed: int = 0
    """Keys that were left for the next time, because something failed."""


class Sweeper:
    """Sweeps all keys, one after another. Two processes may do it at once."""

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
        """Delete what has expired at a time in Unix seconds. Return what was deleted.

        A key that cannot be swept is logged and counted, and the others are swept.

        Raises:
            StorageError: if the keys cannot be listed.
        """
        swept = Swept()
        staged = await self._objects.list(paths.STAGING)
        await self._delete_orphans([one for one in staged if now - one.modified >= DAY_S], swept)
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
                # A defect that one key meets keeps nothing of the others.
                swept.failed += 1
                log.exception("a key was not swept", key=key_id)
        return swept

    async def _sweep_key(self, key_id: str, now: float, swept: Swept) -> None:
        # Markers first: what is listed later has its marker here, unless it is too young to be deleted.
        markers = {
            place[1]: one
            for one in await self._objects.list(paths.markers_of(key_id))
            if (place := paths.parse_marker(one.path)) is not None
        }
        listed = await self._objects.list(paths.key_root(key_id))
        groups = await asyncio.to_thread(paths.by_owner, listed)
        without_record = [
            one
            for batch_id, one in markers.items()
            if paths.BATCH_RECORD not in groups.get(batch_id, {}) and now - one.modified >= HOUR_S
        ]
        await self._delete_orphans(without_record, swept)
        for owner, group in sorted(groups.items()):
            if paths.FILE_RECORD in group or owner in markers:
                continue
            if paths.BATCH_RECORD not in group:
                # The record comes after the bytes, and goes before them.
                if all(now - one.modified >= DAY_S for one in group.values()):
                    await self._delete_orphans(group.values(), swept)
            elif paths.FINAL in group:
                await self._sweep_batch(group, now, swept)
            # One that is broken is left out. Its file need not be kept without a marker.
            elif await self._batches.several(key_id, [owner]) and await self._objects.create(
                paths.marker(key_id, owner), b""
            ):
                # It may be new, or end now. Then a marker does no harm.
                log.warning("a batch had no marker, so nobody ran it", batch=owner)
        await self._sweep_files(key_id, groups, now, swept)

    async def _sweep_batch(self, group: paths.Group, now: float, swept: Swept) -> None:
        """Delete a batch that ended long ago, or what a batch that ended does not need."""
        # One whose end cannot be read is logged, and kept.
        for final in await self._records.all([group[paths.FINAL].path], END):
            if now - final.at >= self._retention_s:
                await self._batches.delete([group])
                swept.batches += 1
            elif now - group[paths.FINAL].modified >= HOUR_S:
                # A worker that was slow wrote results after the end.
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
            # Or it is being created: nobody can tell which file it needs.
            log.warning("files are kept, because a batch cannot be read", key=key_id)
            return
        inputs = {batch.input_file for batch in active}
        for record in expired:
            if record.id not in inputs:
                await self._files.remove(record)
                swept.files += 1

    async def _delete_orphans(self, orphans: Iterable[Object], swept: Swept) -> None:
        gone = [one.path for one in orphans]
        await self._records.delete(gone)
        swept.orphans += len(gone)

"""Deletes what has expired, and what an interrupted write left behind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from fleetkeeper_gateway.batch.interfaces import Object, StorageError
from fleetkeeper_gateway.batch.storage import paths
from fleetkeeper_gateway.batch.storage.batches import BATCH, END, is_index
from fleetkeeper_gateway.batch.storage.errors import BrokenObject
from fleetkeeper_gateway.batch.storage.files import FILE, StoredFiles
from fleetkeeper_gateway.batch.storage.local import LocalObjects
from fleetkeeper_gateway.batch.storage.records import Records
from fleetkeeper_gateway.batch.storage.remote import RemoteObjects

log = structlog.get_logger(__name__)

HOUR_S: Final = 3600.0
DAY_S: Final = 86_400.0
GRACE_S: Final = HOUR_S
"""A file exists no more once it has expired, and is deleted this much later: a batch that was created
just before must be seen first."""

Group = Mapping[str, Object]
"""Objects of a file or batch by the last part of their path."""


@dataclass(slots=True)
class Swept:
    """What was deleted."""

    files: int = 0
    batches: int = 0
    orphans: int = 0
    """Markers, bytes and results that belong to nothing."""
    failed: int = 0
    """Keys that were left for the next time, because the store failed."""


class Sweeper:
    """Sweeps all keys, one after another. Two processes may do it at once."""

    def __init__(
        self,
        objects: LocalObjects | RemoteObjects,
        files: StoredFiles,
        records: Records,
        *,
        retention_s: float,
    ) -> None:
        self._objects = objects
        self._files = files
        self._records = records
        self._retention_s = retention_s

    async def sweep(self, now: float) -> Swept:
        """Delete what has expired at a time in Unix seconds. Return what was deleted.

        A key for which the store fails is logged and counted, and the others are swept.

        Raises:
            StorageError: if the keys cannot be listed.
        """
        swept = Swept()
        if isinstance(self._objects, LocalObjects):
            swept.orphans += await self._objects.clear_staging(now - DAY_S)
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
        if swept != Swept():
            log.info(
                "the store was swept",
                files=swept.files,
                batches=swept.batches,
                orphans=swept.orphans,
                failed=swept.failed,
            )
        return swept

    async def _sweep_key(self, key_id: str, now: float, swept: Swept) -> None:
        # Markers first: what is listed later has its marker here, unless it is too young to be deleted.
        markers = await self._objects.list(paths.markers_of(key_id))
        listed = await self._objects.list(paths.batches_of(key_id))
        batches = by_owner(listed, paths.batches_of(key_id))
        await self._sweep_markers(markers, batches, now, swept)
        await self._sweep_batches(key_id, markers, batches, now, swept)
        await self._sweep_files(key_id, now, swept)

    async def _sweep_markers(
        self, markers: Iterable[Object], batches: Mapping[str, Group], now: float, swept: Swept
    ) -> None:
        """Delete markers whose record did not come in an hour."""
        orphans = [
            one
            for one in markers
            if batch_of(one)
            and now - one.modified >= HOUR_S
            and paths.BATCH_RECORD not in batches.get(batch_of(one), {})
        ]
        await self._delete(orphans)
        swept.orphans += len(orphans)

    # -- files ------------------------------------------------------------------------------------

    async def _sweep_files(self, key_id: str, now: float, swept: Swept) -> None:
        listed = await self._objects.list(paths.files_of(key_id))
        groups = by_owner(listed, paths.files_of(key_id))
        orphans = [
            group[paths.DATA].path
            for group in groups.values()
            if paths.DATA in group
            and paths.FILE_RECORD not in group
            and now - group[paths.DATA].modified >= DAY_S
        ]
        await self._objects.delete(orphans)
        swept.orphans += len(orphans)
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
        inputs = await self._active_inputs(key_id)
        if inputs is None:
            return
        for record in expired:
            if record.id not in inputs:
                await self._files.remove(record)
                swept.files += 1

    async def _active_inputs(self, key_id: str) -> set[str] | None:
        """Return the input files of active batches of a key; None if that cannot be told now."""
        inputs = set()
        for one in await self._objects.list(paths.markers_of(key_id)):
            place = paths.parse_marker(one.path)
            if place is None:
                continue
            try:
                path = paths.batch_object(*place, paths.BATCH_RECORD)
                record = await self._records.kept(path, BATCH)
            except BrokenObject as error:
                log.warning(
                    "files are kept, because a batch cannot be read", key=key_id, error=str(error)
                )
                return None
            if record is None:
                # It is being created. Next time there is a record, or no marker.
                return None
            inputs.add(record.input_file)
        return inputs

    # -- batches ----------------------------------------------------------------------------------

    async def _sweep_batches(
        self,
        key_id: str,
        markers: Iterable[Object],
        batches: Mapping[str, Group],
        now: float,
        swept: Swept,
    ) -> None:
        results = await self._objects.list(paths.all_segments_of(key_id))
        segments = by_owner(results, paths.all_segments_of(key_id))
        for batch_id in sorted({*batches, *segments} - set(map(batch_of, markers))):
            group, own = batches.get(batch_id, {}), segments.get(batch_id, {})
            if paths.BATCH_RECORD in group and paths.FINAL not in group:
                # One that is broken is left out. Its file need not be kept without a marker.
                record = await self._records.all([group[paths.BATCH_RECORD].path], BATCH)
                # Markers were listed before, so a batch that is new or ends now may be taken for one
                # without a marker. Then a marker does no harm.
                if record and await self._objects.create(paths.marker(key_id, batch_id), b""):
                    log.warning("a batch had no marker, so nobody ran it", batch=batch_id)
            elif paths.BATCH_RECORD in group:
                await self._sweep_batch(group, own, now, swept)
            elif all(now - one.modified >= DAY_S for one in (*group.values(), *own.values())):
                await self._delete([*group.values(), *own.values()])
                swept.orphans += len(group) + len(own)

    async def _sweep_batch(self, group: Group, segments: Group, now: float, swept: Swept) -> None:
        """Delete a batch that ended long ago, or what a batch that ended does not need."""
        try:
            final = await self._records.kept(group[paths.FINAL].path, END)
        except BrokenObject as error:
            log.warning("a batch is kept, because its end cannot be read", error=str(error))
            return
        if final is None:
            return
        if now - final.at >= self._retention_s:
            # Without its record it does not exist, whatever happens to the rest.
            await self._delete([group[paths.BATCH_RECORD]])
            await self._delete([*group.values(), *segments.values()])
            swept.batches += 1
            return
        leftovers = [one for one in group.values() if is_index(one.path)] + [*segments.values()]
        if leftovers and now - group[paths.FINAL].modified >= HOUR_S:
            # A worker that was slow wrote results after the end.
            await self._delete(leftovers)
            swept.orphans += len(leftovers)

    async def _delete(self, objects: Sequence[Object]) -> None:
        await self._objects.delete([one.path for one in objects])
        for one in objects:
            self._records.forget(one.path)


def batch_of(marker: Object) -> str:
    """Return the ID of the batch of a marker; empty if it is none."""
    place = paths.parse_marker(marker.path)
    return place[1] if place is not None else ""


def by_owner(objects: Iterable[Object], prefix: str) -> dict[str, dict[str, Object]]:
    """Return objects by the file or batch they belong to, and by their name.

    What is not where a file or batch has its objects is left out.
    """
    groups: defaultdict[str, dict[str, Object]] = defaultdict(dict)
    for one in objects:
        owner, _, name = one.path.removeprefix(prefix).partition("/")
        if name and "/" not in name and (paths.is_file_id(owner) or paths.is_batch_id(owner)):
            groups[owner][name] = one
    return dict(groups)

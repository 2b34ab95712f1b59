"""The progress of a batch, from one list of its logs and the heads of parts."""

from __future__ import annotations

from itertools import count, takewhile

from fleetkeeper_gateway.batch.interfaces import Object, ObjectMissing, Objects
from fleetkeeper_gateway.batch.model import BatchRecord, Counts, Progress
from fleetkeeper_gateway.batch.storage import part as parts
from fleetkeeper_gateway.batch.storage import paths
from fleetkeeper_gateway.batch.storage.records import Records, each


async def read_progress(
    objects: Objects, records: Records, batch: BatchRecord, chunks: int, lines: int
) -> Progress:
    """Return the progress in the logs of this number of chunks. Damaged parts count as empty."""
    listed = {part.path: part for part in await objects.list(paths.logs_of(batch.key_id, batch.id))}
    logs: list[list[str]] = []
    for chunk in range(chunks):
        names = (paths.log_part(batch.key_id, batch.id, chunk, number) for number in count())
        logs.append(list(takewhile(listed.__contains__, names)))
    whole = [path for log in logs for path in log if path + paths.DAMAGED not in listed]
    # Parts never change, so each head is read once.
    heads = records.known(whole, parts.Head)

    async def read(part: Object) -> None:
        try:
            length = min(part.bytes, parts.HEAD_BYTES)
            content = await objects.read_range(part.path, 0, length)
            heads[part.path] = parts.decode_head(content, part.bytes)
        except (parts.DamagedPart, parts.UnknownPart, ObjectMissing):
            # A reader of the log marks damaged parts. The part is missing if its batch has ended.
            return
        records.keep(part.path, heads[part.path], parts.HEAD_BYTES)

    await each([listed[path] for path in whole if path not in heads], read)
    still_open = {
        chunk
        for chunk, log in enumerate(logs)
        if not any(path in heads and heads[path].closing for path in log)
    }
    completed = sum(head.ok for head in heads.values())
    failed = sum(head.failed for head in heads.values())
    return Progress(Counts(lines, completed, failed), frozenset(still_open))

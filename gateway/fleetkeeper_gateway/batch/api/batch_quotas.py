"""Quotas that a new batch needs: active batches of the key, their lines, all batches, and files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fleetkeeper_gateway.batch.api.checks import NO_RETRY
from fleetkeeper_gateway.batch.api.key_state import KeyState
from fleetkeeper_gateway.batch.api.parts import ApiParts
from fleetkeeper_gateway.batch.model import MAX_LINES, BatchRecord, FileRecord
from fleetkeeper_gateway.http.errors import Refusal

_MIN_LINE_BYTES: Final = 64
"""Minimum bytes of a line, which has an ID, a method, a URL and a body."""


async def check_batch_quotas(parts: ApiParts, key_id: str, key: KeyState, lines: int) -> None:
    """Check that a key may have another batch, with at most this number of lines.

    Raises:
        Refusal: if a quota is reached.
    """
    await _check_store(parts, key_id)
    active = await parts.batches.active_ids(key_id)
    most = parts.settings.batch_key_active
    if len(active) >= most:
        raise _exceeded(
            "batch_quota_exceeded",
            f"Your key has {len(active)} batches that have not ended, and may have {most}.",
        )
    key.lines = {batch_id: key.lines.get(batch_id, MAX_LINES) for batch_id in active}
    await _check_lines(parts, key_id, key, lines)
    if key.room < 1:
        key.room = await _room(parts, key_id)
    key.room -= 1


def most_lines(file: FileRecord) -> int:
    """Return the maximum number of lines of a file."""
    return min(MAX_LINES, 1 + file.bytes // _MIN_LINE_BYTES)


async def _check_store(parts: ApiParts, key_id: str) -> None:
    """Check that the key has room for results, which no quota stops while a batch runs."""
    stored, settings = await parts.files.usage(key_id), parts.settings
    for code, have, most, what in (
        ("file_quota_exceeded", stored.files, settings.batch_key_files, "files"),
        ("byte_quota_exceeded", stored.bytes, settings.batch_key_bytes, "bytes of files"),
    ):
        if have >= most:
            raise _exceeded(
                code,
                f"Your key has {have} {what}, with results, and a new batch needs fewer than {most}.",
                "Delete input files or results: DELETE /v1/files/ID.",
            )


async def _check_lines(parts: ApiParts, key_id: str, key: KeyState, new: int) -> None:
    most = parts.settings.batch_key_lines
    if sum(key.lines.values()) + new > most:
        # The actual numbers of lines are read only if they decide.
        key.lines |= await _read_lines(parts, key_id, [*key.lines])
    if (queued := sum(key.lines.values())) + new > most:
        raise _exceeded(
            "line_quota_exceeded",
            f"The batches of your key that have not ended have up to {queued} lines, this one up to "
            f"{new}, and all may have {most}. Until a file was read, its lines follow from its size.",
        )


async def _read_lines(parts: ApiParts, key_id: str, batch_ids: Sequence[str]) -> dict[str, int]:
    """Return the number of lines of each batch whose input file was read."""

    async def lines(record: BatchRecord) -> dict[str, int]:
        found = await parts.batches.validated(record)
        if found is None:
            return {}
        return {record.id: 0 if found.mistakes else found.lines}

    known: dict[str, int] = {}
    for counted in await parts.of_batches(key_id, batch_ids, lines):
        known |= counted
    return known


async def _room(parts: ApiParts, key_id: str) -> int:
    """Return the number of batches that a key may add before all are counted again."""
    most = parts.settings.batch_key_batches
    room = await parts.batches.make_room(key_id, most)
    if room < 1:
        raise _exceeded(
            "batch_quota_exceeded",
            f"Your key may have {most} batches, and none of those that it has can be deleted.",
        )
    # Half of the room: another replica may count the same.
    return (room + 1) // 2


def _exceeded(
    code: str, message: str, cure: str = "Wait for a batch to end, or cancel a batch."
) -> Refusal:
    return Refusal(429, code, f"{message} {cure}", headers=NO_RETRY)

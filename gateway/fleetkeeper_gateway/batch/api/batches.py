"""Batches: they are created, listed, shown and cancelled."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, Final

import structlog

from fleetkeeper_gateway.batch.api.batch_request import BatchRequest, parse_batch_request
from fleetkeeper_gateway.batch.api.call import Call
from fleetkeeper_gateway.batch.api.checks import (
    NO_RETRY,
    PURPOSE,
    checked_batch_id,
    checked_file_id,
    no_batch,
    no_file,
)
from fleetkeeper_gateway.batch.api.documents import list_document
from fleetkeeper_gateway.batch.api.pages import parse_page
from fleetkeeper_gateway.batch.api.parts import ApiParts
from fleetkeeper_gateway.batch.api.per_key import PerKey
from fleetkeeper_gateway.batch.api.status import ENDED, Facts, batch_document, status_of
from fleetkeeper_gateway.batch.interfaces import QueueDown, StorageError
from fleetkeeper_gateway.batch.model import BatchRecord, Counts
from fleetkeeper_gateway.http.errors import Refusal

log: structlog.stdlib.BoundLogger = structlog.get_logger("fleetkeeper_gateway.batch.api")

_MAX_BODY_BYTES: Final = 65_536
_LISTED, _MOST_LISTED = 20, 100
_AT_ONCE: Final = 16
"""Batches of a list whose state is read at the same time."""


class BatchCalls:
    """Calls about batches."""

    def __init__(self, parts: ApiParts, per_key: PerKey) -> None:
        self._parts = parts
        self._per_key = per_key

    async def create(self, call: Call) -> object:
        """Create a batch. Its input file is validated afterwards."""
        request = parse_batch_request(await call.read_body(_MAX_BODY_BYTES))
        parts = self._parts
        turns = self._per_key.turns(call.key_id)
        async with turns.change:
            await self._check_input(call.key_id, request.input_file)
            await self._check_quota(call.key_id)
            record = _record(call.key_id, request, parts.now)
            await self._write(record)
        parts.on_created(record)
        return batch_document(Facts(record), parts.clock())

    async def list(self, call: Call) -> object:
        """Return a page of the batches of a key, newest first."""
        parts = self._parts
        page = parse_page(call.scope["query_string"], default=_LISTED, most=_MOST_LISTED)
        records, has_more = page.cut(await parts.batches.list(call.key_id), no_batch)
        documents: list[dict[str, Any]] = []
        for start in range(0, len(records), _AT_ONCE):
            some = records[start : start + _AT_ONCE]
            documents += await asyncio.gather(*(self._document(record) for record in some))
        return list_document(documents, has_more=has_more)

    async def get(self, call: Call) -> object:
        """Return a batch."""
        return await self._document(await self._found(call))

    async def cancel(self, call: Call) -> object:
        """Ask for the end of a batch. The results that it has are kept."""
        parts = self._parts
        record = await self._found(call)
        facts = await self._facts(record)
        status = status_of(facts, parts.clock())
        if status in ENDED:
            raise Refusal(
                409,
                "batch_has_ended",
                f"A batch with status {status.value!r} cannot be cancelled.",
                param="id",
                headers=NO_RETRY,
            )
        if facts.cancelled_at is None:
            await parts.batches.cancel(record, parts.now)
            facts = await self._facts(record)
        return batch_document(facts, parts.clock())

    # -- what is kept of a batch ------------------------------------------------------------------

    async def _found(self, call: Call) -> BatchRecord:
        """Return the batch of the path.

        Raises:
            Refusal: if the key has none of that ID.
        """
        batch_id = checked_batch_id(call.path_id())
        record = await self._parts.batches.get(call.key_id, batch_id)
        if record is None:
            raise no_batch(batch_id)
        return record

    async def _document(self, record: BatchRecord) -> dict[str, Any]:
        return batch_document(await self._facts(record), self._parts.clock())

    async def _facts(self, record: BatchRecord) -> Facts:
        batches = self._parts.batches
        final = await batches.final(record)
        if final is not None:
            validated, cancelled_at = await asyncio.gather(
                batches.validated(record), batches.cancelled_at(record)
            )
            return Facts(record, validated, cancelled_at, final)
        validated, cancelled_at, counts = await asyncio.gather(
            batches.validated(record), batches.cancelled_at(record), self._counts(record)
        )
        if counts is None:
            # The queue forgets a batch after its end is kept, which may have been a moment ago.
            final = await batches.final(record)
        return Facts(record, validated, cancelled_at, final, counts)

    async def _counts(self, record: BatchRecord) -> Counts | None:
        try:
            return await self._parts.queue.counts(record)
        except QueueDown:
            return None

    # -- what a new batch needs -------------------------------------------------------------------

    async def _check_input(self, key_id: str, file_id: str) -> None:
        """Check that a file can be the input of a batch.

        Raises:
            Refusal: if it cannot.
        """
        checked_file_id(file_id, "input_file_id")
        record = await self._parts.files.get(key_id, file_id)
        if record is None or not self._parts.exists(record):
            raise no_file(file_id, "input_file_id")
        if record.purpose != PURPOSE:
            raise Refusal(
                400,
                "wrong_purpose",
                f"{file_id} has purpose {record.purpose}. An input file has purpose {PURPOSE}.",
                param="input_file_id",
            )

    async def _check_quota(self, key_id: str) -> None:
        most = self._parts.settings.batch_key_active
        active = sum(record.key_id == key_id for record in await self._parts.batches.active())
        if active >= most:
            raise Refusal(
                429,
                "batch_quota_exceeded",
                f"Your key has {active} batches that have not ended, and may have {most}. "
                "Wait for one, or cancel one.",
                headers=NO_RETRY,
            )

    async def _write(self, record: BatchRecord) -> None:
        """Write a batch.

        Raises:
            StorageError: if the store does not hold it.
        """
        batches = self._parts.batches
        if await batches.create(record):
            return
        # A repeated write finds what the first one left, although its answer was lost.
        if await batches.get(record.key_id, record.id) != record:
            raise StorageError(f"{record.id} exists with another content")


def _record(key_id: str, request: BatchRequest, now: int) -> BatchRecord:
    return BatchRecord(
        id=f"batch_{uuid.uuid4().hex}",
        key_id=key_id,
        input_file=request.input_file,
        endpoint=request.endpoint,
        completion_window=request.completion_window,
        created=now,
        expires=now + request.window_s,
        metadata=request.metadata,
        output_expires_after=request.output_expires_after,
    )

"""Calls that create, list, return and cancel batches."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

from fleetkeeper_gateway.batch.api.batch_quotas import check_batch_quotas, most_lines
from fleetkeeper_gateway.batch.api.batch_request import parse_batch_request
from fleetkeeper_gateway.batch.api.call import Call, Stream
from fleetkeeper_gateway.batch.api.checks import NO_RETRY, PURPOSE, no_batch
from fleetkeeper_gateway.batch.api.documents import list_document
from fleetkeeper_gateway.batch.api.lists import list_stream
from fleetkeeper_gateway.batch.api.pages import Page, parse_page
from fleetkeeper_gateway.batch.api.parts import ApiParts
from fleetkeeper_gateway.batch.api.progress import BatchProgress
from fleetkeeper_gateway.batch.api.status import ENDED, Facts, batch_document, status_of
from fleetkeeper_gateway.batch.interfaces import ObjectMissing
from fleetkeeper_gateway.batch.model import BatchRecord
from fleetkeeper_gateway.http.errors import Refusal

_MAX_BODY_BYTES: Final = 65_536
_LISTED, _MAX_LISTED = 20, 100


class BatchCalls:
    """Calls about batches."""

    def __init__(self, parts: ApiParts) -> None:
        self._parts = parts
        self._progress = BatchProgress(parts.batches)

    async def create(self, call: Call) -> object:
        """Create a batch. Its input file is validated afterwards."""
        parts, key, key_id = self._parts, call.key, call.key_id
        record = parse_batch_request(key_id, await call.read_body(_MAX_BODY_BYTES), parts.now)
        async with key.change:
            file = await parts.file(key_id, record.input_file, "input_file_id")
            if file.purpose != PURPOSE:
                raise Refusal(
                    400,
                    "wrong_purpose",
                    f"{file.id} has purpose {file.purpose}. An input file has purpose {PURPOSE}.",
                    param="input_file_id",
                )
            lines = most_lines(file)
            await check_batch_quotas(parts, key_id, key, lines)
            # If it exists, this call wrote it: a store's client repeats a write whose answer was lost.
            await parts.batches.create(record)
            key.lines[record.id] = lines
        parts.on_created(record)
        return batch_document(Facts(record), parts.clock())

    async def list(self, call: Call) -> Stream:
        """Return a page of the batches of a key, newest first."""
        page = parse_page(call.scope["query_string"], default=_LISTED, most=_MAX_LISTED)
        return await list_stream(call.key.lists, lambda: self._page(call.key_id, page))

    async def _page(self, key_id: str, page: Page) -> deque[bytes]:
        parts = self._parts
        ids, has_more = page.cut(await parts.batches.ids(key_id), no_batch)
        documents = await parts.of_batches(key_id, ids, self._document)
        return await list_document(documents, has_more=has_more)

    async def get(self, call: Call) -> object:
        """Return a batch."""
        return await self._document(await self._found(call))

    async def cancel(self, call: Call) -> object:
        """Request the cancellation of a batch. Its results are kept."""
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
        return await self._document(record)

    async def _found(self, call: Call) -> BatchRecord:
        """Return the batch that the path names.

        Raises:
            Refusal: if the key has no batch with that ID.
        """
        batch_id = call.path_id()
        record = await self._parts.batches.get(call.key_id, batch_id)
        if record is None:
            raise no_batch(batch_id)
        return record

    async def _document(self, record: BatchRecord) -> dict[str, Any]:
        return batch_document(await self._facts(record), self._parts.clock())

    async def _facts(self, record: BatchRecord) -> Facts:
        batches = self._parts.batches
        # Read the end first: the other facts were written before it.
        final = await batches.final(record)
        validated, cancelled_at = await asyncio.gather(
            batches.validated(record), batches.cancelled_at(record)
        )
        counts = None
        if final is None and validated is not None and not validated.mistakes:
            try:
                counts = await self._progress.counts(record, validated)
            except ObjectMissing:
                # The logs are deleted after the end is written, which may have happened just now.
                final = await batches.final(record)
                if final is None:
                    raise
            else:
                if counts.completed + counts.failed >= validated.lines:
                    final = await batches.final(record)
        return Facts(record, validated, cancelled_at, final, counts)

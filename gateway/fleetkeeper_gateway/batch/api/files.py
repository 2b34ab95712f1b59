"""Calls that list, return, download and delete files."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final
from urllib.parse import quote

from fleetkeeper_gateway.batch.api.call import Call, Stream
from fleetkeeper_gateway.batch.api.checks import NO_RETRY, no_file
from fleetkeeper_gateway.batch.api.documents import file_document, list_document
from fleetkeeper_gateway.batch.api.lists import list_stream
from fleetkeeper_gateway.batch.api.pages import Page, parse_page
from fleetkeeper_gateway.batch.api.parts import ApiParts
from fleetkeeper_gateway.batch.interfaces import ObjectMissing
from fleetkeeper_gateway.batch.model import FileRecord
from fleetkeeper_gateway.http.connections.bodies import BodyBudget
from fleetkeeper_gateway.http.errors import Refusal

DOWNLOAD_BYTES: Final = 8 * 1_048_576
"""Memory of a download: the part that the client reads, and the next part."""
MEMORY_BYTES: Final = 32 * DOWNLOAD_BYTES
"""Maximum memory of all downloads. Uploads, downloads and logs share the 1 GiB that the chart leaves for the parent."""
_MAX_LISTED = 10_000


class FileCalls:
    """Calls about files that exist."""

    def __init__(self, parts: ApiParts) -> None:
        self._parts = parts
        self._memory = BodyBudget(MEMORY_BYTES)

    async def list(self, call: Call) -> Stream:
        """Return a page of the files of a key."""
        page = parse_page(call.scope["query_string"], default=_MAX_LISTED, most=_MAX_LISTED)
        return await list_stream(call.key.lists, lambda: self._page(call.key_id, page))

    async def _page(self, key_id: str, page: Page) -> deque[bytes]:
        parts = self._parts
        files = {
            record.id: record
            for record in await parts.files.list(key_id)
            if page.purpose in (None, record.purpose)
        }
        ids, has_more = page.cut(list(files), no_file)
        page_files = (files[file_id] for file_id in ids)
        documents = (file_document(record, parts.expiry(record)) for record in page_files)
        return await list_document(documents, has_more=has_more)

    async def get(self, call: Call) -> object:
        """Return a file."""
        record = await self._parts.file(call.key_id, call.path_id())
        return file_document(record, self._parts.expiry(record))

    async def content(self, call: Call) -> Stream:
        """Return the bytes of a file."""
        record = await self._parts.file(call.key_id, call.path_id())
        parts = self._bytes(record, call.key.downloads)
        try:
            first = await anext(parts, b"")
        except ObjectMissing:
            raise no_file(record.id) from None
        name = quote(record.filename, safe="")
        return Stream(
            first,
            parts,
            record.bytes,
            [
                (b"content-type", b"application/octet-stream"),
                (b"content-disposition", f"attachment; filename*=UTF-8''{name}".encode()),
            ],
        )

    async def delete(self, call: Call) -> object:
        """Delete a file that is the input of no active batch."""
        parts = self._parts
        async with call.key.change:
            record = await parts.file(call.key_id, call.path_id())
            active = await parts.batches.active_ids(call.key_id)
            for batch in await parts.batches.several(call.key_id, active):
                if batch.input_file == record.id:
                    raise Refusal(
                        409,
                        "file_in_use",
                        f"{batch.id} reads the file. Cancel it, or wait for its end.",
                        param="id",
                        headers=NO_RETRY,
                    )
            await parts.files.delete(call.key_id, record.id)
        return {"id": record.id, "object": "file", "deleted": True}

    async def _bytes(
        self, record: FileRecord, turns: asyncio.Semaphore
    ) -> AsyncGenerator[bytes, None]:
        """Yield the parts of a file, in a turn of its key, which lasts until the generator is closed.

        Raises:
            Refusal: 503 if all downloads together hold too much memory. Clients retry a 503.
        """
        key_id = record.key_id
        path = self._parts.files.data_path(key_id, record.id)
        async with turns:
            self._memory.take(key_id, DOWNLOAD_BYTES)
            try:
                async for part in self._parts.objects.stream(path):
                    yield part
            finally:
                self._memory.give_back(key_id, DOWNLOAD_BYTES)

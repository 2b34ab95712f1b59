"""Files: their list, their content and their end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from urllib.parse import quote

from fleetkeeper_gateway.batch.api.call import Call, Stream
from fleetkeeper_gateway.batch.api.checks import NO_RETRY, checked_file_id, no_file
from fleetkeeper_gateway.batch.api.documents import file_document, list_document
from fleetkeeper_gateway.batch.api.pages import parse_page
from fleetkeeper_gateway.batch.api.parts import ApiParts
from fleetkeeper_gateway.batch.api.per_key import PerKey
from fleetkeeper_gateway.batch.interfaces import ObjectMissing
from fleetkeeper_gateway.batch.model import FileRecord
from fleetkeeper_gateway.http.errors import Refusal

_MOST_LISTED = 10_000


class FileCalls:
    """Calls about files that exist."""

    def __init__(self, parts: ApiParts, per_key: PerKey) -> None:
        self._parts = parts
        self._per_key = per_key

    async def list(self, call: Call) -> object:
        """Return a page of the files of a key."""
        parts = self._parts
        page = parse_page(call.scope["query_string"], default=_MOST_LISTED, most=_MOST_LISTED)
        files = [
            record
            for record in await parts.files.list(call.key_id)
            if parts.exists(record) and page.purpose in (None, record.purpose)
        ]
        items, has_more = page.cut(files, no_file)
        documents = [file_document(record, parts.expiry(record)) for record in items]
        return list_document(documents, has_more=has_more)

    async def get(self, call: Call) -> object:
        """Return a file."""
        record = await self._found(call)
        return file_document(record, self._parts.expiry(record))

    async def content(self, call: Call) -> Stream:
        """Return the bytes of a file."""
        record = await self._found(call)
        parts = self._bytes(record)
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
        """Delete a file that no active batch reads."""
        parts = self._parts
        turns = self._per_key.turns(call.key_id)
        async with turns.change:
            record = await self._found(call)
            for batch in await parts.batches.active():
                if batch.key_id == call.key_id and batch.input_file == record.id:
                    raise Refusal(
                        409,
                        "file_in_use",
                        f"{batch.id} reads the file. Cancel it, or wait for its end.",
                        param="id",
                        headers=NO_RETRY,
                    )
            await parts.files.delete(call.key_id, record.id)
        return {"id": record.id, "object": "file", "deleted": True}

    async def _bytes(self, record: FileRecord) -> AsyncGenerator[bytes, None]:
        """Yield the parts of a file, once its key has a turn, which lasts until this is closed."""
        path = self._parts.files.data_path(record.key_id, record.id)
        turns = self._per_key.turns(record.key_id)
        async with turns.downloads:
            async for part in self._parts.objects.stream(path):
                yield part

    async def _found(self, call: Call) -> FileRecord:
        """Return the file of the path.

        Raises:
            Refusal: if the key has none of that ID.
        """
        file_id = checked_file_id(call.path_id())
        record = await self._parts.files.get(call.key_id, file_id)
        if record is None or not self._parts.exists(record):
            raise no_file(file_id)
        return record

"""POST /v1/files: a file is checked and stored while it arrives."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from fleetkeeper_gateway.batch.api.call import Call
from fleetkeeper_gateway.batch.api.checks import (
    MAX_EXPIRY_S,
    MIN_EXPIRY_S,
    NO_RETRY,
    PURPOSE,
    invalid,
)
from fleetkeeper_gateway.batch.api.documents import file_document
from fleetkeeper_gateway.batch.api.multipart import Form, Part
from fleetkeeper_gateway.batch.api.parts import ApiParts
from fleetkeeper_gateway.batch.api.per_key import PerKey
from fleetkeeper_gateway.batch.interfaces import StorageError
from fleetkeeper_gateway.batch.model import FileRecord
from fleetkeeper_gateway.http.asgi import ClientGone
from fleetkeeper_gateway.http.bodies import BodyBudget
from fleetkeeper_gateway.http.errors import Refusal
from fleetkeeper_gateway.keys.bearer import invalid as invalid_key

log: structlog.stdlib.BoundLogger = structlog.get_logger("fleetkeeper_gateway.batch.api")

MIB = 1_048_576
UPLOAD_BYTES = 24 * MIB
"""What one upload may hold in memory: the parts that an object store has not confirmed."""
MEMORY_BYTES = 21 * UPLOAD_BYTES
"""What all uploads may hold. A pod has 2 GiB by default."""
_FIELD_BYTES = 1024
_FORM_BYTES = 65_536
"""What a body may have beside the file itself."""
_FILENAME_CHARACTERS = 255
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class UploadedFile:
    """The form of an upload. Its file is read as a stream."""

    def __init__(self, form: Form, max_bytes: int, left_bytes: int) -> None:
        self._form = form
        self._max_bytes = max_bytes
        self._left_bytes = left_bytes
        self._fields: dict[str, str] = {}
        self.filename = ""
        self.bytes = 0
        self.failure: Refusal | ClientGone | None = None
        """Why `parts` ended early. A store may report it as an error of its own."""

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the file, and end only after the whole form was read and is valid.

        So nothing is stored of a form that is not complete.

        Raises:
            ClientGone: if the client hung up.
            Refusal: if the form is malformed, or the file is too large.
        """
        try:
            while (part := await self._form.next_part()) is not None:
                if part.name == "file":
                    self._name(part)
                    async for piece in self._form.data():
                        self._count(len(piece))
                        yield piece
                else:
                    await self._read_field(part.name)
            self._check()
        except (Refusal, ClientGone) as error:
            self.failure = error
            raise

    @property
    def expires_after_s(self) -> int | None:
        """Return the seconds after which the file expires."""
        seconds = self._fields.get(_SECONDS)
        return None if seconds is None else int(seconds)

    def _name(self, part: Part) -> None:
        if self.filename:
            raise invalid("file", "One upload has one file.")
        if part.filename is None:
            raise invalid("file", "The field file must be a file, with a file name.")
        base = re.split(r"[/\\]", part.filename)[-1]
        self.filename = _UNPRINTABLE.sub("_", base)[:_FILENAME_CHARACTERS] or "upload"

    def _count(self, size: int) -> None:
        self.bytes += size
        if self.bytes > self._max_bytes:
            raise file_too_large(self._max_bytes)
        if self.bytes > self._left_bytes:
            raise bytes_exceeded()

    async def _read_field(self, name: str) -> None:
        """Read a field. Those that are unknown are ignored."""
        if name in self._fields:
            raise invalid(name[:100], "The field is there twice.")
        value = self._fields[name] = await self._form.text(_FIELD_BYTES)
        if name == "purpose" and value != PURPOSE:
            raise invalid("purpose", f"The purpose of an uploaded file must be {PURPOSE}.")
        if name == _ANCHOR and value != "created_at":
            raise invalid(_ANCHOR, "It must be created_at.")
        if name == _SECONDS and not (
            re.fullmatch("[0-9]{1,9}", value) and MIN_EXPIRY_S <= int(value) <= MAX_EXPIRY_S
        ):
            raise invalid(_SECONDS, f"It must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}.")

    def _check(self) -> None:
        if "purpose" not in self._fields:
            raise invalid("purpose", f"The form has no purpose. It must be {PURPOSE}.")
        if not self.filename:
            raise invalid("file", "The form has no file.")
        if (_ANCHOR in self._fields) != (_SECONDS in self._fields):
            raise invalid("expires_after", "It needs both anchor and seconds.")
        if not self.bytes:
            raise Refusal(400, "empty_file", "The file is empty.", param="file")


class UploadCalls:
    """Uploads of files."""

    def __init__(self, parts: ApiParts, per_key: PerKey) -> None:
        self._parts = parts
        self._per_key = per_key
        self._memory = BodyBudget(MEMORY_BYTES)

    async def create(self, call: Call) -> object:
        """Store a file and return it."""
        parts = self._parts
        announced = call.headers.content_length
        if announced is not None and announced > parts.max_file_bytes + _FORM_BYTES:
            raise file_too_large(parts.max_file_bytes)
        form = Form(call.header(b"content-type"), call.read_part)
        turns = self._per_key.turns(call.key_id)
        async with turns.uploads, self._place(call.key_id):
            left_bytes = await self._check_quota(call.key_id, (announced or 0) - _FORM_BYTES)
            upload = UploadedFile(form, parts.max_file_bytes, left_bytes)
            file_id = f"file-{uuid.uuid4().hex}"
            path = parts.files.data_path(call.key_id, file_id)
            try:
                size = await parts.objects.write(path, upload.parts())
            except Exception as error:
                if upload.failure is not None:
                    raise upload.failure from error
                raise
            try:
                async with turns.change:
                    record = await self._keep(call.key_id, file_id, upload, size)
            except BaseException:
                await self._discard(call.key_id, file_id, path)
                raise
        return file_document(record, parts.expiry(record))

    @asynccontextmanager
    async def _place(self, key_id: str) -> AsyncIterator[None]:
        """Hold the memory of an upload.

        Raises:
            Refusal: there is none left for the key. A client that knows 503 tries again.
        """
        self._memory.take(key_id, UPLOAD_BYTES)
        try:
            yield
        finally:
            self._memory.give_back(key_id, UPLOAD_BYTES)

    async def _keep(self, key_id: str, file_id: str, upload: UploadedFile, size: int) -> FileRecord:
        """Make a stored file exist, if the key is still in force and has not reached its quota."""
        parts, now = self._parts, self._parts.now
        if not parts.keys.in_force(key_id, now):
            raise invalid_key(key_id)
        await self._check_quota(key_id, size)
        after_s = upload.expires_after_s
        record = FileRecord(
            id=file_id,
            key_id=key_id,
            filename=upload.filename,
            purpose=PURPOSE,
            bytes=size,
            created=now,
            expires=None if after_s is None else now + after_s,
        )
        await parts.files.put(record)
        return record

    async def _check_quota(self, key_id: str, size: int) -> int:
        """Return the bytes that a key may still store.

        Raises:
            Refusal: if it may not store one more file of this size.
        """
        settings = self._parts.settings
        stored = await self._parts.files.list(key_id)
        if len(stored) >= settings.batch_key_files:
            raise Refusal(
                429,
                "file_quota_exceeded",
                f"Your key has {len(stored)} files, and may have {settings.batch_key_files}. "
                "Delete some: DELETE /v1/files/ID.",
                headers=NO_RETRY,
            )
        left = settings.batch_key_bytes - sum(record.bytes for record in stored)
        if size > left:
            raise bytes_exceeded()
        return left

    async def _discard(self, key_id: str, file_id: str, path: str) -> None:
        """Remove what was stored. The record goes first: a file without its bytes must not exist."""
        parts = self._parts
        try:
            await parts.files.delete(key_id, file_id)
            await parts.objects.delete([path])
        except StorageError as error:
            log.warning("a refused upload stays in the store", file=file_id, error=str(error))


def file_too_large(max_bytes: int) -> Refusal:
    """Return the refusal of a file above the limit."""
    return Refusal(
        413,
        "file_too_large",
        f"The file is larger than {max_bytes} bytes. Split it into several batches.",
        param="file",
    )


def bytes_exceeded() -> Refusal:
    """Return the refusal of a file for which a key has no bytes left."""
    return Refusal(
        413,
        "byte_quota_exceeded",
        "The files of your key would exceed the bytes that it may store. Delete some: "
        "DELETE /v1/files/ID.",
        param="file",
    )

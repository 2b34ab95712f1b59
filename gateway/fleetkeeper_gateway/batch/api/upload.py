"""POST /v1/files: checks and stores a file while it arrives."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final

import structlog
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from fleetkeeper_gateway.batch.api.call import Call
from fleetkeeper_gateway.batch.api.checks import (
    MAX_EXPIRY_S,
    MIN_EXPIRY_S,
    NO_RETRY,
    PURPOSE,
    invalid,
)
from fleetkeeper_gateway.batch.api.documents import file_document
from fleetkeeper_gateway.batch.api.parts import ApiParts
from fleetkeeper_gateway.batch.interfaces import StorageError
from fleetkeeper_gateway.batch.model import FileRecord
from fleetkeeper_gateway.http.asgi import ClientGone
from fleetkeeper_gateway.http.connections.bodies import BodyBudget
from fleetkeeper_gateway.http.errors import Refusal
from fleetkeeper_gateway.keys.bearer import invalid as invalid_key

log: structlog.stdlib.BoundLogger = structlog.get_logger("fleetkeeper_gateway.batch.api")

MIB = 1_048_576
UPLOAD_BYTES = 24 * MIB
"""Memory of an upload: the parts that the object store has not confirmed."""
MEMORY_BYTES = 21 * UPLOAD_BYTES
"""Maximum memory of all uploads. Uploads, downloads and logs share the 1 GiB that the chart leaves for the parent."""
MAX_PARTS: Final = 16
_BOUNDARY_CHARACTERS = 200
_FIELD_BYTES = 1024
_FORM_BYTES = 65_536
"""Maximum bytes of a body beside the file itself."""
_FILENAME_CHARACTERS = 255
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class UploadedFile:
    """The form of an upload. Its file is read as a stream."""

    def __init__(
        self, content_type: str, read: Callable[[], Awaitable[bytes]], max_bytes: int
    ) -> None:
        """Create a form.

        Args:
            content_type: the request's Content-Type.
            read: returns the next bytes of the body; nothing at its end.
            max_bytes: maximum bytes of the file.

        Raises:
            Refusal: if the body is not a form.
        """
        self._parser = PushMultipartParser(_boundary(content_type), max_segment_count=MAX_PARTS)
        self._read = read
        self._max_bytes = max_bytes
        self._fields: dict[str, str] = {}
        self._name = ""
        """Name of the current part."""
        self._text = bytearray()
        """Text of the current field."""
        self.filename = ""
        self.bytes = 0
        self.left_bytes = max_bytes
        """Bytes that the key may still store."""
        self.failure: Refusal | ClientGone | None = None
        """The error with which `parts` ended. A store may report it as an error of its own."""

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the file, and end only after the whole form was read and is valid.

        So nothing of an incomplete form is stored.

        Raises:
            ClientGone: if the client closed the connection.
            Refusal: if the form is malformed, or the file is too large.
        """
        received = 0
        try:
            while data := await self._read():
                received += len(data)
                for found in self._parsed(data):
                    if piece := self._take(found):
                        yield piece
                if received - self.bytes > _FORM_BYTES:
                    raise _malformed(f"it has more than {_FORM_BYTES} bytes beside the file")
            for _ in self._parsed(b""):
                pass
            self._check()
        except (Refusal, ClientGone) as error:
            self.failure = error
            raise

    def _parsed(self, data: bytes) -> Iterator[MultipartSegment | bytes | None]:
        """Yield the elements in the next bytes of the form: heads of parts, their data, None at their end."""
        try:
            yield from self._parser.parse(data)
        except MultipartError as error:
            raise _malformed(str(error)) from None

    def _take(self, found: MultipartSegment | bytes | None) -> bytes:
        """Return the bytes of an element that belong to the file."""
        if isinstance(found, MultipartSegment):
            self._name = found.name or ""
            self._text.clear()
            if self._name == "file":
                self._begin_file(found.filename)
        elif self._name == "file":
            self._count(len(found or b""))
            return found or b""
        elif found is None:
            self._end_field()
        else:
            self._text += found
            if len(self._text) > _FIELD_BYTES:
                raise _malformed(f"a field has more than {_FIELD_BYTES} bytes")
        return b""

    @property
    def expires_after_s(self) -> int | None:
        """Return the seconds after which the file expires."""
        seconds = self._fields.get(_SECONDS)
        return None if seconds is None else int(seconds)

    def _begin_file(self, filename: str | None) -> None:
        if self.filename:
            raise invalid("file", "One upload has one file.")
        if filename is None:
            raise invalid("file", "The field file must be a file, with a file name.")
        base = re.split(r"[/\\]", filename)[-1]
        self.filename = _UNPRINTABLE.sub("_", base)[:_FILENAME_CHARACTERS] or "upload"

    def _count(self, size: int) -> None:
        self.bytes += size
        if self.bytes > self._max_bytes:
            raise file_too_large(self._max_bytes)
        if self.bytes > self.left_bytes:
            raise bytes_exceeded()

    def _end_field(self) -> None:
        """Store a field. Unknown fields are ignored."""
        name = self._name
        if name in self._fields:
            raise invalid(name[:100], "The field is there twice.")
        try:
            value = self._fields[name] = self._text.decode()
        except UnicodeDecodeError:
            raise _malformed("a field is not UTF-8") from None
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

    def __init__(self, parts: ApiParts) -> None:
        self._parts = parts
        self._memory = BodyBudget(MEMORY_BYTES)

    async def create(self, call: Call) -> object:
        """Store a file and return it."""
        parts = self._parts
        announced = call.headers.content_length
        if announced is not None and announced > parts.max_file_bytes + _FORM_BYTES:
            raise file_too_large(parts.max_file_bytes)
        content_type = dict(call.scope["headers"]).get(b"content-type", b"").decode("latin-1")
        upload = UploadedFile(content_type, call.read_part, parts.max_file_bytes)
        async with call.key.uploads:
            # Clients retry a 503.
            self._memory.take(call.key_id, UPLOAD_BYTES)
            try:
                size = (announced or 0) - _FORM_BYTES
                upload.left_bytes = await self._check_quota(call.key_id, size)
                record = await self._store(call, upload)
            finally:
                self._memory.give_back(call.key_id, UPLOAD_BYTES)
        return file_document(record, parts.expiry(record))

    async def _store(self, call: Call, upload: UploadedFile) -> FileRecord:
        parts = self._parts
        file_id = f"file-{uuid.uuid4().hex}"
        path = parts.files.data_path(call.key_id, file_id)
        try:
            size = await parts.objects.write(path, upload.parts())
        except Exception as error:
            if upload.failure is not None:
                raise upload.failure from error
            raise
        try:
            async with call.key.change:
                return await self._keep(call.key_id, file_id, upload, size)
        except BaseException:
            await self._discard(call.key_id, file_id, path)
            raise

    async def _keep(self, key_id: str, file_id: str, upload: UploadedFile, size: int) -> FileRecord:
        """Write the record of a stored file, if the key is still valid and below its quota."""
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
            Refusal: if a quota does not allow another file of this size.
        """
        settings = self._parts.settings
        stored = await self._parts.files.usage(key_id)
        if stored.files >= settings.batch_key_files:
            raise Refusal(
                429,
                "file_quota_exceeded",
                f"Your key has {stored.files} files, and may have {settings.batch_key_files}. "
                "Delete some: DELETE /v1/files/ID.",
                headers=NO_RETRY,
            )
        left = settings.batch_key_bytes - stored.bytes
        if size > left:
            raise bytes_exceeded()
        return left

    async def _discard(self, key_id: str, file_id: str, path: str) -> None:
        """Remove the stored file, first its record: a file without its bytes must not exist."""
        parts = self._parts
        try:
            await parts.files.delete(key_id, file_id)
            await parts.objects.delete([path])
        except StorageError as error:
            log.warning("a refused upload stays in the store", file=file_id, error=str(error))


def _boundary(content_type: str) -> str:
    kind, options = parse_options_header(content_type)
    boundary: str = options.get("boundary", "")
    if kind != "multipart/form-data" or not boundary:
        raise Refusal(
            400,
            "invalid_form",
            "A file is uploaded as multipart/form-data with a boundary: fields purpose and file.",
        )
    if len(boundary) > _BOUNDARY_CHARACTERS:
        raise _malformed(f"its boundary has more than {_BOUNDARY_CHARACTERS} bytes")
    return boundary


def _malformed(why: str) -> Refusal:
    return Refusal(400, "invalid_form", f"The form cannot be read: {why}.")


def file_too_large(max_bytes: int) -> Refusal:
    """Return the refusal of a file above the maximum size."""
    return Refusal(
        413,
        "file_too_large",
        f"The file is larger than {max_bytes} bytes. Split it into several batches.",
        param="file",
    )


def bytes_exceeded() -> Refusal:
    """Return the refusal of a file that exceeds the bytes of its key."""
    return Refusal(
        413,
        "byte_quota_exceeded",
        "The files of your key would exceed the bytes that it may store. Delete some: "
        "DELETE /v1/files/ID.",
        param="file",
    )

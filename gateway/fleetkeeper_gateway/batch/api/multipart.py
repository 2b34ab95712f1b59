"""Reads a multipart/form-data body as it arrives. It holds what the client sent last, never a whole file.

A framework's parser keeps files on disk before the application sees them, so a file would be written
twice, and refused only at its end.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from fleetkeeper_gateway.http.errors import Refusal

MAX_HEAD_BYTES: Final = 8192
"""Bytes of the headers of a part."""
MAX_PARTS: Final = 16
_MAX_BOUNDARY_BYTES = 200
_MAX_EPILOGUE_BYTES = 65_536
_MAX_NAME_CHARACTERS = 1000
_END_OF_HEAD = b"\r\n\r\n"
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]+)"|([^;\s"]+))', re.IGNORECASE)
_DISPOSITION = re.compile(
    rb"^content-disposition:\s*form-data\s*(;.*)$", re.IGNORECASE | re.MULTILINE
)
_PARAMETER = re.compile(rb';\s*(name|filename)=(?:"((?:[^"\\]|\\.)*)"|([^;\s"]+))', re.IGNORECASE)
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Part:
    """The head of a part of a form."""

    name: str
    filename: str | None
    """As the client named it, undecoded: it may hold a path. None: it is a field."""


class Form:
    """The parts of a form, in the order they arrive."""

    def __init__(self, content_type: str, read: Callable[[], Awaitable[bytes]]) -> None:
        """Describe a form.

        Args:
            content_type: the header of the request.
            read: returns the next bytes of the body; nothing at its end.

        Raises:
            Refusal: if it is no form.
        """
        self._delimiter = b"\r\n--" + _boundary(content_type)
        self._read = read
        # The first delimiter has no line before it.
        self._buffer = bytearray(b"\r\n")
        self._parts = 0
        self._in_data = False

    async def next_part(self) -> Part | None:
        """Return the next part; None once the whole body was read. The data of a part is read first.

        Raises:
            Refusal: if the body is malformed.
        """
        if self._in_data:
            raise RuntimeError("the data of the part before was not read")
        if self._parts == 0:
            await self._fill(len(self._delimiter))
            if not self._buffer.startswith(self._delimiter):
                raise _malformed("it does not begin with its boundary")
            del self._buffer[: len(self._delimiter)]
        await self._fill(2)
        if self._buffer.startswith(b"--"):
            await self._read_epilogue()
            return None
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts")
        part = _parse_head(await self._head())
        self._in_data = True
        return part

    async def data(self) -> AsyncIterator[bytes]:
        """Yield the data of the part whose head was read.

        Raises:
            Refusal: if the body ends before the part does.
        """
        buffer, delimiter = self._buffer, self._delimiter
        while (end := buffer.find(delimiter)) < 0:
            # The last bytes may be the beginning of the delimiter.
            ready = len(buffer) - len(delimiter) + 1
            if ready > 0:
                piece = bytes(buffer[:ready])
                del buffer[:ready]
                yield piece
            await self._fill_more()
        piece = bytes(buffer[:end])
        del buffer[: end + len(delimiter)]
        self._in_data = False
        if piece:
            yield piece

    async def text(self, max_bytes: int) -> str:
        """Return the data of a part that is a short text.

        Raises:
            Refusal: if it is too long or not UTF-8.
        """
        data = bytearray()
        async for piece in self.data():
            data += piece
            if len(data) > max_bytes:
                raise _malformed(f"a field has more than {max_bytes} bytes")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise _malformed("a field is not UTF-8") from None

    async def _head(self) -> bytes:
        """Return the headers of a part. The line break that ends its delimiter is their first."""
        while (end := self._buffer.find(_END_OF_HEAD, 0, MAX_HEAD_BYTES)) < 0:
            if len(self._buffer) >= MAX_HEAD_BYTES:
                raise _malformed(f"a part has more than {MAX_HEAD_BYTES} bytes of headers")
            await self._fill_more()
        head = bytes(self._buffer[:end])
        del self._buffer[: end + len(_END_OF_HEAD)]
        if not head.startswith(b"\r\n"):
            raise _malformed("a boundary is followed by something else than a line break")
        return head

    async def _read_epilogue(self) -> None:
        """Read what follows the end of the form: a line break, as a rule."""
        size = len(self._buffer)
        while part := await self._read():
            size += len(part)
            if size > _MAX_EPILOGUE_BYTES:
                raise _malformed("something follows the end of the form")

    async def _fill(self, size: int) -> None:
        while len(self._buffer) < size:
            await self._fill_more()

    async def _fill_more(self) -> None:
        part = await self._read()
        if not part:
            raise _malformed("it ends before its last boundary")
        self._buffer += part


def _boundary(content_type: str) -> bytes:
    kind = content_type.partition(";")[0].strip().lower()
    found = _BOUNDARY.search(content_type)
    if kind != "multipart/form-data" or found is None:
        raise Refusal(
            400,
            "invalid_form",
            "A file is uploaded as multipart/form-data with a boundary: fields purpose and file.",
        )
    boundary = (found[1] or found[2]).encode("latin-1")
    if len(boundary) > _MAX_BOUNDARY_BYTES:
        raise _malformed(f"its boundary has more than {_MAX_BOUNDARY_BYTES} bytes")
    return boundary


def _parse_head(head: bytes) -> Part:
    disposition = _DISPOSITION.search(head.replace(b"\r\n", b"\n"))
    if disposition is None:
        raise _malformed("a part has no Content-Disposition of a form")
    texts = {
        name.lower(): _unescaped(quoted or token)
        for name, quoted, token in _PARAMETER.findall(disposition[1])
    }
    name = texts.get(b"name")
    if name is None or len(name) > _MAX_NAME_CHARACTERS:
        raise _malformed("a part has no name")
    return Part(name, texts.get(b"filename"))


def _unescaped(value: bytes) -> str:
    return _ESCAPED.sub(r"\1", value.decode("utf-8", "replace"))


def _malformed(why: str) -> Refusal:
    return Refusal(400, "invalid_form", f"The form cannot be read: {why}.")

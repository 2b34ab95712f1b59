"""The body of a request to a service."""

from __future__ import annotations

from typing import Final

from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

PART_BYTES: Final = 65_536


class LargeBody(Payload):
    """A body that is written part by part, so that other requests run in between."""

    _value: bytes
    _autoclose = True

    def __init__(self, value: bytes) -> None:
        super().__init__(value)
        self._size = len(value)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the body as text."""
        return self._value.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the whole body."""
        await self.write_with_length(writer, None)

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        """Write at most `content_length` bytes of the body."""
        end = self._size or 0
        if content_length is not None:
            end = min(end, content_length)
        for start in range(0, end, PART_BYTES):
            await writer.write(self._value[start : min(start + PART_BYTES, end)])


def body_of(data: bytes) -> bytes | LargeBody:
    """Return a body in the form that suits the client library."""
    return data if len(data) <= PART_BYTES else LargeBody(data)

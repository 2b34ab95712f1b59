"""The body of a request to a service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

PART_BYTES: Final = 65_536


class LargeBody(Payload):
    """A body that is written part by part, so that other requests run in between.

    `connected` is called before the first part: the connection was made.
    """

    _value: bytes
    _autoclose = True

    def __init__(self, value: bytes, connected: Callable[[], None] | None = None) -> None:
        super().__init__(value)
        self._size = len(value)
        self._connected = connected

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
        if self._connected is not None:
            self._connected()
        end = self._size or 0
        if content_length is not None:
            end = min(end, content_length)
        for start in range(0, end, PART_BYTES):
            await writer.write(self._value[start : min(start + PART_BYTES, end)])


def body_of(data: bytes, connected: Callable[[], None] | None = None) -> bytes | LargeBody:
    """Return a body in the form that suits the client library."""
    if connected is None and len(data) <= PART_BYTES:
        return data
    return LargeBody(data, connected)

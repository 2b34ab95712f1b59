"""Connections to services with bounds on interim responses and framing, against floods.

A client library reads any number of `100 Continue` before an answer, and chunks of one byte. Each costs
the processor as much as a kilobyte of an answer does.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler

MAX_INTERIM: Final = 10
"""Maximum interim responses (100 to 199) before an answer."""
MAX_FRAMING_BYTES: Final = 32_768
"""Maximum bytes of an answer beside its body (its head, and the lengths of its chunks), plus a quarter of the
body. An event with a token has more than 100 bytes, and 6 of them are framing."""
_PART_BYTES: Final = 32_768
"""Bytes that are parsed between two checks of the bounds."""


class FloodError(aiohttp.ClientPayloadError):
    """A service sent far more messages or chunks than an answer needs."""


class BoundedResponses(ResponseHandler):
    """One connection to a service."""

    _interim = 0
    _wire_bytes = 0
    _is_flooded = False

    def set_response_params(self, **params: Any) -> None:  # noqa: ANN401 - the library's
        """Reset the counts for the answer to a new request."""
        self._interim = self._wire_bytes = 0
        super().set_response_params(**params)

    def feed_data(self, data: Any, size: int = 0) -> None:  # noqa: ANN401 - the library's
        """Count a message: an interim response or the answer."""
        if 100 <= data[0].code < 200:
            self._interim += 1
        if self._interim <= MAX_INTERIM:
            super().feed_data(data, size)
        else:
            self._end("interim answers without end")

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the service, and end the connection if they are a flood."""
        size = len(data)
        if size > _PART_BYTES:
            for start in range(0, size, _PART_BYTES):
                self.data_received(data[start : start + _PART_BYTES])
            return
        if self._is_flooded:
            return
        super().data_received(data)
        self._wire_bytes += size
        # The parser keeps bytes back for a slow reader. It parses them all before more are read.
        if self._wire_bytes > MAX_FRAMING_BYTES and not self._reading_paused:
            self._check_framing()

    def _check_framing(self) -> None:
        payload = self._payload
        body_bytes = payload.total_bytes if payload is not None else 0
        if self._wire_bytes - body_bytes > MAX_FRAMING_BYTES + body_bytes // 4:
            self._end("an answer of very small chunks")

    def _end(self, reason: str) -> None:
        if self._is_flooded:
            return
        self._is_flooded = True
        error = FloodError(reason)
        if self._payload is not None:
            self._payload.set_exception(error)
        self.set_exception(error)
        if self.transport is not None:
            self.transport.abort()


class BoundedConnector(aiohttp.TCPConnector):
    """A connector whose connections cannot be flooded."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - the library's
        """Accept the options of the library's connector."""
        super().__init__(**options)
        # The library has no other way to choose the class.
        self._factory = partial(BoundedResponses, loop=self._loop)  # type: ignore[assignment]

"""Connections to services that cannot flood the gateway: interim answers and framing are bounded.

A client library reads any number of `100 Continue` before an answer, and chunks of one byte. Each costs
the processor as much as a kilobyte of an answer does.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler

MAX_INTERIM: Final = 10
"""Interim answers (100 to 199) before an answer."""
MAX_FRAMING_BYTES: Final = 32_768
"""Bytes of an answer that are no body: its head, and the lengths of its chunks. A quarter of the body
comes on top. An event with a token has more than 100 bytes, and 6 of them are framing."""
_PART_BYTES: Final = 32_768
"""What is parsed before the bounds are checked again."""


class FloodError(aiohttp.ClientPayloadError):
    """A service sends far more messages or chunks than an answer needs."""


class BoundedResponses(ResponseHandler):
    """One connection to a service."""

    _interim = 0
    _wire_bytes = 0
    _is_flooded = False

    def set_response_params(self, **params: Any) -> None:  # noqa: ANN401 - the library's
        """Begin with the answer to a request."""
        self._interim = self._wire_bytes = 0
        super().set_response_params(**params)

    def feed_data(self, data: Any, size: int = 0) -> None:  # noqa: ANN401 - the library's
        """Take a message, which is an interim answer or the answer."""
        if 100 <= data[0].code < 200:
            self._interim += 1
        if self._interim <= MAX_INTERIM:
            super().feed_data(data, size)
        else:
            self._end("interim answers without end")

    def data_received(self, data: bytes) -> None:
        """Parse bytes of the service, and end the connection if they are a flood."""
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
        """Take the options of the library's connector."""
        super().__init__(**options)
        # The library has no other way to choose the class.
        self._factory = partial(BoundedResponses, loop=self._loop)  # type: ignore[assignment]

"""Responses of kopf's HTTP session for InferenceServices, checked so that kopf can decode them.

kopf, and the operator with it, ends at the first response that cannot be decoded. A user who may create an
InferenceService can nest its managedFields deeper than Python can decode. In a watch, such an object is
replaced by a stand-in; in a list, its page is left to the next resync.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, Final

import aiohttp
import structlog

from fleetkeeper_kube.bounds import bounded_lines, decoded, decoded_event, page_metadata, whole
from fleetkeeper_kube.errors import BrokenAnswer, NotTaken

log = structlog.get_logger(__name__)

MIN_WATCH_S: Final = 1.0
"""Minimum duration of a watch. kopf opens the next one at once: an API server or proxy that closes
each watch without an answer got 5,639 requests in 2 s."""


class DecodableResponse(aiohttp.ClientResponse):
    """A response whose JSON and lines can be decoded."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:  # noqa: ANN401 -- aiohttp's own
        """Read the headers; the content is read through `_Lines`."""
        await super().start(connection)
        self.content = _Lines(self.content)  # type: ignore[assignment] # all of it but iter_chunked
        return self

    async def json(self, **_: Any) -> Any:  # noqa: ANN401 -- as aiohttp declares it
        """Return the object; a list that cannot be decoded has no items.

        Raises:
            json.JSONDecodeError: an error's body is not JSON, for example a proxy's 503 in plain
                text. kopf then uses the text.
            aiohttp.ClientPayloadError: the response was cut off or is not JSON. kopf then retries.
            NotTaken: it cannot be decoded, and is not a list.
        """
        try:
            return decoded(await self.read())
        except BrokenAnswer as problem:
            if self.status >= HTTPStatus.BAD_REQUEST:
                raise json.JSONDecodeError(problem.message, "", 0) from problem
            raise aiohttp.ClientPayloadError(problem.message) from problem
        except NotTaken as problem:
            metadata = page_metadata(problem)
            if metadata is None:
                raise
            log.warning("page of services skipped until the next resync", why=problem.message)
            return {"metadata": metadata, "items": []}


class _Lines:
    """A wrapper of a stream whose lines can all be decoded; otherwise the stream itself."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- any attribute of the stream
        return getattr(self._content, name)

    async def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        """Yield whole lines, which kopf decodes one by one; end after `MIN_WATCH_S` at the earliest."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async for line in bounded_lines(self._content):
            if (known := _decodable(line)) is not None:
                yield known
        await asyncio.sleep(began + MIN_WATCH_S - loop.time())


def _decodable(line: bytes) -> bytes | None:
    """Return the line, or one with a stand-in; None if it does not say which object it is about.

    Raises:
        aiohttp.ClientPayloadError: it is not JSON, as after a cut connection; kopf reconnects.
    """
    try:
        decoded(whole(line))
    except NotTaken:
        return _stand_in_line(line)
    except BrokenAnswer as problem:
        raise aiohttp.ClientPayloadError(problem.message) from problem
    return line + b"\n"


def _stand_in_line(line: bytes) -> bytes | None:
    try:
        return json.dumps(decoded_event(line)).encode() + b"\n"
    except BrokenAnswer as problem:
        log.warning("service event skipped until the next resync", why=problem.message)
        return None

"""Attempts to send a request: repeated until it is sent, never afterwards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from fleetkeeper_gateway.interfaces import Service
from fleetkeeper_gateway.telemetry import metrics
from fleetkeeper_gateway.upstream.body import body_of
from fleetkeeper_gateway.upstream.not_sent import MAX_BYTES, SHED, is_refusal, is_shed

_FIRST_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 1.0
SHORT_WAIT_S: Final = 0.1
"""Time of a request that does not wait: it may reach another replica than one that drains."""
_BODY_TIMEOUT_S: Final = 5.0
"""Time for the short body of a 503."""


class NotSent(Exception):
    """No service accepted the request before the wait ended."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SendFailed(Exception):
    """The request was sent, but no usable response came. An engine may have worked on it."""


class Opened(NamedTuple):
    """A response whose head arrived."""

    response: aiohttp.ClientResponse
    first: bytes
    """The whole body if it was read already, otherwise empty."""
    complete: bool
    """True if `first` is the whole body."""


class Attempt(NamedTuple):
    """The request of one attempt."""

    service: Service
    headers: list[tuple[str, str]]


@lru_cache(maxsize=16_384)
def _address(base: str, path: str) -> URL:
    return URL(base.rstrip("/") + path, encoded=True)


def _with_query(address: URL, query: str) -> URL:
    # Not cached: a client chooses it.
    return URL(f"{address}?{query}", encoded=True) if query else address


class Upstream:
    """Sends requests to services."""

    def __init__(self, session: aiohttp.ClientSession, wait_s: float) -> None:
        self._session = session
        self._wait_s = wait_s

    async def open(
        self,
        path: str,
        query: str,
        body: bytes,
        attempt: Callable[[], Attempt | None],
        sending: Callable[[bool], None],
        *,
        wait_s: float | None = None,
        connected: Callable[[], None] | None = None,
    ) -> Opened:
        """Send a request and return its response.

        Args:
            path: the path to send it to.
            query: the query string, encoded.
            body: the whole body.
            attempt: returns the request of the next attempt, for the service's present state; None if
                the service is gone or has no address.
            sending: called with True once the request may have been sent, and with False once it is
                known that it was not.
            wait_s: the time to try again, if it is shorter than the whole wait. 0: one attempt.
            connected: called once an attempt has a connection; before, the request is not sent. With it,
                an answer that sheds the request (429) counts as not sent: its caller sends it again.

        Raises:
            NotSent: if no service accepted it before the wait ended.
            SendFailed: if it was sent and failed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._wait_s if wait_s is None else min(self._wait_s, wait_s))
        pause_s = _FIRST_PAUSE_S

        def at_connection() -> None:
            sending(True)
            if connected is not None:
                connected()

        while True:
            made = attempt()
            if made is None:
                raise NotSent("service_gone")
            if connected is None:
                sending(True)
            try:
                return await self._send(
                    made, path, query, body, None if connected is None else at_connection
                )
            except NotSent as error:
                sending(False)
                metrics.NOT_SENT.labels(error.reason).inc()
                left_s = deadline - loop.time()
                if left_s <= 0:
                    raise
            await asyncio.sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))  # noqa: S311 - no secret
            pause_s = min(pause_s * 2, _MAX_PAUSE_S)

    async def _send(
        self,
        attempt: Attempt,
        path: str,
        query: str,
        body: bytes,
        connected: Callable[[], None] | None,
    ) -> Opened:
        try:
            response = await self._session.request(
                "POST",
                _with_query(_address(attempt.service.url, path), query),
                data=body_of(body, connected),
                headers=CIMultiDict(attempt.headers),
                allow_redirects=False,
            )
        except aiohttp.ConnectionTimeoutError:
            raise NotSent("connect_timeout") from None
        except aiohttp.ClientConnectorDNSError:
            raise NotSent("no_address") from None
        except aiohttp.ClientConnectorError:
            raise NotSent("refused") from None
        except (aiohttp.ClientError, OSError) as error:
            raise SendFailed(type(error).__name__) from error
        if response.status < 200:
            response.close()
            raise SendFailed("protocol_changed")
        if 300 <= response.status < 400 or response.status >= 600:
            # A client that followed a redirect would send its key to an address that the service chose.
            response.close()
            raise SendFailed(f"status_{response.status}")
        if response.status == 503 or (response.status == 429 and connected is not None):
            return await self._refusal(response)
        return Opened(response, b"", complete=False)

    async def _refusal(self, response: aiohttp.ClientResponse) -> Opened:
        """Return an answer, unless it says that the request was not taken."""
        length = response.content_length
        if length is None or length > MAX_BYTES:
            return Opened(response, b"", complete=False)
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                body = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            response.close()
            raise SendFailed(type(error).__name__) from error
        if is_refusal(response.status, body):
            raise NotSent("no_worker")
        if is_shed(response.status, body):
            raise NotSent(SHED)
        return Opened(response, body, complete=True)

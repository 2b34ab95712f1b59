"""Sends lines to an OpenAI-compatible API: a gateway of Fleetkeeper or another server."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final

import aiohttp
from yarl import URL

from fleetkeeper_contract.client_keys import ANONYMOUS
from fleetkeeper_contract.headers import REFUSED_HEADER, REQUEST_ID_HEADER, TIER_HEADER
from fleetkeeper_contract.sleep import WAKE_HEADER
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.batch.interfaces import Answer, AnswerTooLarge, NotAnswered
from fleetkeeper_gateway.batch.workers.lines import is_kept
from fleetkeeper_gateway.batch.workers.room import Room
from fleetkeeper_gateway.grants.keys import NoGrantKeyError
from fleetkeeper_gateway.grants.signer import BatchTokenSigner
from fleetkeeper_gateway.upstream.body import body_of
from fleetkeeper_gateway.upstream.client import KEEP_ALIVE_S

READING_BYTES: Final = 67_108_864
"""Maximum bytes of all large answers of a process that are being read."""
_SMALL_BYTES: Final = 65_536
_CONNECT_S: Final = 10.0
_PART_BYTES: Final = 65_536
_TOKEN_S: Final = 20.0
"""Time for which a token is reused. It is valid for 60 s."""
_MAX_TOKENS: Final = 4096


class UpstreamSender:
    """A `Sender`. Create it on the event loop, and close it."""

    def __init__(
        self,
        base: str,
        *,
        tokens: BatchTokenSigner,
        key_file: Path | None,
        timeout_s: float,
        answer_bytes: int,
        may_read: asyncio.Event,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Send to a base URL without /v1, with the API key in a file, or else with a token for each key.

        `timeout_s` and `answer_bytes` bound the time of a line and the size of its answer. Large answers are
        read only while `may_read` is set.
        """
        self._base = base.rstrip("/")
        self._signer = tokens
        self._key_file = key_file
        self._timeout_s = timeout_s
        self._answer_bytes = answer_bytes
        self._reading = Room(READING_BYTES)
        self._may_read = may_read
        self._monotonic = monotonic
        self._tokens: dict[str, tuple[str, float]] = {}
        self._session = aiohttp.ClientSession(
            # The worker bounds the number of connections.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def send(
        self, key_id: str, endpoint: str, body: bytes, wake: str | None = None
    ) -> Answer:
        """Send a request in tier batch, on behalf of a key.

        Raises:
            AnswerTooLarge: if an answer that would be kept has too many bytes.
            NotAnswered: if no complete answer came in time.
        """
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            TIER_HEADER: Tier.BATCH.label,
            REQUEST_ID_HEADER: uuid.uuid4().hex,
            **self._authorization(key_id),
        }
        if wake is not None and self._key_file is None:
            headers[WAKE_HEADER] = wake
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._exchange(key_id, endpoint, headers, body)
        except TimeoutError as error:
            raise NotAnswered(f"no answer within {self._timeout_s:g} s", sent=True) from error

    async def _exchange(
        self, key_id: str, endpoint: str, headers: dict[str, str], body: bytes
    ) -> Answer:
        url = URL(self._base + endpoint)
        try:
            async with self._session.post(
                url, data=body_of(body), headers=headers, allow_redirects=False
            ) as response:
                data = await self._whole(key_id, response)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotAnswered(f"cannot connect ({type(error).__name__})", sent=False) from error
        except (aiohttp.ClientError, OSError) as error:
            raise NotAnswered(
                f"the connection broke ({type(error).__name__})", sent=True
            ) from error
        return Answer(
            status=response.status,
            body=data,
            request_id=response.headers.get(REQUEST_ID_HEADER, headers[REQUEST_ID_HEADER])[:200],
            retry_after_s=retry_after(response.headers.get("Retry-After"), time.time()),
            refused=response.headers.get(REFUSED_HEADER),
        )

    async def _whole(self, key_id: str, response: aiohttp.ClientResponse) -> bytes:
        """Return the body of an answer. The rest of a large body is read once there is room for it.

        Raises:
            AnswerTooLarge: if it has too many bytes. An answer that is not kept is truncated instead.
        """
        parts: list[bytes] = []
        size = 0
        async with contextlib.AsyncExitStack() as stack:
            async for part in response.content.iter_chunked(_PART_BYTES):
                if size <= _SMALL_BYTES < size + len(part):
                    await stack.enter_async_context(
                        self._reading.hold(key_id, self._most_of(response))
                    )
                    await self._may_read.wait()
                size += len(part)
                if size > self._answer_bytes:
                    response.close()
                    if is_kept(response.status):
                        raise AnswerTooLarge(self._answer_bytes)
                    break
                parts.append(part)
        return b"".join(parts)

    def _most_of(self, response: aiohttp.ClientResponse) -> int:
        """Return the maximum bytes that an answer will take in memory."""
        length = response.content_length
        if length is None or "Content-Encoding" in response.headers:
            return self._answer_bytes
        return min(length, self._answer_bytes)

    def _authorization(self, key_id: str) -> dict[str, str]:
        try:
            # A changed Secret is used from the next line on.
            token = _key_in(self._key_file) if self._key_file else self._token(key_id)
        except NoGrantKeyError as error:
            if key_id == ANONYMOUS:
                # A gateway without keys may have no key for grants either, and does not require a token.
                return {}
            raise NotAnswered(str(error), sent=False) from error
        except (OSError, ValueError) as error:
            raise NotAnswered(f"the key for the upstream: {error}", sent=False) from error
        return {"Authorization": f"Bearer {token}"}

    def _token(self, key_id: str) -> str:
        now = self._monotonic()
        token, until = self._tokens.get(key_id, ("", now))
        if now >= until:
            if len(self._tokens) >= _MAX_TOKENS:
                self._tokens.clear()
            token = self._signer.sign(key_id)
            self._tokens[key_id] = (token, now + _TOKEN_S)
        return token


def _key_in(file: Path) -> str:
    key = file.read_text().strip()
    if not key or not key.isprintable() or not key.isascii():
        raise ValueError(f"{file} must hold one API key")
    return key


def retry_after(value: str | None, now: float) -> float | None:
    """Parse Retry-After, a number or a date, into seconds; None without a valid value."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, OverflowError):
        return None

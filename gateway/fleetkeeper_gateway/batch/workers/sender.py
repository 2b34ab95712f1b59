"""Sends lines to an OpenAI-compatible API: a gateway of Fleetkeeper, or any other."""

from __future__ import annotations

import asyncio
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
from fleetkeeper_gateway.batch.interfaces import Answer, NotAnswered
from fleetkeeper_gateway.grants.keys import NoGrantKeyError
from fleetkeeper_gateway.grants.signer import BatchTokenSigner
from fleetkeeper_gateway.tiers import Tier
from fleetkeeper_gateway.upstream.body import body_of
from fleetkeeper_gateway.upstream.client import KEEP_ALIVE_S

MAX_ANSWER_BYTES: Final = 67_108_864
MAX_READING_BYTES: Final = 536_870_912
"""Of all answers that are being read."""
_CONNECT_S: Final = 10.0
_PART_BYTES: Final = 65_536
_TOKEN_S: Final = 20.0
"""Time for which a token, which is valid for 60 s, is used for more than one line."""
_MOST_TOKENS: Final = 4096


class KeyFile:
    """An API key in a file, read again when the file changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._key = ""

    def read(self) -> str:
        """Return the key.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is empty, or not one line of text.
        """
        found = self._path.stat()
        seen = (found.st_ino, found.st_mtime_ns, found.st_size)
        if seen != self._seen:
            key = self._path.read_text().strip()
            if not key or not key.isprintable() or not key.isascii():
                raise ValueError(f"{self._path} must hold one API key")
            self._key, self._seen = key, seen
        return self._key


class UpstreamSender:
    """A `Sender`. Create it on the event loop, and close it."""

    def __init__(
        self,
        base: str,
        *,
        tokens: BatchTokenSigner,
        key_file: Path | None,
        timeout_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Send to a base URL without /v1, with the key of a file or with tokens for each key."""
        self._base = base.rstrip("/")
        self._signer = tokens
        self._key_file = KeyFile(key_file) if key_file is not None else None
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._tokens: dict[str, tuple[str, float]] = {}
        self._reading_bytes = 0
        self._session = aiohttp.ClientSession(
            # The worker bounds the number of lines.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def send(self, key_id: str, endpoint: str, body: bytes) -> Answer:
        """Send a request in tier batch, on behalf of a key.

        Raises:
            NotAnswered: if no complete answer of at most 64 MiB came in time, or so many large ones come
                at once that there is no memory for this one.
        """
        own_id = uuid.uuid4().hex
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            TIER_HEADER: Tier.BATCH.label,
            REQUEST_ID_HEADER: own_id,
            **self._authorization(key_id),
        }
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._exchange(URL(self._base + endpoint), headers, body, own_id)
        except TimeoutError as error:
            raise NotAnswered(f"no answer within {self._timeout_s:g} s", sent=True) from error

    async def _exchange(
        self, url: URL, headers: dict[str, str], body: bytes, own_id: str
    ) -> Answer:
        try:
            async with self._session.post(
                url, data=body_of(body), headers=headers, allow_redirects=False
            ) as response:
                data = await self._whole(response)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotAnswered(f"cannot connect ({type(error).__name__})", sent=False) from error
        except (aiohttp.ClientError, OSError) as error:
            raise NotAnswered(
                f"the connection broke ({type(error).__name__})", sent=True
            ) from error
        return Answer(
            status=response.status,
            body=data,
            request_id=response.headers.get(REQUEST_ID_HEADER, own_id)[:200],
            retry_after_s=retry_after(response.headers.get("Retry-After"), time.time()),
            refused=response.headers.get(REFUSED_HEADER),
        )

    async def _whole(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body of an answer.

        Raises:
            NotAnswered: if it is too large, or there is no memory for it.
        """
        parts: list[bytes] = []
        size = 0
        try:
            async for part in response.content.iter_chunked(_PART_BYTES):
                size += len(part)
                self._reading_bytes += len(part)
                if size > MAX_ANSWER_BYTES:
                    response.close()
                    raise NotAnswered(
                        f"the answer has more than {MAX_ANSWER_BYTES} bytes", sent=True
                    )
                if self._reading_bytes > MAX_READING_BYTES:
                    response.close()
                    # As a refusal: fewer lines are sent, until their answers fit.
                    raise NotAnswered("answers take all memory that they may take", sent=False)
                parts.append(part)
        finally:
            self._reading_bytes -= size
        return b"".join(parts)

    def _authorization(self, key_id: str) -> dict[str, str]:
        try:
            if self._key_file is not None:
                return {"Authorization": f"Bearer {self._key_file.read()}"}
            return {"Authorization": f"Bearer {self._token(key_id)}"}
        except NoGrantKeyError as error:
            if key_id == ANONYMOUS:
                # A gateway without keys may have no key for grants either, and asks for none.
                return {}
            raise NotAnswered(str(error), sent=False) from error
        except (OSError, ValueError) as error:
            raise NotAnswered(f"the key for the upstream: {error}", sent=False) from error

    def _token(self, key_id: str) -> str:
        now = self._monotonic()
        token, until = self._tokens.get(key_id, ("", now))
        if now >= until:
            if len(self._tokens) >= _MOST_TOKENS:
                self._tokens.clear()
            token = self._signer.sign(key_id)
            self._tokens[key_id] = (token, now + _TOKEN_S)
        return token


def retry_after(value: str | None, now: float) -> float | None:
    """Return the seconds that Retry-After asks for, as a number or a date; None if it says nothing."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, OverflowError):
        return None

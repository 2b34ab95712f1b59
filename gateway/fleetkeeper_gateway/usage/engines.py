"""Reads pages from the control ports of engines, whose answers are not trusted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Protocol

import aiohttp
from pydantic import ValidationError

from fleetkeeper_contract.grants import USAGE_PATH
from fleetkeeper_gateway.usage.pages import Cursor, Page
from fleetkeeper_gateway.usage.pods import Target

PAGE_BYTES: Final = 2 * 1024 * 1024
"""Maximum bytes of a page: 1,000 entries take at most 1.3 MB."""


class TokenSigner(Protocol):
    """Signs tokens for the control port of one pod."""

    def sign(self, pod_uid: str) -> str:
        """Return a token for one request."""


class UnreadableError(Exception):
    """An engine's ledger cannot be read. The message states the reason."""


class Engines:
    """The control ports of all engines. The caller bounds the time of a call."""

    def __init__(self, session: aiohttp.ClientSession, signer: TokenSigner) -> None:
        self._session = session
        self._signer = signer

    async def page(self, target: Target, cursor: Cursor) -> Page:
        """Return the page after a cursor.

        Raises:
            UnreadableError: the answer is not a page.
            aiohttp.ClientError: there is no complete answer.
            NoGrantKeyError: there is no key to sign the request with.
        """
        token = self._signer.sign(target.pod.uid)
        async with self._session.get(
            target.url + USAGE_PATH,
            params={"boot": cursor.boot, "after": str(cursor.next)},
            headers={"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"},
            allow_redirects=False,
        ) as response:
            if response.status != 200:
                raise UnreadableError(f"status {response.status}")
            content = bytearray()
            async for chunk in response.content.iter_any():
                content += chunk
                if len(content) > PAGE_BYTES:
                    raise UnreadableError(f"a page has more than {PAGE_BYTES} bytes")
        return parse_page(bytes(content))


@asynccontextmanager
async def open_engines(signer: TokenSigner) -> AsyncIterator[Engines]:
    """Yield the control ports; close all connections at the end."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, trust_env=False
    ) as session:
        yield Engines(session, signer)


def parse_page(content: bytes) -> Page:
    """Parse a page.

    Raises:
        UnreadableError: if the content is not a page.
    """
    try:
        return Page.model_validate_json(content)
    except ValidationError as problem:
        first = problem.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UnreadableError(f"not a page of usage: {place}: {first['msg']}") from None

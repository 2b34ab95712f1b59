"""GET /v1/usage: a page of the ledger, sent piece by piece so that pid 1 stays small."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from aiohttp import web

from fleetkeeper_engine.shm.ledger import PAGE_ENTRIES, Entry, LedgerHead, LedgerReader, Tokens
from fleetkeeper_engine.supervisor.control_api.usage_auth import UsageVerifier

_PIECE = 50
READER_S = 60.0
"""Time without a request for a page after which the ledger counts as not read."""
LAST_READ_S = 3.0
"""Maximum wait of an ending pod for its last page to be read."""
NO_LEDGER = "the engine has written no ledger yet"


class BadUsageRequestError(ValueError):
    """The query is not valid. The message states the reason."""


def parse_query(query: Any) -> tuple[str, int]:  # noqa: ANN401 - a multidict
    """Return the boot and the number after which to read.

    Raises:
        BadUsageRequestError: if the number is not valid.
    """
    after = query.get("after", "0")
    if not after.isascii() or not after.isdigit() or len(after) > 18:
        raise BadUsageRequestError(f"after is {after[:40]!r}; it must be a number from 0")
    return query.get("boot", ""), int(after)


@dataclass(slots=True)
class UsagePort:
    """The parts that the control port needs to serve usage."""

    verifier: UsageVerifier
    ledger: Path
    served_name: str
    """The model's name in entries without an adapter."""
    _read: float | None = None
    """Monotonic time of the last page."""
    _kept: int = 0
    """Number of the last entry that the reader has: it asked for those after it."""
    _asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def get(self, request: web.Request, now: float) -> web.StreamResponse:
        """Return a page.

        Raises:
            UnauthorizedError: if the token is refused.
        """
        self.verifier.verify(request.headers.get("Authorization"), now)
        try:
            boot, after = parse_query(request.query)
        except BadUsageRequestError as error:
            return web.json_response({"error": str(error)}, status=422)
        reader = LedgerReader.open(self.ledger)
        if reader is None:
            return web.json_response({"error": NO_LEDGER}, status=503)
        with reader:
            head = reader.head()
            if head is None:
                return web.json_response({"error": NO_LEDGER}, status=503)
            # A reader that knows another boot begins with the oldest entry.
            after = after if boot == reader.boot else 0
            self._read, self._kept = time.monotonic(), after
            self._asked.set()
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)
            for piece in page(reader, head, self.served_name, after):
                await response.write(piece)
            await response.write_eof()
        return response

    async def wait_until_read(self) -> None:
        """Wait until all entries were read, for at most `LAST_READ_S`. Without a reader, return at once."""
        if self._read is None or time.monotonic() - self._read > READER_S:
            return
        reader = LedgerReader.open(self.ledger)
        if reader is None:
            return
        with reader:
            head = reader.head()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_READ_S):
                while head is not None and self._kept < head.newest:
                    self._asked.clear()
                    await self._asked.wait()


def page(reader: LedgerReader, head: LedgerHead, served_name: str, after: int) -> Iterator[bytes]:
    """Yield the pieces of a page, at most `PAGE_ENTRIES` entries in all."""
    after = min(after, head.newest)
    oldest = reader.oldest(head)
    first = max(after + 1, oldest)
    last = min(first + PAGE_ENTRIES - 1, head.newest)
    start = {"boot": reader.boot, "next": last, "oldest": oldest, "newest": head.newest}
    start |= {"counting": head.counting, "errors": head.errors}
    yield json.dumps(start)[:-1].encode() + b', "entries": ['
    sent, between = 0, ""
    # With entries to send, only the last of them has the sums up to it.
    sums = None if first <= last else head.sums
    entries = reader.entries(first, last)
    while piece := list(islice(entries, _PIECE)):
        sums, sent = piece[-1][2], sent + len(piece)
        yield (between + ", ".join(_entry(n, e, served_name) for n, e, _ in piece)).encode()
        between = ", "
    end = {
        "totals": None if sums is None else _tokens(sums.total),
        "unattributed": None if sums is None else _tokens(sums.unattributed),
        "lost": last - after - sent,
    }
    yield b"], " + json.dumps(end)[1:].encode()


def _entry(number: int, entry: Entry, served_name: str) -> str:
    return json.dumps(
        {
            "n": number,
            "attempt": entry.attempt or None,
            "request": entry.request or None,
            "key": entry.key or None,
            "tier": entry.tier.label if entry.tier is not None else None,
            "model": entry.adapter or served_name,
            **_tokens(entry.tokens),
            "aborted": entry.aborted,
            "time": entry.time,
        }
    )


def _tokens(tokens: Tokens) -> dict[str, int]:
    return {"prompt": tokens.prompt, "cached": tokens.cached, "answer": tokens.answer}

"""GET /v1/usage: a page of the ledger, sent piece by piece so that pid 1 stays small."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from fleetkeeper_engine.shm.ledger import PAGE_ENTRIES, Entry, Head, LedgerReader, Tokens

_PIECE = 50
NO_LEDGER = "the engine has written no ledger yet"


class UsageAccess(Protocol):
    """Check of the tokens that read usage."""

    def verify(self, authorization: str | None, now: float) -> None:
        """Accept the value of an Authorization header.

        Raises:
            UnauthorizedError: if anything about it is wrong.
        """


class BadUsageRequestError(ValueError):
    """The query is wrong. The message says what."""


def parse_query(query: Any) -> tuple[str, int]:  # noqa: ANN401 - a multidict
    """Return boot and number after which to read.

    Raises:
        BadUsageRequestError: if the number is none.
    """
    after = query.get("after", "0")
    if not after.isascii() or not after.isdigit() or len(after) > 18:
        raise BadUsageRequestError(f"after is {after[:40]!r}; it must be a number from 0")
    return query.get("boot", ""), int(after)


@dataclass(frozen=True, slots=True)
class UsagePort:
    """What the control port needs to answer for usage."""

    access: UsageAccess
    ledger: Path
    served_name: str
    """The model's name in entries without an adapter."""

    async def get(self, request: web.Request, now: float) -> web.StreamResponse:
        """Return a page.

        Raises:
            UnauthorizedError: if the token is refused.
        """
        self.access.verify(request.headers.get("Authorization"), now)
        try:
            boot, after = parse_query(request.query)
        except BadUsageRequestError as error:
            return web.json_response({"error": str(error)}, status=422)
        return await send_page(request, self.ledger, self.served_name, boot, after)


async def send_page(
    request: web.Request, path: Path, served_name: str, boot: str, after: int
) -> web.StreamResponse:
    """Answer with the entries after a number; from the oldest if the reader knows another boot."""
    reader = LedgerReader.open(path)
    if reader is None:
        return web.json_response({"error": NO_LEDGER}, status=503)
    with reader:
        head = reader.head()
        if head is None:
            return web.json_response({"error": NO_LEDGER}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        pieces = page(reader, head, served_name, after if boot == reader.boot else 0)
        for piece in pieces:
            await response.write(piece)
        await response.write_eof()
        return response


def page(reader: LedgerReader, head: Head, served_name: str, after: int) -> Iterator[bytes]:
    """Yield the pieces of a page, at most `PAGE_ENTRIES` entries in all."""
    after = min(after, head.newest)
    oldest = reader.oldest(head)
    first = max(after + 1, oldest)
    last = min(first + PAGE_ENTRIES - 1, head.newest)
    start = {"boot": reader.boot, "next": last, "oldest": oldest, "newest": head.newest}
    start |= {"counting": head.counting, "errors": head.errors}
    yield json.dumps(start)[:-1].encode() + b', "entries": ['
    sent, between = 0, ""
    # With entries to send, only the last of them tells the sums up to it.
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

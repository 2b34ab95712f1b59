"""Files and lists as OpenAI's API shows them. Pure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

from fleetkeeper_gateway.batch.model import FileRecord

_ITEMS: Final = 100
"""Items of a list that are made and encoded in one piece."""


def file_document(record: FileRecord, expires: int) -> dict[str, Any]:
    """Return a file that expires at a time in Unix seconds."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.bytes,
        "created_at": record.created,
        "expires_at": expires,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


async def list_document(items: Iterable[dict[str, Any]], *, has_more: bool) -> bytes:
    """Return a page of a list as JSON. Other work on the event loop runs between some of its items."""
    ends = {"has_more": has_more, "first_id": None, "last_id": None}
    pieces = []
    left = iter(items)
    while some := list(islice(left, _ITEMS)):
        ends |= {"first_id": ends["first_id"] or some[0]["id"], "last_id": some[-1]["id"]}
        pieces.append(json.dumps(some)[1:-1])
        await asyncio.sleep(0)
    return f'{{"object": "list", "data": [{", ".join(pieces)}], {json.dumps(ends)[1:]}'.encode()

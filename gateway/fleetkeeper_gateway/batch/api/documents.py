"""Files and lists in the format of OpenAI's API. Pure."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from fleetkeeper_gateway.batch.model import FileRecord

PIECE_BYTES: Final = 65_536
"""Size from which a piece of a list ends. Each piece is encoded in one step of the event loop."""


def file_document(record: FileRecord, expires: int) -> dict[str, Any]:
    """Return a file in the API's format. `expires`: Unix seconds."""
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


async def list_document(items: Iterable[dict[str, Any]], *, has_more: bool) -> deque[bytes]:
    """Return a page of a list as pieces of JSON. Other work on the event loop runs between them."""
    ends = {"has_more": has_more, "first_id": None, "last_id": None}
    pieces: deque[bytes] = deque()
    piece = bytearray(b'{"object": "list", "data": [')
    for item in items:
        if ends["first_id"] is None:
            ends["first_id"] = item["id"]
        else:
            piece += b", "
        ends["last_id"] = item["id"]
        piece += json.dumps(item).encode()
        if len(piece) >= PIECE_BYTES:
            pieces.append(bytes(piece))
            piece.clear()
            await asyncio.sleep(0)
    piece += b"], " + json.dumps(ends)[1:].encode()
    pieces.append(bytes(piece))
    return pieces

"""Files and lists as OpenAI's API shows them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetkeeper_gateway.batch.model import FileRecord


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


def list_document(items: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return a page of a list."""
    return {
        "object": "list",
        "data": list(items),
        "has_more": has_more,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
    }

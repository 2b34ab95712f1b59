"""Checks that several calls share."""

from __future__ import annotations

import re
from typing import Final

from fleetkeeper_gateway.http.errors import Refusal

MIN_EXPIRY_S: Final = 3600
MAX_EXPIRY_S: Final = 2_592_000
PURPOSE: Final = "batch"
"""Purpose of an input file."""
NO_RETRY: Final = {"x-should-retry": "false"}
"""Tells OpenAI's clients that the same request will be refused again."""
_SHOWN = 200
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")


def invalid(param: str, message: str) -> Refusal:
    """Return the refusal of a parameter's value."""
    return Refusal(400, "invalid_value", f"{param}: {message}", param=param)


def checked_file_id(text: str, param: str = "id") -> str:
    """Return the ID of a file. What has another form never reaches the store.

    Raises:
        Refusal: as for a file that does not exist.
    """
    if _FILE_ID.fullmatch(text) is None:
        raise no_file(text, param)
    return text


def checked_batch_id(text: str) -> str:
    """Return the ID of a batch. What has another form never reaches the store.

    Raises:
        Refusal: as for a batch that does not exist.
    """
    if _BATCH_ID.fullmatch(text) is None:
        raise no_batch(text)
    return text


def no_file(file_id: str, param: str = "id") -> Refusal:
    """Return the refusal of a file that does not exist, or is of another key."""
    return Refusal(
        404,
        "file_not_found",
        f"There is no file {file_id[:_SHOWN]!r}. GET /v1/files lists those of your key.",
        param=param,
    )


def no_batch(batch_id: str, param: str = "id") -> Refusal:
    """Return the refusal of a batch that does not exist, or is of another key."""
    return Refusal(
        404,
        "batch_not_found",
        f"There is no batch {batch_id[:_SHOWN]!r}. GET /v1/batches lists those of your key.",
        param=param,
    )

"""Refusals and bounds that several calls share."""

from __future__ import annotations

from typing import Final

from fleetkeeper_gateway.http.errors import Refusal

MIN_EXPIRY_S: Final = 3600
MAX_EXPIRY_S: Final = 2_592_000
PURPOSE: Final = "batch"
"""Purpose of an input file."""
NO_RETRY: Final = {"x-should-retry": "false"}
"""Header by which OpenAI's clients do not repeat a request that would be refused again."""
_SHOWN = 200


def invalid(param: str, message: str) -> Refusal:
    """Return the refusal of a parameter's value."""
    return Refusal(400, "invalid_value", f"{param}: {message}", param=param)


def no_file(file_id: str, param: str = "id") -> Refusal:
    """Return the refusal of a file that does not exist or belongs to another key."""
    return Refusal(
        404,
        "file_not_found",
        f"There is no file {file_id[:_SHOWN]!r}. GET /v1/files lists those of your key.",
        param=param,
    )


def no_batch(batch_id: str, param: str = "id") -> Refusal:
    """Return the refusal of a batch that does not exist or belongs to another key."""
    return Refusal(
        404,
        "batch_not_found",
        f"There is no batch {batch_id[:_SHOWN]!r}. GET /v1/batches lists those of your key.",
        param=param,
    )

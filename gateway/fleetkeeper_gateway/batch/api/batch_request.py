"""The body of POST /v1/batches."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any, Final

from fleetkeeper_contract.bodies.reader import read_body
from fleetkeeper_contract.bodies.refused import RefusedBodyError
from fleetkeeper_gateway.batch.api.checks import MAX_EXPIRY_S, MIN_EXPIRY_S, invalid
from fleetkeeper_gateway.batch.model import BatchRecord
from fleetkeeper_gateway.http.errors import Refusal
from fleetkeeper_gateway.http.paths import INFERENCE
from fleetkeeper_gateway.http.request_fields import refusal_of

ENDPOINTS: Final = INFERENCE - {"/tokenize", "/detokenize"}
"""Paths that lines may have: the inference paths that run the model."""
_WINDOW = re.compile(r"([0-9]{1,5})([mhd])")
_UNITS: Final = {"m": 60, "h": 3600, "d": 86_400}
_MIN_WINDOW_S, _MAX_WINDOW_S = 5 * 60, 14 * 86_400
_MAX_PAIRS, _MAX_NAME, _MAX_VALUE = 16, 64, 512
_SHOWN = 100


def parse_batch_request(key_id: str, body: bytes, now: int) -> BatchRecord:
    """Parse the body of a request for a batch. The existence of its input file is not checked.

    Args:
        key_id: ID of the client's key.
        body: JSON.
        now: Unix seconds.

    Raises:
        Refusal: if a field is missing, unknown or invalid.
    """
    fields = _object(body)
    input_file = _text(fields, "input_file_id")
    endpoint = _text(fields, "endpoint")
    if endpoint not in ENDPOINTS:
        raise invalid("endpoint", f"It must be one of {', '.join(sorted(ENDPOINTS))}.")
    window = _text(fields, "completion_window")
    record = BatchRecord(
        id=f"batch_{uuid.uuid4().hex}",
        key_id=key_id,
        input_file=input_file,
        endpoint=endpoint,
        completion_window=window,
        created=now,
        expires=now + _window_s(window),
        metadata=_metadata(fields.pop("metadata", None)),
        output_expires_after=_expires_after(fields.pop("output_expires_after", None)),
    )
    if fields:
        name = next(iter(fields))[:_SHOWN]
        raise Refusal(400, "unknown_parameter", f"The parameter {name!r} is not known.", param=name)
    return record


def _object(body: bytes) -> dict[str, Any]:
    try:
        return read_body(body).fields
    except RefusedBodyError as error:
        raise refusal_of(error) from None


def _text(fields: dict[str, Any], name: str) -> str:
    if name not in fields:
        raise Refusal(400, "missing_parameter", f"The parameter {name} is missing.", param=name)
    value = fields.pop(name)
    if not isinstance(value, str):
        raise invalid(name, "It must be a text.")
    return value


def _window_s(text: str) -> int:
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not _MIN_WINDOW_S <= seconds <= _MAX_WINDOW_S:
        raise invalid(
            "completion_window", "It must be from 5m to 14d: a number and m, h or d, such as 24h."
        )
    return seconds


def _metadata(value: object) -> Mapping[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > _MAX_PAIRS:
        raise invalid("metadata", f"It must be an object of at most {_MAX_PAIRS} pairs.")
    for name, text in value.items():
        if not isinstance(text, str) or len(name) > _MAX_NAME or len(text) > _MAX_VALUE:
            raise invalid(
                "metadata",
                f"Names may have {_MAX_NAME} characters; values are texts of at most {_MAX_VALUE}.",
            )
        if not _is_unicode(name + text):
            raise invalid("metadata", "It has half of a surrogate pair, which is no text.")
    return value


def _expires_after(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) != {"anchor", "seconds"}:
        raise invalid("output_expires_after", "It must be an object with anchor and seconds.")
    if value["anchor"] != "created_at":
        raise invalid("output_expires_after.anchor", "It must be created_at.")
    seconds = value["seconds"]
    if type(seconds) is not int or not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise invalid(
            "output_expires_after.seconds", f"It must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}."
        )
    return seconds


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

"""A naive validator of input files, which holds all of a file: the real one must agree with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

BOM = b"\xef\xbb\xbf"


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as it was written."""


@dataclass
class Reference:
    """What is in a file."""

    lines: int = 0
    model: str = ""
    mistakes: list[tuple[int | None, str]] = field(default_factory=list)
    """Line and code."""
    places: list[tuple[int, int]] = field(default_factory=list)
    """Offset and length of the valid lines."""


def reference(data: bytes, endpoint: str, max_lines: int, max_bytes: int) -> Reference:
    """Return what is in a file."""
    found = Reference()
    ids: set[str] = set()
    offset = 0
    for number, piece in enumerate(data.split(b"\n"), 1):
        start, offset = offset, offset + len(piece) + 1
        text = piece
        if number == 1 and text.startswith(BOM):
            text, start = text[3:], start + 3
        text = text[:-1] if text.endswith(b"\r") else text
        if len(text) <= max_bytes and text.strip(b" \t\r") == b"":
            continue
        if found.lines == max_lines:
            found.mistakes.insert(0, (None, "too_many_lines"))
            break
        found.lines += 1
        code = "line_too_long" if len(text) > max_bytes else _mistake(text, endpoint, ids, found)
        if code is None:
            found.places.append((start, len(text)))
        else:
            found.mistakes.append((number, code))
    if found.lines == 0:
        found.mistakes.append((None, "empty_file"))
    return found


def _mistake(text: bytes, endpoint: str, ids: set[str], found: Reference) -> str | None:
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_Pairs, parse_constant=_refuse)
    except UnicodeDecodeError:
        return "invalid_utf8"
    except ValueError:
        return "invalid_json_line"
    if _has_duplicates(value):
        return "duplicate_key"
    if not isinstance(value, _Pairs):
        return "invalid_json_line"
    fields = dict(value)
    return _mistake_of_fields(fields, endpoint, ids) or _mistake_of_body(
        dict(fields["body"]), found
    )


def _mistake_of_fields(fields: dict[str, Any], endpoint: str, ids: set[str]) -> str | None:
    rules: list[tuple[str, str, Callable[[Any], bool]]] = [
        ("custom_id", "invalid_custom_id", lambda one: _is_text(one, 512)),
        ("custom_id", "duplicate_custom_id", lambda one: one not in ids),
        ("method", "invalid_method", lambda one: one == "POST"),
        ("url", "invalid_url", lambda one: one == endpoint),
        ("body", "invalid_body", lambda one: isinstance(one, _Pairs)),
    ]
    for name, code, is_valid in rules:
        if name not in fields:
            return "missing_required_parameter"
        if not is_valid(fields[name]):
            return code
        if code == "duplicate_custom_id":
            ids.add(fields["custom_id"])
    return None


def _mistake_of_body(body: dict[str, Any], found: Reference) -> str | None:
    model = body.get("model")
    if not isinstance(model, str) or not _is_text(model, 256):
        return "invalid_model"
    found.model = found.model or model
    if model != found.model:
        return "mismatched_model"
    return None if body.get("stream") is None or body["stream"] is False else "stream_not_supported"


def _refuse(name: str) -> None:
    raise ValueError(name)


def _is_text(value: object, most: int) -> bool:
    return (
        isinstance(value, str)
        and 1 <= len(value) <= most
        and not any(0xD800 <= ord(character) <= 0xDFFF for character in value)
    )


def _has_duplicates(value: object) -> bool:
    if isinstance(value, _Pairs):
        names = [name for name, _ in value]
        return len(names) != len(set(names)) or any(_has_duplicates(one) for _, one in value)
    return isinstance(value, list) and any(_has_duplicates(one) for one in value)

"""A naive validator of input files, which holds all of a file: the real one must agree with it."""

from __future__ import annotations

import json
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
        decoded = text.decode("utf-8")
    except UnicodeDecodeError:
        return "invalid_utf8"
    try:
        value = json.loads(decoded, object_pairs_hook=_Pairs, parse_constant=_refuse)
    except ValueError:
        return "invalid_json_line"
    if _has_duplicates(value):
        return "duplicate_key"
    if not isinstance(value, _Pairs):
        return "invalid_json_line"
    fields = dict(value)
    if "custom_id" not in fields:
        return "missing_required_parameter"
    custom_id = fields["custom_id"]
    if type(custom_id) is not str or not custom_id or len(custom_id) > 512 or not _is_text(custom_id):
        return "invalid_custom_id"
    if custom_id in ids:
        return "duplicate_custom_id"
    ids.add(custom_id)
    if "method" not in fields:
        return "missing_required_parameter"
    if fields["method"] != "POST":
        return "invalid_method"
    if "url" not in fields:
        return "missing_required_parameter"
    if fields["url"] != endpoint:
        return "invalid_url"
    if "body" not in fields:
        return "missing_required_parameter"
    if not isinstance(fields["body"], _Pairs):
        return "invalid_body"
    return _mistake_of_body(dict(fields["body"]), found)


def _mistake_of_body(body: dict[str, Any], found: Reference) -> str | None:
    model = body.get("model")
    if type(model) is not str or not model or len(model) > 256 or not _is_text(model):
        return "invalid_model"
    found.model = found.model or model
    if model != found.model:
        return "mismatched_model"
    return None if body.get("stream") is None or body["stream"] is False else "stream_not_supported"


def _refuse(name: str) -> None:
    raise ValueError(name)


def _is_text(value: str) -> bool:
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in value)


def _has_duplicates(value: object) -> bool:
    if isinstance(value, _Pairs):
        names = [name for name, _ in value]
        return len(names) != len(set(names)) or any(_has_duplicates(one) for _, one in value)
    return isinstance(value, list) and any(_has_duplicates(one) for one in value)

"""Whether a text is JSON, in bounded time and memory: its values are not made, so there may be millions.

It is read in parts. Each text and number becomes one byte, and so does each list and object whose values
are such bytes. Only what is not closed yet stays.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

_PART_BYTES: Final = 65_536
_MOST_OPEN: Final = 4096
"""Bytes of lists and objects that are not closed yet, as they are kept."""
_WORK: Final = 4
"""Bytes that are searched for each byte of the text. Only texts that are nested without sense need more."""

_TEXT, _VALUE, _VALUES, _PAIRS = b"\x01", b"\x02", b"\x03", b"\x04"
"""A text, another value, several values with commas, and several pairs of name and value."""
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_LINES = re.compile(rb"[\t\r\n]")
_BAD_ESCAPE = re.compile(rb"\\(?![nt/rbf]|u[0-9a-fA-F]{4})")
_ONE: Final = rb"(?:-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?|true|false|null)"
_SCALARS = re.compile(rb"%b(?:, ?%b)++" % (_ONE, _ONE))
_SCALAR = re.compile(_ONE)
_STEPS: Final = (
    (re.compile(rb"\[[\x01-\x03]?\]|\{\x04?\}"), _VALUE),
    (re.compile(rb"(?<!:)[\x01-\x03](?:,[\x01-\x03](?!:))++"), _VALUES),
    (re.compile(rb"(?:\x01:[\x01\x02]|\x04)(?:,(?:\x01:[\x01\x02]|\x04))*+"), _PAIRS),
)


def is_json(text: bytes) -> bool:
    """Return whether a text is JSON in UTF-8, with nothing around it."""
    if _CONTROL.search(text):
        return False
    if b"\\" in text:
        # Now each quote begins or ends a text. Outside of texts, `_` is no JSON.
        text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        if _BAD_ESCAPE.search(text):
            return False
    decode = codecs.getincrementaldecoder("utf-8")().decode
    work = _WORK * (len(text) + _PART_BYTES)
    tail = left = b""
    is_inside = False
    for start in range(0, len(text), _PART_BYTES):
        part = text[start : start + _PART_BYTES]
        is_last = start + _PART_BYTES >= len(text)
        try:
            decode(part, is_last)
        except UnicodeDecodeError:
            return False
        pieces = part.split(b'"')
        if any(_LINES.search(piece) for piece in pieces[1 - is_inside :: 2]):
            return False
        tail += _TEXT.join(pieces[is_inside::2])
        is_inside ^= len(pieces) % 2 == 0
        if is_inside and len(pieces) > 1:
            tail += _TEXT
        # A number may go on in the next part.
        end = len(tail) if is_last else 1 + max(map(tail.rfind, (b",", b"]", b"}", b":")))
        known = _SCALAR.sub(_VALUE, _SCALARS.sub(_VALUES, tail[:end]))
        left += known.translate(None, b" \t\r\n")
        tail = tail[end:]
        left, work = _reduced(left, work)
        if work <= 0 or len(left) > _MOST_OPEN:
            return False
    return not is_inside and left in (_TEXT, _VALUE)


def _reduced(left: bytes, work: int) -> tuple[bytes, int]:
    """Return what is left once everything that is closed is one byte, and of the work."""
    before = len(left) + 1
    while len(left) < before and work > 0:
        before = len(left)
        work -= before
        for pattern, mark in _STEPS:
            left = pattern.sub(mark, left)
    return left, work

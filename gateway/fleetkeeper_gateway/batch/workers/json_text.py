"""Checks whether a text is JSON, without creating its values, of which there may be millions."""

from __future__ import annotations

import codecs
import re
from typing import Final

import msgspec

_PART_BYTES: Final = 65_536
_MAX_HALVES: Final = 1_048_576
"""Maximum bytes of a text with lone surrogates: a search in a larger text takes too long."""
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_decode_raw = msgspec.json.Decoder(msgspec.Raw).decode


def is_json(text: bytes) -> bool:
    """Return whether a text is exactly one JSON value in UTF-8, with a bounded depth."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    try:
        # In parts: decoding the whole text would need up to four times its bytes.
        for start in range(0, len(text), _PART_BYTES):
            decode(text[start : start + _PART_BYTES])
        decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    if _is_valid(text):
        return True
    # JSON allows a lone surrogate, msgspec does not.
    may_have_half = len(text) <= _MAX_HALVES and b"\\u" in text
    return may_have_half and _is_valid(_HALF_PAIR.sub(rb"\\u0020", text))


def _is_valid(text: bytes) -> bool:
    try:
        _decode_raw(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True

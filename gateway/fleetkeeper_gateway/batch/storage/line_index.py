"""Where the lines of an input file are, in 12 bytes a line. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from fleetkeeper_gateway.batch.model import LineRef

LINE: Final = struct.Struct("<QI")
"""Offset and length. The number is the position."""


def encode(lines: Sequence[LineRef]) -> bytes:
    """Return the index of lines, whose numbers must be 0, 1, 2 and so on."""
    if any(line.number != position for position, line in enumerate(lines)):
        raise ValueError("lines must be numbered from 0, without gaps")
    return b"".join(LINE.pack(line.offset, line.length) for line in lines)


def decode(content: bytes) -> list[LineRef]:
    """Return the lines of an index. Raise `ValueError` if it is cut."""
    if len(content) % LINE.size:
        raise ValueError(f"its {len(content)} bytes are no multiple of {LINE.size}")
    return [
        LineRef(number, offset, length)
        for number, (offset, length) in enumerate(LINE.iter_unpack(content))
    ]


def digest(content: bytes) -> str:
    """Return the name of an index: two versions of us may see different lines in one file."""
    return blake2b(content, digest_size=16).hexdigest()

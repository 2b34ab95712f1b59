"""The index of an input file, in 12 bytes a line, and the division of its lines into chunks. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Final, overload

from fleetkeeper_gateway.batch.interfaces import Index
from fleetkeeper_gateway.batch.model import MAX_CHUNK_BYTES, MAX_CHUNK_LINES, LineRef

_LINE: Final = struct.Struct("<QI")
"""Offset and length. The number is the position."""


class LineIndex(Index):
    """The index of an input file, backed by its bytes. It creates each `LineRef` on demand."""

    def __init__(self, content: bytes, firsts: Sequence[int]) -> None:
        """Create an index from its bytes and the number of the first line of each chunk.

        Raises:
            ValueError: if the bytes are truncated, or the chunks do not cover the lines.
        """
        if len(content) % _LINE.size:
            raise ValueError(f"its {len(content)} bytes are no multiple of {_LINE.size}")
        self._content = content
        starts = [*firsts, len(self)]
        if starts[0] != 0 or any(first >= after for first, after in pairwise(starts)):
            raise ValueError(f"its chunks do not cover its {len(self)} lines one after another")
        self._chunks = tuple(range(first, after) for first, after in pairwise(starts))

    @property
    def chunks(self) -> Sequence[range]:
        """Return the line numbers of each chunk."""
        return self._chunks

    def __len__(self) -> int:
        """Return the number of lines."""
        return len(self._content) // _LINE.size

    @overload
    def __getitem__(self, at: int) -> LineRef: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[LineRef]: ...
    def __getitem__(self, at: int | slice) -> LineRef | Sequence[LineRef]:
        """Return the position of a line, or of several."""
        numbers = range(len(self))[at]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        return LineRef(numbers, *_LINE.unpack_from(self._content, numbers * _LINE.size))


def cut(lengths: Iterable[int]) -> tuple[int, ...]:
    """Return the number of the first line of each chunk, from the lengths of all lines."""
    firsts: list[int] = []
    size = 0
    for number, length in enumerate(lengths):
        is_full = size + length > MAX_CHUNK_BYTES
        if not firsts or is_full or number - firsts[-1] == MAX_CHUNK_LINES:
            firsts.append(number)
            size = 0
        size += length
    return tuple(firsts)


def encode(lines: Sequence[LineRef]) -> bytes:
    """Return the bytes of an index of lines, whose numbers must be 0, 1, 2 and so on."""
    if any(line.number != position for position, line in enumerate(lines)):
        raise ValueError("lines must be numbered from 0, without gaps")
    return b"".join(_LINE.pack(line.offset, line.length) for line in lines)


def digest(content: bytes) -> str:
    """Return the digest of an index for its name: two versions of this code may find different lines in a file."""
    return blake2b(content, digest_size=16).hexdigest()

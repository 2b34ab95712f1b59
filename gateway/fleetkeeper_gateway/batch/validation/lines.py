"""The lines of an input file, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Final, NamedTuple

BOM: Final = b"\xef\xbb\xbf"
_SPACE = b" \t\r"


class RawLine(NamedTuple):
    """A line that is not empty."""

    number: int
    """Line number from 1. Empty lines count, as in an editor."""
    offset: int
    """Bytes before the line."""
    text: bytes | None
    """The line without its end; None if it is too long, and was not kept."""


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[RawLine]:
    r"""Yield the lines that are not empty. Lines end with \n or \r\n; the last line may end with the file.

    Args:
        file: read from its beginning, never further than the next line.
        max_bytes: maximum bytes of a line, without its end.
    """
    number = offset = 0
    most = max_bytes + len(b"\r\n")
    while piece := file.readline(most):
        number += 1
        mark = len(BOM) if number == 1 and piece.startswith(BOM) else 0
        start = offset + mark
        offset += len(piece)
        text = piece[mark:].removesuffix(b"\n").removesuffix(b"\r")
        is_too_long = len(text) > max_bytes or _is_cut(piece, most)
        while _is_cut(piece, most):
            piece = file.readline(most)
            offset += len(piece)
        if is_too_long or text.strip(_SPACE):
            yield RawLine(number, start, None if is_too_long else text)


def _is_cut(piece: bytes, most: int) -> bool:
    return len(piece) == most and not piece.endswith(b"\n")

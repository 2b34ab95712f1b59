"""Segments: results of some lines in one object, with a checksum. Pure, but for random names."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from typing import Final
from zlib import crc32

from fleetkeeper_gateway.batch.model import Result

MAGIC: Final = b"FKS1"
HEAD: Final = struct.Struct("<4sI")
"""The magic word, and the number of results."""
RESULT: Final = struct.Struct("<IHQ?I")
"""Line, attempt, fence, ok and bytes of the text that follows."""
CHECKSUM: Final = struct.Struct("<I")
_FENCE_DIGITS: Final = 16
"""Hexadecimal digits of a fence in a name. Names of earlier versions have 12 of 23."""
_RANDOM_DIGITS: Final = 7
MAX_FENCE: Final = 16**_FENCE_DIGITS - 1


class TornSegment(ValueError):
    """A segment that was not written to its end. Nobody can have committed it."""


def new_name(results: Sequence[Result]) -> str:
    """Return a new name of 24 characters, with the lowest fence of the results (`order_of`)."""
    fence = min(result.fence for result in results)
    if not 0 <= fence <= MAX_FENCE:
        raise ValueError(f"fence {fence} is not in 0..{MAX_FENCE}")
    return f"{fence:0{_FENCE_DIGITS}x}-{secrets.token_hex(4)[:_RANDOM_DIGITS]}"


def order_of(name: str) -> tuple[str, str]:
    """Return what segments are sorted by: the lowest fence, with any number of digits."""
    return name.partition("-")[0].zfill(_FENCE_DIGITS), name


def encode(results: Sequence[Result]) -> bytes:
    """Return the content of a segment."""
    parts = [HEAD.pack(MAGIC, len(results))]
    for one in results:
        parts.append(RESULT.pack(one.line, one.attempt, one.fence, one.ok, len(one.text)))
        parts.append(one.text)
    content = b"".join(parts)
    return content + CHECKSUM.pack(crc32(content))


def decode(content: bytes) -> list[Result]:
    """Return the results of a segment, in the order they were written.

    Raises:
        TornSegment: if the content is not the whole content of a segment.
    """
    end = len(content) - CHECKSUM.size
    if end < HEAD.size:
        raise TornSegment(f"it has {len(content)} bytes")
    if CHECKSUM.unpack_from(content, end) != (crc32(memoryview(content)[:end]),):
        raise TornSegment("its checksum is wrong")
    magic, count = HEAD.unpack_from(content)
    if magic != MAGIC:
        raise TornSegment(f"it begins with {magic!r}: a version that is not known wrote it")
    results, position = [], HEAD.size
    for _ in range(count):
        line, attempt, fence, ok, size = RESULT.unpack_from(content, position)
        position += RESULT.size
        results.append(Result(line, attempt, fence, ok, content[position : position + size]))
        position += size
    if position != end:
        raise TornSegment(f"its results have {position} bytes, and it has {end}")
    return results

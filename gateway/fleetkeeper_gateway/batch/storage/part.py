"""A part of a chunk's log, as an object. Pure.

head       magic, closing, results by outcome, attempts, bytes of the body, checksum of the head
body       attempts (line, trouble), then results by line (line, outcome, bytes of the text, text)
checksum   of all before it

The head has a checksum of its own because progress is read from heads alone. Each version must keep the
place of the magic word and of the last checksum: by them, other versions recognize an undamaged part.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from zlib import crc32

from fleetkeeper_gateway.batch.model import Attempt, Result, Trouble

MAGIC: Final = b"FKC1"
_HEAD: Final = struct.Struct("<4s?IIIIQ")
CHECKSUM: Final = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size + CHECKSUM.size
_ATTEMPT: Final = struct.Struct("<IB")
_RESULT: Final = struct.Struct("<IBI")
FAILED, OK, DID_NOT_RUN = range(3)


class DamagedPart(ValueError):
    """The content is not as it was written."""


class UnknownPart(ValueError):
    """The content is undamaged, but an unknown version wrote it."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a part."""

    closing: bool
    """True if the part closes the log."""
    ok: int
    failed: int
    attempts: int
    body: int
    """Bytes of the body."""


class Entry(NamedTuple):
    """The place of a line's result in a part, and the checksum of its text."""

    offset: int
    size: int
    outcome: int
    checksum: int

    def result(self, line: int, text: bytes) -> Result:
        """Return the result with its text."""
        return Result(line, self.outcome == OK, text, self.outcome != DID_NOT_RUN)


@dataclass(frozen=True, slots=True)
class Part:
    """A part without the texts of its results."""

    head: Head
    attempts: Sequence[Attempt]
    entries: Sequence[tuple[int, Entry]]
    """Results by line, in the order of the lines."""


def size_of(result: Result) -> int:
    """Return the size of a result in a part, in bytes."""
    return _RESULT.size + len(result.text)


def size_without(attempts: int) -> int:
    """Return the size of a part with this number of attempts and no results, in bytes."""
    return HEAD_BYTES + attempts * _ATTEMPT.size + CHECKSUM.size


def outcome_of(result: Result) -> int:
    """Return the code of a result's outcome in a part."""
    if not result.ran:
        return DID_NOT_RUN
    return OK if result.ok else FAILED


def encode(results: Iterable[Result], attempts: Iterable[Attempt], *, closing: bool) -> bytes:
    """Encode a part."""
    pieces = [_ATTEMPT.pack(attempt.line, attempt.trouble) for attempt in attempts]
    noted = len(pieces)
    outcomes: Counter[int] = Counter()
    for result in sorted(results, key=lambda result: result.line):
        outcome = outcome_of(result)
        outcomes[outcome] += 1
        pieces += (_RESULT.pack(result.line, outcome, len(result.text)), result.text)
    counts = (outcomes[OK], outcomes[FAILED], outcomes[DID_NOT_RUN])
    head = _HEAD.pack(MAGIC, closing, *counts, noted, sum(map(len, pieces)))
    content = b"".join((head, CHECKSUM.pack(crc32(head)), *pieces))
    return content + CHECKSUM.pack(crc32(content))


def decode_head(content: bytes, size: int) -> Head:
    """Decode the head of a part.

    Args:
        content: its first `HEAD_BYTES` bytes, or more.
        size: size of the whole object in bytes.

    Raises:
        DamagedPart: if the head is not valid, or the object has a different size than it states.
        UnknownPart: if another version wrote it.
    """
    if content[: len(MAGIC)] != MAGIC:
        raise UnknownPart(f"it begins with {content[: len(MAGIC)]!r}")
    if size < HEAD_BYTES + CHECKSUM.size or len(content) < HEAD_BYTES:
        raise DamagedPart(f"it has {size} bytes")
    if CHECKSUM.unpack_from(content, _HEAD.size) != (crc32(content[: _HEAD.size]),):
        raise DamagedPart("the checksum of its head is wrong")
    _, closing, ok, failed, _, attempts, body = _HEAD.unpack_from(content)
    head = Head(closing, ok, failed, attempts, body)
    if HEAD_BYTES + head.body + CHECKSUM.size != size:
        raise DamagedPart(f"it has {size} bytes, and a body of {head.body} is in its head")
    return head


def decode(content: bytes) -> Part:
    """Decode a part.

    Raises:
        DamagedPart: if the content is not as it was written.
        UnknownPart: if another version wrote it.
    """
    end = len(content) - CHECKSUM.size
    if end < len(MAGIC) or CHECKSUM.unpack_from(content, end) != (
        crc32(memoryview(content)[:end]),
    ):
        raise DamagedPart("its checksum is wrong")
    head = decode_head(content, len(content))
    first = HEAD_BYTES + head.attempts * _ATTEMPT.size
    attempts = [
        Attempt(line, Trouble(trouble))
        for line, trouble in _ATTEMPT.iter_unpack(content[HEAD_BYTES:first])
    ]
    return Part(head, attempts, list(_entries(memoryview(content)[:end], first)))


def _entries(content: memoryview, position: int) -> Iterator[tuple[int, Entry]]:
    while position < len(content):
        line, outcome, size = _RESULT.unpack_from(content, position)
        position += _RESULT.size
        text = content[position : position + size]
        yield line, Entry(position, size, outcome, crc32(text))
        position += size

"""How blocks stand in the page's bytes: a header, and two sealed slots a block. Pure.

A slot is `sequence number, length, checksum | payload | sequence number again`. The checksum (CRC-32)
covers the start nonce, the block's place, the sequence number and the payload: bytes of another start,
of another block, or copied while they were being written, are not taken. The slots are written in
turn, so a writer that dies half way leaves the state before it readable. Before them stands the pulse,
whose cells are written in place: an aligned cell of 8 bytes is stored at once.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from fleetkeeper_engine.shm.layout import CAP, MIDDLEWARE, PULSE, SCHEDULER, SUPERVISOR

VERSION = 4
"""Of slots and tables together; a process with another one takes the page for none."""
MAGIC = b"FKPAGE\x00\x00"
MOST_RANKS = 64
"""Workers that can report an armed cap; the supervisor accepts a tensor parallel size up to it."""

HEADER = struct.Struct("<8sIIQI")
"""Magic, layout version, ranks, start nonce, checksum of what stands before it."""
SLOT_HEAD = struct.Struct("<QII")
SLOT_TAIL = struct.Struct("<Q")
_COVERED = struct.Struct("<QQQ")
HEADER_ROOM = 64
PULSE_AT = HEADER_ROOM
"""The pulse stands by itself, not in slots: each of its cells is whole."""


def pack_header(nonce: int, ranks: int) -> bytes:
    """The first bytes of a page."""
    known = HEADER.pack(MAGIC, VERSION, ranks, nonce, 0)[:-4]
    return known + struct.pack("<I", zlib.crc32(known))


def unpack_header(data: bytes) -> tuple[int, int] | None:
    """Nonce and ranks; None when this is no page of this version."""
    if len(data) < HEADER.size:
        return None
    magic, version, ranks, nonce, checksum = HEADER.unpack(data[: HEADER.size])
    whole = zlib.crc32(data[: HEADER.size - 4]) == checksum
    if not whole or magic != MAGIC or version != VERSION or not 1 <= ranks <= MOST_RANKS:
        return None
    return nonce, ranks


def slot_size(payload: int) -> int:
    """Bytes of a slot, up to the next cache line."""
    return _lines(SLOT_HEAD.size + payload + SLOT_TAIL.size)


def _lines(size: int) -> int:
    return -(-size // 64) * 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block stands: the offset of its first slot and the size of its payload."""

    offset: int
    payload: int

    def slot(self, sequence: int) -> int:
        """The offset of the slot that holds a sequence number."""
        return self.offset + (sequence & 1) * slot_size(self.payload)

    @property
    def end(self) -> int:
        """The offset after the second slot."""
        return self.offset + 2 * slot_size(self.payload)


def places(ranks: int) -> tuple[Place, ...]:
    """The blocks of a page: supervisor, middleware, scheduler, then one a rank."""
    return tuple(_laid_out([SUPERVISOR.size, MIDDLEWARE.size, SCHEDULER.size] + [CAP.size] * ranks))


def _laid_out(sizes: Iterable[int]) -> Iterable[Place]:
    offset = PULSE_AT + _lines(PULSE.size)
    for size in sizes:
        place = Place(offset, size)
        yield place
        offset = place.end


def checksum(nonce: int, place: Place, sequence: int, payload: bytes | memoryview) -> int:
    """CRC-32 over where and when a payload was written, and the payload."""
    return zlib.crc32(payload, zlib.crc32(_COVERED.pack(nonce, place.offset, sequence)))


def seal(nonce: int, place: Place, sequence: int, payload: bytes | memoryview) -> bytes:
    """The bytes of a slot."""
    head = SLOT_HEAD.pack(sequence, len(payload), checksum(nonce, place, sequence, payload))
    return head + payload + SLOT_TAIL.pack(sequence)


def unseal(nonce: int, place: Place, slot: bytes) -> tuple[int, bytes] | None:
    """Sequence number and payload of a slot; None when it is empty, torn or of another start."""
    sequence, length, found = SLOT_HEAD.unpack_from(slot)
    if sequence == 0 or length != place.payload:
        return None
    (again,) = SLOT_TAIL.unpack_from(slot, SLOT_HEAD.size + length)
    payload = slot[SLOT_HEAD.size : SLOT_HEAD.size + length]
    if again != sequence or checksum(nonce, place, sequence, payload) != found:
        return None
    return sequence, payload

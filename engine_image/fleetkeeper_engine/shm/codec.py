"""Encoding of blocks in the shared region: a header, and two sealed slots for each block. Pure.

A slot is `sequence number, length, checksum | payload | sequence number again`. The checksum
(CRC-32) covers the start nonce, the block's offset, the sequence number and the payload. A reader
therefore rejects bytes of another start, of another block, or of a write in progress. Writers
alternate between the two slots, so a writer that dies halfway leaves the previous state readable.
The heartbeat stands before the slots. Its cells are written in place, because an aligned 8-byte
cell is stored atomically.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from fleetkeeper_engine.shm.layout import CAP, HEARTBEAT, LOAD, MIDDLEWARE, SCHEDULER, SUPERVISOR

VERSION = 8
"""Version of slots and tables together. A process with another version ignores the region."""
MAGIC = b"FKPAGE\x00\x00"
MAX_RANKS = 64
"""Workers that can report an armed cap. The supervisor accepts a tensor parallel size up to it."""

HEADER = struct.Struct("<8sIIQI")
"""Magic, layout version, ranks, start nonce, and the checksum of the preceding fields."""
SLOT_HEAD = struct.Struct("<QII")
SLOT_TAIL = struct.Struct("<Q")
_COVERED = struct.Struct("<QQQ")
HEADER_ROOM = 64
HEARTBEAT_AT = HEADER_ROOM
"""The heartbeat is not in slots, because each of its cells is written atomically."""


def pack_header(nonce: int, ranks: int) -> bytes:
    """Return the first bytes of a region."""
    known = HEADER.pack(MAGIC, VERSION, ranks, nonce, 0)[:-4]
    return known + struct.pack("<I", zlib.crc32(known))


def unpack_header(data: bytes) -> tuple[int, int] | None:
    """Return nonce and ranks, or None if the data is not a region of this version."""
    if len(data) < HEADER.size:
        return None
    magic, version, ranks, nonce, checksum = HEADER.unpack(data[: HEADER.size])
    whole = zlib.crc32(data[: HEADER.size - 4]) == checksum
    if not whole or magic != MAGIC or version != VERSION or not 1 <= ranks <= MAX_RANKS:
        return None
    return nonce, ranks


def slot_size(payload: int) -> int:
    """Return the bytes of a slot, rounded up to a cache line."""
    return _lines(SLOT_HEAD.size + payload + SLOT_TAIL.size)


def _lines(size: int) -> int:
    return -(-size // 64) * 64


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """The position of a block: the offset of its first slot and the size of its payload."""

    offset: int
    payload: int

    def slot(self, sequence: int) -> int:
        """Return the offset of the slot that holds a sequence number."""
        return self.offset + (sequence & 1) * slot_size(self.payload)

    @property
    def end(self) -> int:
        """Return the offset after the second slot."""
        return self.offset + 2 * slot_size(self.payload)


def places(ranks: int) -> tuple[BlockPlace, ...]:
    """Return the blocks of a region: supervisor, middleware, scheduler, then two for each rank.

    The memory caps of all ranks come before the loads of all ranks.
    """
    of_ranks = [CAP.size] * ranks + [LOAD.size] * ranks
    return tuple(_laid_out([SUPERVISOR.size, MIDDLEWARE.size, SCHEDULER.size, *of_ranks]))


def _laid_out(sizes: Iterable[int]) -> Iterable[BlockPlace]:
    offset = HEARTBEAT_AT + _lines(HEARTBEAT.size)
    for size in sizes:
        place = BlockPlace(offset, size)
        yield place
        offset = place.end


def checksum(nonce: int, place: BlockPlace, sequence: int, payload: bytes | memoryview) -> int:
    """Return the CRC-32 over the nonce, the offset, the sequence number and the payload."""
    return zlib.crc32(payload, zlib.crc32(_COVERED.pack(nonce, place.offset, sequence)))


def seal(nonce: int, place: BlockPlace, sequence: int, payload: bytes | memoryview) -> bytes:
    """Return the bytes of a slot."""
    head = SLOT_HEAD.pack(sequence, len(payload), checksum(nonce, place, sequence, payload))
    return head + payload + SLOT_TAIL.pack(sequence)


def unseal(nonce: int, place: BlockPlace, slot: bytes) -> tuple[int, bytes] | None:
    """Return sequence number and payload of a slot; None if it is empty, torn or of another start."""
    sequence, length, found = SLOT_HEAD.unpack_from(slot)
    if sequence == 0 or length != place.payload:
        return None
    (again,) = SLOT_TAIL.unpack_from(slot, SLOT_HEAD.size + length)
    payload = slot[SLOT_HEAD.size : SLOT_HEAD.size + length]
    if again != sequence or checksum(nonce, place, sequence, payload) != found:
        return None
    return sequence, payload

"""The ledger: a file beside the shared region, in which the API server notes the tokens of each request.

The file is a ring of records of one size. Its head names the newest record and holds the sums up to
it. Each record repeats the sums up to itself, so a reader of any part can compute what is missing. Only
the API server writes. The supervisor reads with `pread` and keeps nothing, so the ring takes no
memory of it. The file outlives its writer: the next one continues the numbers.
"""

from __future__ import annotations

import os
import secrets
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from fleetkeeper_contract.tiers import TIERS, Tier
from fleetkeeper_engine.shm.region import ENVIRONMENT

FILE = "usage-ledger"
"""The ledger's name in the run directory."""
CAPACITY = 20_000
RECORD_BYTES = 512
PAGE_ENTRIES = 1_000

_MAGIC = b"FKUSAGE1"
_HEADER = struct.Struct("<8sI16s")
"""Magic, capacity, boot. A checksum follows."""
_SUMS = struct.Struct("<6Q")
_HEAD = struct.Struct(f"<QQ?{_SUMS.size}s")
"""Newest number, errors, whether tokens are counted, sums. A checksum follows."""
_RECORD = struct.Struct(f"<QdQQQ{_SUMS.size}sBBBBBB")
"""Number, time, three counts, sums, flags, tier, and the length of each text."""
_CHECKSUM = struct.Struct("<I")
_HEAD_AT = 64
_RECORDS_AT = 4096
_TEXT_BYTES = RECORD_BYTES - _RECORD.size - _CHECKSUM.size
_ABORTED, _ATTRIBUTED = 1, 2
_NO_TIER = 255
_TRIES = 8
_READ_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Tokens:
    """Counts of tokens."""

    prompt: int = 0
    cached: int = 0
    """Tokens of the prompt that the prefix cache had."""
    answer: int = 0

    def plus(self, other: Tokens) -> Tokens:
        """Return the sum."""
        return Tokens(
            self.prompt + other.prompt, self.cached + other.cached, self.answer + other.answer
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """The counts of one HTTP request. Without a grant, `attempt`, `request` and `key` are empty."""

    tokens: Tokens
    time: float
    """End, in Unix seconds."""
    attempt: str = ""
    request: str = ""
    key: str = ""
    adapter: str = ""
    """The LoRA adapter that it named; empty for the model itself."""
    tier: Tier | None = None
    aborted: bool = False

    @property
    def attributed(self) -> bool:
        """Return whether a grant says who sent it."""
        return bool(self.attempt)


@dataclass(frozen=True, slots=True)
class Sums:
    """Tokens of all entries up to one number."""

    total: Tokens = field(default_factory=Tokens)
    unattributed: Tokens = field(default_factory=Tokens)
    """The part of the total whose entries have no grant."""

    def plus(self, entry: Entry) -> Sums:
        """Return the sums with an entry more."""
        unattributed = self.unattributed
        if not entry.attributed:
            unattributed = unattributed.plus(entry.tokens)
        return Sums(self.total.plus(entry.tokens), unattributed)

    def pack(self) -> bytes:
        """Return the six counts."""
        total, rest = self.total, self.unattributed
        return _SUMS.pack(
            total.prompt, total.cached, total.answer, rest.prompt, rest.cached, rest.answer
        )

    @classmethod
    def unpack(cls, data: bytes) -> Sums:
        """Return the sums in six counts."""
        counts = _SUMS.unpack(data)
        return cls(Tokens(*counts[:3]), Tokens(*counts[3:]))


@dataclass(frozen=True, slots=True)
class LedgerHead:
    """The state of a ledger after its newest entry."""

    newest: int = 0
    errors: int = 0
    """Entries that could not be written, and outputs of the engine that could not be counted."""
    counting: bool = False
    """True if this vLLM's tokens are counted."""
    sums: Sums = field(default_factory=Sums)


def path_of_environment(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the place of the ledger: beside the shared region. None without a region."""
    region = environment.get(ENVIRONMENT)
    return Path(region).with_name(FILE) if region else None


class LedgerWriter:
    """The API server's side."""

    def __init__(self, file: int, capacity: int, boot: str, head: LedgerHead) -> None:
        self._file = file
        self._capacity = capacity
        self.boot = boot
        self.head = head

    @classmethod
    def open(cls, path: Path, capacity: int = CAPACITY) -> LedgerWriter:
        """Continue the ledger at `path`, or begin one there.

        Raises:
            OSError: if the file can be neither opened nor created.
        """
        found = LedgerReader.open(path)
        if found is not None:
            with found:
                head = found.head()
            if head is not None and found.capacity == capacity:
                return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), capacity, found.boot, head)
        boot = secrets.token_bytes(16)
        descriptor, made = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            os.pwrite(descriptor, _sealed(_HEADER.pack(_MAGIC, capacity, boot)), 0)
            os.pwrite(descriptor, _pack_head(LedgerHead()), _HEAD_AT)
            Path(made).replace(path)
        except BaseException:
            os.close(descriptor)
            Path(made).unlink(missing_ok=True)
            raise
        return cls(descriptor, capacity, boot.hex(), LedgerHead())

    def write(self, entry: Entry) -> None:
        """Append an entry. Its number and its sums count even if the file cannot be written.

        Raises:
            OSError: if the entry is not in the file.
        """
        head = self.head
        if not _fits(entry):
            entry = replace(entry, request="", adapter="")
        if not _fits(entry):
            entry = replace(entry, attempt="", key="")
        self.head = head = replace(head, newest=head.newest + 1, sums=head.sums.plus(entry))
        place = _place(head.newest, self._capacity)
        try:
            _write(self._file, _pack_record(head.newest, entry, head.sums), place)
            # Readers see the record with the head, which therefore comes second.
            _write(self._file, _pack_head(head), _HEAD_AT)
        except OSError:
            self.head = replace(head, errors=head.errors + 1)
            raise

    def set_state(self, *, counting: bool | None = None, errors: int = 0) -> None:
        """Change whether tokens are counted, and add errors.

        Raises:
            OSError: if the file cannot be written.
        """
        head = replace(self.head, errors=self.head.errors + errors)
        self.head = head if counting is None else replace(head, counting=counting)
        _write(self._file, _pack_head(self.head), _HEAD_AT)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class LedgerReader:
    """The supervisor's side: one reading of the file."""

    def __init__(self, file: int, capacity: int, boot: str) -> None:
        self._file = file
        self.capacity = capacity
        self.boot = boot

    @classmethod
    def open(cls, path: Path) -> LedgerReader | None:
        """Open a ledger; None if there is none of this format."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        known = _unsealed(os.pread(file, _HEADER.size + _CHECKSUM.size, 0), _HEADER.size)
        if known is None:
            os.close(file)
            return None
        magic, capacity, boot = _HEADER.unpack(known)
        if magic != _MAGIC or not capacity:
            os.close(file)
            return None
        return cls(file, capacity, boot.hex())

    def __enter__(self) -> Self:
        """Return the reader."""
        return self

    def __exit__(self, *_problem: object) -> None:
        """Close the file."""
        os.close(self._file)

    def head(self) -> LedgerHead | None:
        """Return the head; None if it cannot be read whole."""
        for _ in range(_TRIES):
            data = os.pread(self._file, _HEAD.size + _CHECKSUM.size, _HEAD_AT)
            known = _unsealed(data, _HEAD.size)
            if known is not None:
                newest, errors, counting, sums = _HEAD.unpack(known)
                return LedgerHead(newest, errors, counting, Sums.unpack(sums))
        return None

    def oldest(self, head: LedgerHead) -> int:
        """Return the number of the oldest entry that the ring still has (1 if there is none)."""
        return max(1, head.newest - self.capacity + 1)

    def entries(self, first: int, last: int) -> Iterator[tuple[int, Entry, Sums]]:
        """Yield the entries from `first` to `last` with their numbers, and the sums up to each.

        An entry that was overwritten in the meantime, or never written, is left out.
        """
        while first <= last:
            place = _place(first, self.capacity)
            until_wrap = self.capacity - (first - 1) % self.capacity
            count = min(last - first + 1, until_wrap, _READ_AT_ONCE)
            data = os.pread(self._file, count * RECORD_BYTES, place)
            for index in range(count):
                record = data[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]
                found = _unpack_record(record, first + index)
                if found is not None:
                    yield first + index, *found
            first += count


def _place(number: int, capacity: int) -> int:
    return _RECORDS_AT + (number - 1) % capacity * RECORD_BYTES


def _write(file: int, data: bytes, place: int) -> None:
    if os.pwrite(file, data, place) != len(data):
        raise OSError("the ledger has no room")


def _sealed(data: bytes) -> bytes:
    return data + _CHECKSUM.pack(zlib.crc32(data))


def _unsealed(data: bytes, size: int) -> bytes | None:
    if len(data) < size + _CHECKSUM.size:
        return None
    (checksum,) = _CHECKSUM.unpack_from(data, size)
    return data[:size] if zlib.crc32(data[:size]) == checksum else None


def _pack_head(head: LedgerHead) -> bytes:
    return _sealed(_HEAD.pack(head.newest, head.errors, head.counting, head.sums.pack()))


def _texts(entry: Entry) -> list[bytes]:
    return [
        text.encode("utf-8", "replace")
        for text in (entry.attempt, entry.request, entry.key, entry.adapter)
    ]


def _fits(entry: Entry) -> bool:
    texts = _texts(entry)
    return sum(map(len, texts)) <= _TEXT_BYTES and max(map(len, texts)) <= 255


def _pack_record(number: int, entry: Entry, sums: Sums) -> bytes:
    texts = _texts(entry)
    flags = _ABORTED * entry.aborted | _ATTRIBUTED * entry.attributed
    tier = _NO_TIER if entry.tier is None else int(entry.tier)
    tokens = entry.tokens
    fixed = _RECORD.pack(
        number,
        entry.time,
        tokens.prompt,
        tokens.cached,
        tokens.answer,
        sums.pack(),
        flags,
        tier,
        *map(len, texts),
    )
    return _sealed((fixed + b"".join(texts)).ljust(RECORD_BYTES - _CHECKSUM.size, b"\0"))


def _unpack_record(record: bytes, number: int) -> tuple[Entry, Sums] | None:
    known = _unsealed(record, RECORD_BYTES - _CHECKSUM.size)
    if known is None:
        return None
    found, time, prompt, cached, answer, sums, flags, tier, *lengths = _RECORD.unpack_from(known)
    if found != number:
        return None
    texts, place = [], _RECORD.size
    for length in lengths:
        texts.append(known[place : place + length].decode("utf-8", "replace"))
        place += length
    attempt, request, key, adapter = texts
    entry = Entry(
        Tokens(prompt, cached, answer),
        time,
        attempt,
        request,
        key,
        adapter,
        tier=TIERS[tier] if tier < len(TIERS) else None,
        aborted=bool(flags & _ABORTED),
    )
    return entry, Sums.unpack(sums)

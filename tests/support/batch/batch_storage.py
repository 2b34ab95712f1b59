"""Records, stores and steps for tests of the batch storage."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleetkeeper_gateway.batch.model import (
    BatchRecord,
    Counts,
    FileRecord,
    Final,
    LineRef,
    Result,
    Status,
    Validated,
)
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.batch.storage import Storage

NOW = 1_790_000_000
DAY = 86_400
KEY = "team-a.ci"
OTHER_KEY = "team-b"


class Clock:
    """Unix seconds that tests set."""

    now = float(NOW)

    def __call__(self) -> float:
        """Return them."""
        return self.now


def settings(store: str, **changes: Any) -> BatchSettings:
    """Settings with a store."""
    return BatchSettings.model_validate({"batch_store": store, **changes})


def file_id(number: int) -> str:
    """The ID of a file."""
    return f"file-{number:032x}"


def batch_id(number: int) -> str:
    """The ID of a batch."""
    return f"batch_{number:032x}"


def a_file(number: int = 1, **changes: Any) -> FileRecord:
    """A file of 5 bytes."""
    record = FileRecord(file_id(number), KEY, "lines.jsonl", "batch", 5, NOW + number)
    return replace(record, **changes)


def a_batch(number: int = 1, **changes: Any) -> BatchRecord:
    """A batch of the file with the same number."""
    record = BatchRecord(
        batch_id(number),
        KEY,
        file_id(number),
        "/v1/chat/completions",
        "24h",
        NOW + number,
        NOW + number + DAY,
        {"team": "a", "note": "ü"},
    )
    return replace(record, **changes)


def a_final(at: int = NOW, **changes: Any) -> Final:
    """The end of a batch of two lines."""
    return replace(Final(Status.COMPLETED, at, Counts(2, 2, 0), file_id(7)), **changes)


def a_validated(lines: int, **changes: Any) -> Validated:
    """What an input file with some lines was found to be."""
    return replace(Validated(lines, "llama", 100 * lines, NOW), **changes)


def lines(count: int, size: int = 100) -> list[LineRef]:
    """Lines of one size."""
    return [LineRef(number, number * (size + 1), size) for number in range(count)]


def results(numbers: Iterable[int], text: bytes = b"") -> list[Result]:
    """Results of lines, of which each third one failed."""
    return [
        Result(number, number % 3 != 0, b'{"line":%d,"text":"%b"}' % (number, text))
        for number in numbers
    ]


def files_in(directory: Path) -> list[str]:
    """All files below a directory."""
    return sorted(
        str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()
    )


async def parts_of(*parts: bytes) -> AsyncIterator[bytes]:
    """Parts of an object."""
    for part in parts:
        yield part


async def put_file(storage: Storage, record: FileRecord) -> None:
    """Write a file of so many bytes as its record says."""
    path = storage.files.data_path(record.key_id, record.id)
    await storage.objects.write(path, parts_of(b"x" * record.bytes))
    await storage.files.put(record)


async def paths_in(storage: Storage, prefix: str = "keys/") -> list[str]:
    """Return all paths below a prefix."""
    return [one.path for one in await storage.objects.list(prefix)]

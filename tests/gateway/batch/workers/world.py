# ruff: noqa: PLC0415 - tests of parts in memory need no store
"""Batches in a real store in a directory."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetkeeper_gateway.batch.interfaces import StorageError
from fleetkeeper_gateway.batch.model import BatchRecord, FileRecord, LineRef, Result, Validated
from fleetkeeper_gateway.batch.settings import BatchSettings
from tests.gateway.batch.workers.memory import (
    ENDPOINT,
    KEY,
    MODEL,
    batch_record,
    input_text,
    line_refs,
    until,
)
from tests.support.guards import GUARD_S

if TYPE_CHECKING:
    from fleetkeeper_gateway.batch.storage import Storage

__all__ = [
    "ENDPOINT",
    "GUARD_S",
    "KEY",
    "MODEL",
    "FailingBatches",
    "batch_record",
    "input_text",
    "line_refs",
    "number_of",
    "output_of",
    "put_batch",
    "put_file",
    "result",
    "storage_in",
    "until",
]


def storage_in(directory: Path) -> Storage:
    """Return a store in a directory."""
    from fleetkeeper_gateway.batch.storage import create_storage

    settings = BatchSettings(batch_store=f"file://{directory}", batch_store_shared=True)
    return create_storage(settings)


async def whole(data: bytes) -> AsyncIterator[bytes]:
    """Return the parts of a text."""
    yield data


async def put_file(storage: Storage, record: BatchRecord, text: bytes) -> None:
    """Write the input file of a batch."""
    path = storage.files.data_path(record.key_id, record.input_file)
    size = await storage.objects.write(path, whole(text))
    await storage.files.put(
        FileRecord(record.input_file, record.key_id, "in.jsonl", "batch", size, int(time.time()))
    )


async def put_batch(
    storage: Storage, lines: int = 10, number: int = 0, padding: str = "", **changes: Any
) -> tuple[BatchRecord, Validated, list[LineRef]]:
    """Write a validated batch."""
    record = batch_record(number, **changes)
    text = input_text(lines, padding)
    refs = line_refs(text)
    await put_file(storage, record, text)
    assert await storage.batches.create(record)
    validated = Validated(lines, MODEL, lines * 100, int(time.time()))
    await storage.batches.put_validated(record, validated, refs)
    return record, validated, refs


async def output_of(
    storage: Storage, record: BatchRecord, file_id: str | None
) -> list[dict[str, Any]]:
    """Return the lines of a file; none if there is none."""
    if file_id is None:
        return []
    assert await storage.files.get(record.key_id, file_id) is not None
    data = await storage.objects.read(storage.files.data_path(record.key_id, file_id))
    assert data is not None
    return [json.loads(line) for line in data.splitlines()]


def number_of(line: Mapping[str, Any]) -> int:
    """Return the number of the input line that a line of a file is about."""
    return int(line["custom_id"].removeprefix("c-"))


class FailingBatches:
    """Batches of a store of which some calls fail while a test says so."""

    def __init__(self, storage: Storage) -> None:
        self._batches = storage.batches
        self.failing: set[str] = set()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._batches, name)

        async def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in self.failing:
                raise StorageError("the test says so")
            return await found(*arguments)

        return found if name == "results" else call


def result(line: int, text: str = "", *, good: bool = True) -> Result:
    """Return a result whose text is a line of a file."""
    return Result(line, good, json.dumps({"custom_id": f"c-{line}", "text": text}).encode())

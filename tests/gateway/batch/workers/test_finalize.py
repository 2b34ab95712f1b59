"""The end of a batch, with a store in a directory."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper_gateway.batch.interfaces import StorageError
from fleetkeeper_gateway.batch.model import BatchRecord, Counts, Final, Status
from fleetkeeper_gateway.batch.storage import Storage
from fleetkeeper_gateway.batch.workers.finalize import Finalizer
from fleetkeeper_gateway.batch.workers.inputs import Inputs
from fleetkeeper_gateway.batch.workers.merge import MEMORY_BYTES
from tests.gateway.batch.workers.world import (
    FailingBatches,
    number_of,
    output_of,
    put_batch,
    result,
)


def finalizer(storage: Storage, batches: Any = None, memory_bytes: int = MEMORY_BYTES) -> Finalizer:
    return Finalizer(
        storage.objects,
        storage.files,
        batches or storage.batches,
        Inputs(storage.objects, storage.files),
        memory_bytes=memory_bytes,
    )


async def files_of(storage: Storage, record: BatchRecord) -> set[str]:
    """Return the IDs of the files that were written."""
    objects = await storage.objects.list(f"keys/{record.key_id}/files/")
    return {one.path.split("/")[3] for one in objects} - {record.input_file}


@pytest.mark.parametrize("memory_bytes", [MEMORY_BYTES, 2000, 1])
async def test_files_cover_each_line_once_in_order(storage: Storage, memory_bytes: int) -> None:
    record, _, refs = await put_batch(storage, 200)
    numbers = list(range(200))
    random.Random(1).shuffle(numbers)
    for start in range(0, 200, 7):
        some = numbers[start : start + 7]
        await storage.batches.add_segment(
            record, [result(number, fence=number + 1, good=number % 3 > 0) for number in some]
        )
    final = await finalizer(storage, memory_bytes=memory_bytes).finalize(
        record, refs, Status.COMPLETED
    )
    assert final is not None
    assert (final.status, final.counts) == (Status.COMPLETED, Counts(200, 133, 67))
    output = [number_of(line) for line in await output_of(storage, record, final.output_file)]
    errors = [number_of(line) for line in await output_of(storage, record, final.error_file)]
    assert output == [number for number in range(200) if number % 3]
    assert errors == list(range(0, 200, 3))
    assert await storage.batches.final(record) == final
    file = await storage.files.get(record.key_id, final.output_file or "")
    assert file is not None
    assert (file.filename, file.purpose) == (f"{record.id}_output.jsonl", "batch_output")


@pytest.mark.promise("batch-results")
@pytest.mark.parametrize("memory_bytes", [MEMORY_BYTES, 1])
async def test_of_several_results_that_with_the_lowest_fence_counts(
    storage: Storage, memory_bytes: int
) -> None:
    record, _, refs = await put_batch(storage, 3)
    await storage.batches.add_segment(record, [result(0, 5), result(1, 3), result(2, 9)])
    await storage.batches.add_segment(record, [result(0, 4), result(1, 6)])
    await storage.batches.add_segment(record, [result(0, 7), result(7, 1)])
    final = await finalizer(storage, memory_bytes=memory_bytes).finalize(
        record, refs, Status.COMPLETED
    )
    assert final is not None
    lines = await output_of(storage, record, final.output_file)
    assert [line["fence"] for line in lines] == [4, 3, 9]
    assert final.error_file is None, "there is nothing to say"


@pytest.mark.parametrize("status", [Status.CANCELLED, Status.EXPIRED])
async def test_lines_that_did_not_run_are_in_the_error_file(
    storage: Storage, status: Status
) -> None:
    record, _, refs = await put_batch(storage, 10, output_expires_after=3600)
    await storage.batches.add_segment(record, [result(2), result(5, good=False), result(7)])
    final = await finalizer(storage).finalize(record, refs, status)
    assert final is not None
    assert (final.status, final.counts) == (status, Counts(10, 2, 1))
    output = await output_of(storage, record, final.output_file)
    assert [number_of(line) for line in output] == [2, 7]
    errors = await output_of(storage, record, final.error_file)
    assert [number_of(line) for line in errors] == [0, 1, 3, 4, 5, 6, 8, 9]
    codes = {line["error"]["code"] for line in errors if "error" in line}
    assert codes == {f"batch_{status.value}"}
    file = await storage.files.get(record.key_id, final.error_file or "")
    assert file is not None
    assert file.expires == file.created + 3600


async def test_a_batch_without_results_has_no_output_file(storage: Storage) -> None:
    record, _, refs = await put_batch(storage, 3)
    final = await finalizer(storage).finalize(record, refs, Status.CANCELLED)
    assert final is not None
    assert final.output_file is None
    assert len(await output_of(storage, record, final.error_file)) == 3


async def test_a_batch_that_expires_with_all_its_results_is_completed(storage: Storage) -> None:
    record, _, refs = await put_batch(storage, 1)
    await storage.batches.add_segment(record, [result(0)])
    final = await finalizer(storage).finalize(record, refs, Status.EXPIRED)
    assert final is not None
    assert final.status is Status.COMPLETED


async def test_a_batch_whose_results_are_missing_is_not_completed(storage: Storage) -> None:
    record, _, refs = await put_batch(storage, 3)
    await storage.batches.add_segment(record, [result(0)])
    assert await finalizer(storage).finalize(record, refs, Status.COMPLETED) is None
    assert await storage.batches.final(record) is None
    assert await files_of(storage, record) == set()


async def test_of_two_finalizers_one_counts_and_the_files_of_the_other_are_deleted(
    storage: Storage,
) -> None:
    record, _, refs = await put_batch(storage, 50)
    await storage.batches.add_segment(record, [result(number) for number in range(0, 50, 2)])
    first, second = await asyncio.gather(
        finalizer(storage).finalize(record, refs, Status.CANCELLED),
        finalizer(storage).finalize(record, refs, Status.CANCELLED),
    )
    assert first is not None
    assert first == second == await storage.batches.final(record)
    assert await files_of(storage, record) == {first.output_file, first.error_file}
    assert len(await output_of(storage, record, first.output_file)) == 25


async def test_an_end_whose_writing_failed_leaves_no_files_in_the_end(storage: Storage) -> None:
    record, _, refs = await put_batch(storage, 3)
    await storage.batches.add_segment(record, [result(number) for number in range(3)])
    batches = FailingBatches(storage)
    batches.failing.add("put_final")
    ends = finalizer(storage, batches)
    for _ in range(2):
        with pytest.raises(StorageError):
            await ends.finalize(record, refs, Status.COMPLETED)
    assert len(await files_of(storage, record)) == 2, "one of them may be the one that counts"
    batches.failing.clear()
    final = await ends.finalize(record, refs, Status.COMPLETED)
    assert final is not None
    assert await files_of(storage, record) == {final.output_file}


async def test_an_end_that_was_written_although_the_store_failed_keeps_its_files(
    storage: Storage,
) -> None:
    record, _, refs = await put_batch(storage, 3)
    await storage.batches.add_segment(record, [result(number) for number in range(3)])

    class Lying(FailingBatches):
        """Writes the end, and says that it did not."""

        async def put_final(self, found: BatchRecord, final: Final) -> Final:
            await storage.batches.put_final(found, final)
            raise StorageError("no answer")

    ends = finalizer(storage, Lying(storage))
    with pytest.raises(StorageError):
        await ends.finalize(record, refs, Status.COMPLETED)
    kept = await storage.batches.final(record)
    assert kept is not None
    final = await finalizer(storage).finalize(record, refs, Status.COMPLETED)
    assert final == kept
    assert len(await output_of(storage, record, kept.output_file)) == 3


async def test_a_store_that_fails_while_files_are_written_leaves_none(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, _, refs = await put_batch(storage, 4)
    await storage.batches.add_segment(record, [result(0), result(1, good=False)])
    written = []
    write = storage.objects.write

    async def failing(path: str, parts: Any) -> int:
        written.append(path)
        if len(written) == 2:
            raise StorageError("the disk is full")
        return await write(path, parts)

    monkeypatch.setattr(storage.objects, "write", failing)
    with pytest.raises(StorageError):
        await finalizer(storage).finalize(record, refs, Status.CANCELLED)
    assert await files_of(storage, record) == set()
    assert await finalizer(storage).finalize(record, refs, Status.CANCELLED) is not None


async def test_an_input_that_is_gone_does_not_keep_a_batch_from_ending(storage: Storage) -> None:
    record, _, refs = await put_batch(storage, 2)
    await storage.files.delete(record.key_id, record.input_file)
    final = await finalizer(storage).finalize(
        replace(record, metadata={"a": "b"}), refs, Status.EXPIRED
    )
    assert final is not None
    lines = await output_of(storage, record, final.error_file)
    assert [line["custom_id"] for line in lines] == ["", ""]

"""The end of a batch: closed logs become two files, once, in the order of the input."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from fleetkeeper_gateway.batch.interfaces import Index, StorageError
from fleetkeeper_gateway.batch.lifecycle.finalize import Finalizer
from fleetkeeper_gateway.batch.model import BatchRecord, Counts, FileRecord, Final, Result, Status
from fleetkeeper_gateway.batch.storage import Storage, create_storage
from fleetkeeper_gateway.batch.workers.inputs import Inputs
from tests.support.batch.batch_storage import (
    KEY,
    OTHER_KEY,
    a_batch,
    a_validated,
    parts_of,
    settings,
)
from tests.support.batch.batch_storage import lines as blank_lines
from tests.support.guards import GUARD_S

LINES = 600
MIB = 1024 * 1024
EARLY = [Status.CANCELLED, Status.EXPIRED]


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    """A store in a directory."""
    found = create_storage(settings(f"file://{tmp_path}/store"))
    yield found
    found.close()


def finalizer(storage: Storage, batches: Any = None) -> Finalizer:
    return Finalizer(
        storage.objects,
        storage.files,
        batches or storage.batches,
        Inputs(storage.objects, storage.files),
    )


def a_line(number: int) -> bytes:
    """A line of an input file of 100 bytes, with its end 101."""
    line = {"custom_id": f"c-{number}", "method": "POST", "body": {"model": "llama", "pad": ""}}
    line["body"] = {"model": "llama", "pad": "x" * (100 - len(json.dumps(line)))}
    return json.dumps(line).encode() + b"\n"


async def put_batch(
    storage: Storage, lines: int = LINES, **changes: Any
) -> tuple[BatchRecord, Index]:
    """Write a validated batch."""
    record = a_batch(**changes)
    text = b"".join(map(a_line, range(lines)))
    assert len(text) == 101 * lines
    path = storage.files.data_path(KEY, record.input_file)
    size = await storage.objects.write(path, parts_of(text))
    await storage.files.put(
        FileRecord(record.input_file, KEY, "in.jsonl", "batch", size, int(time.time()))
    )
    await storage.batches.create(record)
    await storage.batches.put_validated(record, a_validated(lines), blank_lines(lines))
    return record, await storage.batches.index(record)


def result(line: int, of: str = "a", *, good: bool = True) -> Result:
    text = json.dumps({"custom_id": f"c-{line}", "of": of})
    return Result(line, good, text.encode())


async def append(
    storage: Storage, record: BatchRecord, some: Iterable[Result], *, close: bool = True
) -> None:
    """Write results to the logs of their chunks. Close those that are complete."""
    index = await storage.batches.index(record)
    known = {one.line: one for one in some}
    for chunk, lines in enumerate(index.chunks):
        log = storage.batches.log(record, chunk, lines)
        await log.read()
        await log.append([known[line] for line in lines if line in known], close=close)


async def lines_of(storage: Storage, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of a file; none if there is none."""
    if file_id is None:
        return []
    assert await storage.files.get(KEY, file_id) is not None
    content = await storage.objects.read(storage.files.data_path(KEY, file_id))
    assert content is not None
    return [json.loads(line) for line in content.splitlines()]


def numbers(lines: Iterable[dict[str, Any]]) -> list[int]:
    return [int(line["custom_id"].removeprefix("c-")) for line in lines]


async def files_of(storage: Storage) -> set[str | None]:
    """Return the IDs of the files that were written."""
    objects = await storage.objects.list(f"keys/{KEY}/files/")
    found: set[str | None] = {one.path.split("/")[3] for one in objects}
    return found - {a_batch().input_file}


class Faulty:
    """Batches of which the end cannot be written."""

    def __init__(self, storage: Storage, *, writes: bool = False) -> None:
        self._batches = storage.batches
        self.fails = True
        self._writes = writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    async def put_final(self, record: BatchRecord, final: Final) -> Final:
        if not self.fails or self._writes:
            kept = await self._batches.put_final(record, final)
        if self.fails:
            raise StorageError("no answer")
        return kept


@pytest.mark.promise("batch-results")
async def test_files_cover_each_line_once_in_order(storage: Storage) -> None:
    record, index = await put_batch(storage)
    # In three parts for each chunk, none of them in order.
    for rest in (2, 0, 1):
        some = [result(line, good=line % 5 > 0) for line in range(rest, LINES, 3)]
        await append(storage, record, some)
    final = await finalizer(storage).finalize(record, index, Status.COMPLETED)
    assert (final.status, final.counts) == (Status.COMPLETED, Counts(LINES, 480, 120))
    output = await lines_of(storage, final.output_file)
    errors = await lines_of(storage, final.error_file)
    assert numbers(output) == [number for number in range(LINES) if number % 5]
    assert numbers(errors) == list(range(0, LINES, 5))
    assert await storage.batches.final(record) == final
    assert await files_of(storage) == {final.output_file, final.error_file}
    file = await storage.files.get(KEY, final.output_file or "")
    assert file is not None
    assert (file.filename, file.purpose) == (f"{record.id}_output.jsonl", "batch_output")
    size = len(await storage.objects.read(storage.files.data_path(KEY, file.id)) or b"")
    assert file.bytes == size


async def test_a_batch_whose_logs_are_open_is_not_finalized(storage: Storage) -> None:
    record, index = await put_batch(storage)
    await append(storage, record, map(result, range(LINES - 1)))
    with pytest.raises(StorageError, match="the log of chunk 2"):
        await finalizer(storage).finalize(record, index, Status.COMPLETED)
    assert await storage.batches.final(record) is None
    assert await files_of(storage) == set()


@pytest.mark.promise("batch-results")
@pytest.mark.parametrize("status", EARLY)
async def test_lines_that_did_not_run_are_in_the_error_file(
    storage: Storage, status: Status
) -> None:
    record, index = await put_batch(storage, output_expires_after=3600)
    await append(storage, record, [*map(result, range(512)), result(550, good=False)])
    late = storage.batches.log(record, 2, index.chunks[2])
    await late.read()
    batches = Faulty(storage)
    ends = finalizer(storage, batches)
    with pytest.raises(StorageError, match="no answer"):
        await ends.finalize(record, index, status)
    # A worker that comes late changes nothing, and neither does another end.
    assert await late.append([result(line, "late") for line in index.chunks[2]]) == set()
    progress = await storage.batches.progress(record, a_validated(LINES))
    assert (progress.open, progress.counts) == (frozenset(), Counts(LINES, 512, 1))
    batches.fails = False
    with pytest.raises(StorageError, match="closed early"):
        await ends.finalize(record, index, Status.COMPLETED)
    final = await ends.finalize(record, index, status)
    assert (final.status, final.counts) == (status, progress.counts)
    output = await lines_of(storage, final.output_file)
    assert (numbers(output), {one["of"] for one in output}) == (list(range(512)), {"a"})
    errors = await lines_of(storage, final.error_file)
    assert numbers(errors) == list(range(512, LINES))
    codes = {number: one["error"]["code"] for number, one in enumerate(errors, 512) if "id" in one}
    assert set(codes) == set(range(512, LINES)) - {550}
    assert set(codes.values()) == {f"batch_{status.value}"}
    file = await storage.files.get(KEY, final.error_file or "")
    assert file is not None
    assert file.expires == file.created + 3600


async def test_a_worker_that_writes_while_logs_are_closed_counts(storage: Storage) -> None:
    record, index = await put_batch(storage)
    log = storage.batches.log(record, 1, index.chunks[1])

    async def work() -> set[int]:
        counted: set[int] = set()
        for line in index.chunks[1][:60]:
            counted |= await log.append([result(line)])
        return counted

    ends = finalizer(storage)
    counted, final = await asyncio.gather(work(), ends.finalize(record, index, Status.CANCELLED))
    assert final.counts == Counts(LINES, len(counted), 0)
    assert set(numbers(await lines_of(storage, final.output_file))) == counted
    assert len(await lines_of(storage, final.error_file)) == LINES - len(counted)


@pytest.mark.parametrize("ran", [0, 3])
async def test_a_file_that_would_be_empty_is_not_written(storage: Storage, ran: int) -> None:
    record, index = await put_batch(storage, 3)
    await append(storage, record, map(result, range(ran)))
    final = await finalizer(storage).finalize(record, index, Status.CANCELLED)
    assert (final.output_file is None, final.error_file is None) == (not ran, bool(ran))
    assert len(await lines_of(storage, final.output_file or final.error_file)) == 3


@pytest.mark.parametrize(
    ("status", "becomes"),
    [
        (Status.EXPIRED, Status.COMPLETED),
        (Status.FAILED, Status.COMPLETED),
        (Status.CANCELLED, Status.CANCELLED),
    ],
)
async def test_a_batch_that_ends_with_all_its_results_is_completed(
    storage: Storage, status: Status, becomes: Status
) -> None:
    record, index = await put_batch(storage, 2)
    await append(storage, record, map(result, range(2)))
    assert (await finalizer(storage).finalize(record, index, status)).status is becomes


@pytest.mark.promise("batch-results")
async def test_a_line_whose_result_is_lost_has_an_error(storage: Storage) -> None:
    """Its part was damaged after the log was closed."""
    record, index = await put_batch(storage, 10)
    for some in ((0, 3, 9), (1, 2, 4, 5, 6, 7, 8)):
        await append(storage, record, [result(line, good=line != 5) for line in some])
    path = f"keys/{KEY}/logs/{record.id}/00000-0000"
    await storage.objects.write(path, parts_of(b"damaged"))
    with capture_logs() as logs:
        final = await finalizer(storage).finalize(record, index, Status.COMPLETED)
    assert [one["lines"] for one in logs if "lost" in one["event"]] == [3]
    assert final.counts == Counts(10, 6, 4)
    assert numbers(await lines_of(storage, final.output_file)) == [1, 2, 4, 6, 7, 8]
    errors = await lines_of(storage, final.error_file)
    assert numbers(errors) == [0, 3, 5, 9]
    codes = [one.get("error", {}).get("code") for one in errors]
    assert codes == ["result_lost", "result_lost", None, "result_lost"]


async def test_of_two_finalizers_one_counts_and_the_files_of_the_other_are_deleted(
    storage: Storage,
) -> None:
    record, index = await put_batch(storage)
    await append(storage, record, map(result, range(0, LINES, 2)))

    ends = [finalizer(storage).finalize(record, index, Status.CANCELLED) for _ in range(2)]
    first, second = await asyncio.gather(*ends)
    assert first == second == await storage.batches.final(record)
    assert await files_of(storage) == {first.output_file, first.error_file}
    assert len(await lines_of(storage, first.output_file)) == LINES / 2


@pytest.mark.parametrize("writes", [False, True])
async def test_an_end_whose_writing_failed_leaves_the_files_that_count(
    storage: Storage, *, writes: bool
) -> None:
    """The store may have written it nevertheless."""
    record, index = await put_batch(storage, 3)
    await append(storage, record, map(result, range(3)))
    batches = Faulty(storage, writes=writes)
    ends = finalizer(storage, batches)
    for _ in range(2):
        with pytest.raises(StorageError):
            await ends.finalize(record, index, Status.COMPLETED)
    assert len(await files_of(storage)) == 2, "one of them may be the one that counts"
    kept = await storage.batches.final(record)
    assert (kept is not None) == writes
    batches.fails = False
    if kept is None:
        final = await ends.finalize(record, index, Status.COMPLETED)
    else:
        final = kept
        await ends.settle(record, final)
    assert await files_of(storage) == {final.output_file}
    assert len(await lines_of(storage, final.output_file)) == 3


@pytest.mark.parametrize("call", ["write", "read"])
async def test_a_store_that_fails_on_the_way_decides_nothing_and_leaves_no_file(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    record, index = await put_batch(storage, 4)
    await append(storage, record, [result(line, good=line != 1) for line in range(4)])
    paths: list[str] = []
    works = getattr(storage.objects, call)

    async def failing(path: str, *parts: Any) -> Any:
        paths.append(path)
        if len(paths) == 2 or path.endswith("00000-0000"):
            raise StorageError("no answer")
        return await works(path, *parts)

    ends = finalizer(storage)
    with monkeypatch.context() as patch:
        patch.setattr(storage.objects, call, failing)
        for _ in range(10):
            paths.clear()
            with pytest.raises(StorageError, match="no answer"):
                await ends.finalize(record, index, Status.COMPLETED)
    assert await storage.batches.final(record) is None
    assert await files_of(storage) == set()
    assert (await ends.finalize(record, index, Status.COMPLETED)).counts == Counts(4, 3, 1)


async def test_an_input_that_is_gone_does_not_keep_a_batch_from_ending(storage: Storage) -> None:
    record, index = await put_batch(storage, 2)
    await storage.files.delete(KEY, record.input_file)
    final = await finalizer(storage).finalize(record, index, Status.EXPIRED)
    errors = await lines_of(storage, final.error_file)
    assert [line["custom_id"] for line in errors] == ["", ""]


async def test_the_logs_of_one_key_do_not_delay_those_of_another(storage: Storage) -> None:
    """Key one has 40 logs, of which each takes long. Key two comes later, with one."""
    begun: asyncio.Queue[str] = asyncio.Queue()
    may_end = asyncio.Semaphore(0)

    class LongLog:
        closed, done = True, frozenset({0})

        def __init__(self, record: BatchRecord, _chunk: int, lines: range) -> None:
            self.lines, self._key_id = lines, record.key_id

        async def read(self) -> None:
            begun.put_nowait(self._key_id)
            await may_end.acquire()

    async def next_keys(number: int) -> list[str]:
        async with asyncio.timeout(GUARD_S):
            return [await begun.get() for _ in range(number)]

    ends = finalizer(storage, SimpleNamespace(log=LongLog))

    def finalize(record: BatchRecord, logs: int) -> asyncio.Task[Final]:
        index: Any = SimpleNamespace(chunks=[range(1)] * logs)
        return asyncio.create_task(ends.finalize(record, index, Status.COMPLETED))

    tasks = [finalize(a_batch(), 40)]
    assert await next_keys(3) == [KEY] * 3
    tasks.append(finalize(a_batch(2, key_id=OTHER_KEY), 1))
    may_end.release()
    assert OTHER_KEY in await next_keys(2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.slow
async def test_large_results_become_files_in_little_memory(storage: Storage) -> None:
    record, index = await put_batch(storage, 512)
    for chunk, lines in enumerate(index.chunks):
        log = storage.batches.log(record, chunk, lines)
        for first in range(0, 256, 8):
            some = [Result(lines[first + at], at > 0, b"x" * (MIB // 2)) for at in range(8)]
            await log.append(some, close=True)
    tracemalloc.start()
    try:
        final = await finalizer(storage).finalize(record, index, Status.COMPLETED)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    print(f"\n512 results of 512 KiB: {peak / MIB:.1f} MiB at most")
    assert final.counts == Counts(512, 448, 64)
    assert peak < 64 * MIB

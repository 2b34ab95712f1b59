"""The log of a chunk over each kind of store. `test_log_model` has the rule in every order."""

from __future__ import annotations

import asyncio
import tracemalloc
from zlib import crc32

import pytest
from structlog.testing import capture_logs

from fleetkeeper_gateway.batch.interfaces import StorageError
from fleetkeeper_gateway.batch.model import MAX_PART_BYTES, Attempt, Result, Trouble
from fleetkeeper_gateway.batch.storage import BrokenObject, Storage, chunk_log
from fleetkeeper_gateway.batch.storage.chunk_log import ChunkLog
from tests.support.batch.batch_storage import KEY, a_batch, batch_id, parts_of, paths_in, results

MIB = 1024 * 1024
LINES = range(4, 10)
FAILED = Attempt(5, Trouble.FAILED)


def path(number: int) -> str:
    return f"keys/{KEY}/logs/{batch_id(1)}/00007-{number:04}"


def a_log(storage: Storage, lines: range = LINES) -> ChunkLog:
    return storage.batches.log(a_batch(), 7, lines)


async def stored(storage: Storage, lines: range = LINES) -> tuple[ChunkLog, list[Result]]:
    """Return the log, and its results as a new reader finds them."""
    log = a_log(storage, lines)
    await log.read()
    return log, [one async for one in log.results()]


async def damage(storage: Storage, name: str) -> None:
    content = await storage.objects.read(name)
    assert content is not None
    await storage.objects.write(name, parts_of(content[:-9], b"\x07", content[-8:]))


async def test_results_are_read_in_the_order_of_their_lines(storage: Storage) -> None:
    log = a_log(storage)
    await log.read()
    assert (log.lines, log.closed, set(log.done)) == (LINES, False, set())
    assert await log.append(results([9, 4]), [FAILED]) == {4, 9}
    other = a_log(storage)
    await other.read()
    assert (set(other.done), other.troubles(5, Trouble.FAILED)) == ({4, 9}, 1)
    assert await other.append(results([8, 5, 7]), [FAILED]) == {5, 7, 8}
    # It has not read the second part.
    assert await log.append(results([8, 6, 9], b"late"), close=True) == {6}
    assert log.closed
    assert log.troubles(5, Trouble.FAILED) == 2
    assert log.troubles(5, Trouble.KILLED) == 0
    found, kept = await stored(storage)
    assert found.closed
    assert kept == [*results([4, 5]), *results([6], b"late"), *results([7, 8, 9])]
    assert (found.counts.total, found.counts.completed, found.counts.failed) == (6, 4, 2)
    assert [one async for one in found.results(ok=True)] == [one for one in kept if one.ok]
    assert [one async for one in found.results(ok=False)] == [one for one in kept if not one.ok]
    assert await paths_in(storage) == [path(number) for number in range(3)]


async def test_nothing_is_written_if_there_is_nothing(local: Storage) -> None:
    log = a_log(local)
    assert await log.append([]) == set()
    await log.append(results([4]))
    assert await log.append(results([4])) == {4}, "it is the same result"
    assert await paths_in(local) == [path(0)]
    with pytest.raises(ValueError, match="are not all in"):
        await log.append(results([3]))


async def test_a_log_is_not_closed_while_a_line_has_no_result(local: Storage) -> None:
    log = a_log(local)
    await log.append(results([4, 5]), close=True)
    assert not log.closed
    await log.append(results([6, 7, 8, 9]))
    assert not log.closed
    await log.append([], close=True)
    assert log.closed
    assert (await stored(local))[0].closed


async def test_of_writers_at_the_same_time_each_line_has_one_result(storage: Storage) -> None:
    logs = [a_log(storage) for _ in range(6)]
    counted = await asyncio.gather(
        *(log.append(results(LINES, b"of %d" % at), close=True) for at, log in enumerate(logs))
    )
    assert sorted(line for one in counted for line in one) == list(LINES)
    found, kept = await stored(storage)
    assert found.closed
    assert [one.line for one in kept] == list(LINES)
    assert all(log.closed for log in logs)


async def test_calls_on_one_log_take_turns(local: Storage) -> None:
    log = a_log(local)
    counted = await asyncio.gather(*(log.append(results([line])) for line in LINES))
    assert counted == [{line} for line in LINES]
    assert len((await stored(local))[1]) == len(LINES)


async def test_a_part_that_is_damaged_counts_as_empty_for_all(storage: Storage) -> None:
    log = a_log(storage)
    await log.append(results([4, 5]), [FAILED])
    await log.append(results(range(6, 10)), close=False)
    original = await storage.objects.read(path(0))
    assert original is not None
    await damage(storage, path(0))
    with capture_logs() as logs:
        found, kept = await stored(storage)
    assert [one["path"] for one in logs] == [path(0)]
    assert kept == results(range(6, 10))
    assert found.troubles(5, Trouble.FAILED) == 0
    assert await storage.objects.read(path(0) + ".damaged") == b""
    # Also for those who would read it well.
    await storage.objects.write(path(0), parts_of(original))
    assert (await stored(storage))[1] == kept
    # And for those who did, before they close the log.
    assert await log.append([], close=True) == set()
    assert not log.closed
    assert set(log.done) == set(range(6, 10))
    assert await log.append(results([4, 5], b"again"), close=True) == {4, 5}
    assert (await stored(storage))[1] == [*results([4, 5], b"again"), *results(range(6, 10))]


async def test_a_part_of_a_later_version_stops_all(local: Storage) -> None:
    content = b"FKC9"
    checksum = crc32(content).to_bytes(4, "little")
    await local.objects.create(path(0), content + checksum)
    for call in (a_log(local).read(), a_log(local).append(results([4]))):
        with pytest.raises(BrokenObject, match="begins with b'FKC9'"):
            await call
    assert await paths_in(local) == [path(0)]


@pytest.mark.parametrize("reads_between", [False, True])
async def test_what_was_written_without_an_answer_counts_once(
    local: Storage, monkeypatch: pytest.MonkeyPatch, reads_between: bool
) -> None:
    create = local.objects.create

    async def lost(name: str, data: bytes) -> bool:
        await create(name, data)
        raise StorageError("no answer")

    log = a_log(local)
    with monkeypatch.context() as patch:
        patch.setattr(local.objects, "create", lost)
        with pytest.raises(StorageError):
            await log.append(results([4]), [FAILED])
    if reads_between:
        await log.read()
    assert await log.append(results([4, 6]), [FAILED, Attempt(7, Trouble.KILLED)]) == {4, 6}
    found, kept = await stored(local)
    assert kept == results([4, 6])
    assert found.troubles(5, Trouble.FAILED) == 1
    assert found.troubles(7, Trouble.KILLED) == 1
    # A second attempt counts.
    await log.append([], [FAILED])
    assert (await stored(local))[0].troubles(5, Trouble.FAILED) == 2


async def test_a_call_that_failed_half_way_is_repeated(
    local: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_log, "MAX_PART_BYTES", 200)
    create = local.objects.create
    names: list[str] = []

    async def full(name: str, data: bytes) -> bool:
        names.append(name)
        if len(names) == 2:
            raise StorageError("the disk is full")
        return await create(name, data)

    log = a_log(local)
    some = results(LINES, b"x" * 50)
    monkeypatch.setattr(local.objects, "create", full)
    with pytest.raises(StorageError):
        await log.append(some, [FAILED, FAILED], close=True)
    assert await log.append(some, [FAILED, FAILED], close=True) == set(LINES)
    found, kept = await stored(local)
    assert kept == some
    assert found.troubles(5, Trouble.FAILED) == log.troubles(5, Trouble.FAILED) == 2
    assert len(await paths_in(local)) > 2


async def test_two_writers_that_note_the_same_attempt_note_two(local: Storage) -> None:
    """Their parts have the same bytes."""
    first, second = a_log(local), a_log(local)
    for log in (first, second):
        await log.read()
    for log in (first, second):
        await log.append([], [FAILED])
    assert (await stored(local))[0].troubles(5, Trouble.FAILED) == 2


async def test_a_part_that_changes_after_it_was_read_is_noticed(local: Storage) -> None:
    log = a_log(local)
    await log.append(results(LINES), close=True)
    await damage(local, path(0))
    with pytest.raises(StorageError, match="has changed"):
        _ = [one async for one in log.results()]


async def test_large_results_are_in_parts_of_16_mib(local: Storage) -> None:
    size = 5 * MIB
    some = [Result(line, True, bytes([line]) * size) for line in LINES]
    log = a_log(local)
    assert await log.append(some, [FAILED], close=True) == set(LINES)
    listed = await local.objects.list("keys/")
    assert [one.path for one in listed] == [path(0), path(1)]
    assert all(one.bytes <= MAX_PART_BYTES for one in listed)
    found, kept = await stored(local)
    assert (found.closed, found.troubles(5, Trouble.FAILED)) == (True, 1)
    assert kept == some


@pytest.mark.slow
async def test_256_results_of_1_mib_are_read_in_little_memory(local: Storage) -> None:
    lines = range(256)
    log = a_log(local, lines)
    for first in range(0, 256, 16):
        # Not in the order of the lines: 16 lines of 16 parts follow one another.
        some = range(first // 16, 256, 16)
        await log.append([Result(line, True, bytes([line]) * MIB) for line in some])
    await log.append([], close=True)
    tracemalloc.start()
    try:
        found = a_log(local, lines)
        await found.read()
        count = 0
        async for one in found.results():
            assert (one.line, len(one.text), one.text[0]) == (count, MIB, count)
            count += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    print(f"\n256 results of 1 MiB: {peak / MIB:.1f} MiB at most")
    assert count == 256
    assert peak < 3 * MAX_PART_BYTES

"""One behaviour of every store: a directory, a bucket of S3, a bucket of Google."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from fleetkeeper_gateway.batch.interfaces import ObjectMissing, StorageError
from fleetkeeper_gateway.batch.storage import Storage
from tests.support.batch.batch_storage import parts_of, paths_in

MIB = 1024 * 1024


async def test_only_one_of_many_creates_an_object(storage: Storage) -> None:
    """Whether their contents differ or not."""
    contents = [b"", *[b"writer %d" % (number // 2) for number in range(10)]]
    created = await asyncio.gather(
        *(storage.objects.create("keys/a/one", content) for content in contents)
    )
    assert created.count(True) == 1
    assert await storage.objects.read("keys/a/one") == contents[created.index(True)]


async def test_what_is_not_there(storage: Storage) -> None:
    assert await storage.objects.read("keys/a/none") is None
    assert await storage.objects.list("keys/none/") == []
    assert await storage.objects.children("keys/none/") == []
    with pytest.raises(ObjectMissing, match=r"/keys/a/none: it does not exist"):
        await storage.objects.read_range("keys/a/none", 0, 1)
    with pytest.raises(ObjectMissing):
        await anext(storage.objects.stream("keys/a/none"))
    await storage.objects.create("keys/a/some", b"x")
    await storage.objects.delete(["keys/a/none", "keys/a/some", "keys/b/none"])
    assert await paths_in(storage) == []
    assert await storage.objects.create("keys/a/empty", b"")
    assert await storage.objects.read("keys/a/empty") == b""
    assert [part async for part in storage.objects.stream("keys/a/empty")] == []


@pytest.mark.parametrize("size", [0, 1, 4 * MIB, 21 * MIB + 7])
async def test_an_object_of_any_size_is_streamed(storage: Storage, size: int) -> None:
    """Beyond 8 MiB it is uploaded in parts, beyond 4 MiB it is read in parts."""
    content = (b"0123456789abcdef" * (size // 16 + 1))[:size]

    async def parts() -> AsyncIterator[bytes]:
        for first in range(0, size, 300_001):
            yield content[first : first + 300_001]

    assert await storage.objects.write("keys/a/large", parts()) == size
    assert b"".join([part async for part in storage.objects.stream("keys/a/large")]) == content
    (found,) = await storage.objects.list("keys/")
    assert (found.path, found.bytes) == ("keys/a/large", size)
    if size > 10:
        assert await storage.objects.read_range("keys/a/large", size - 7, 7) == content[-7:]
        assert await storage.objects.read_range("keys/a/large", 5, 4) == content[5:9]
        assert await storage.objects.read_range("keys/a/large", 5, 0) == b""
        for offset in (size - 7, size):
            with pytest.raises(StorageError):
                await storage.objects.read_range("keys/a/large", offset, 8)


@pytest.mark.parametrize("size", [10, 10 * MIB])
@pytest.mark.parametrize("problem", [ConnectionResetError, asyncio.CancelledError])
async def test_a_write_that_its_source_ends_leaves_nothing(
    storage: Storage, size: int, problem: type[BaseException]
) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"x" * size
        raise problem

    with pytest.raises(problem):
        await storage.objects.write("keys/a/cut", parts())
    assert await paths_in(storage) == []


async def test_a_write_replaces(storage: Storage) -> None:
    """Whoever finalizes a batch again writes the same output file again."""
    await storage.objects.write("keys/a/out", parts_of(b"first"))
    await storage.objects.write("keys/a/out", parts_of(b"sec", b"", b"ond"))
    assert await storage.objects.read("keys/a/out") == b"second"


async def test_lists_are_sorted_and_complete(storage: Storage) -> None:
    """A page of the bucket has 7 objects."""
    names = [f"keys/a/{number:02}/x" for number in range(25)] + ["keys/b/x", "keys/a.b/y"]
    await asyncio.gather(*(storage.objects.create(name, b"1") for name in names))
    assert await paths_in(storage) == sorted(names)
    assert await paths_in(storage, "keys/a/") == sorted(names)[1:26]
    assert await storage.objects.children("keys/") == ["a", "a.b", "b"]


async def test_many_objects_are_deleted(storage: Storage) -> None:
    names = [f"keys/a/{number}" for number in range(30)]
    await asyncio.gather(*(storage.objects.create(name, b"1") for name in names))
    await storage.objects.delete(names[:-1])
    assert await paths_in(storage) == names[-1:]
    await storage.objects.delete(iter(names))
    assert await paths_in(storage) == []


async def test_a_store_that_can_be_used_says_so(storage: Storage) -> None:
    await storage.check()
    assert await storage.objects.list("check/") == []

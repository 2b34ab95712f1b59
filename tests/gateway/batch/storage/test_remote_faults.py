"""Buckets that fail: slow, with errors, without an answer, or with one that is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from fleetkeeper_gateway.batch.interfaces import StorageError
from fleetkeeper_gateway.batch.storage import Storage, StoreRefused, create_storage
from fleetkeeper_gateway.batch.storage.remote import RemoteObjects
from fleetkeeper_gateway.batch.storage.stores import CREATED_AT_ONCE
from tests.support.batch.batch_storage import parts_of, settings
from tests.support.guards import GUARD_S
from tests.support.services.bucket_server import BUCKET, PREFIX, BucketServer, Fault

MIB = 1024 * 1024
SHORT_S = 0.3
NAME = f"{PREFIX}/keys/a/one"

Make = Callable[[float], Storage]


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.RESET_AFTER])
@pytest.mark.parametrize("times", [1, 2])
async def test_who_wrote_an_object_knows_it_although_no_answer_says_so(
    remote: Make, bucket: BucketServer, fault: Fault, times: int
) -> None:
    bucket.fail("PUT", fault, times=times)
    objects = remote(GUARD_S).objects
    assert await objects.create("keys/a/one", b"mine")
    assert bucket.objects[NAME].data == b"mine"
    assert not await objects.create("keys/a/one", b"mine")


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.RESET_AFTER, Fault.ERROR, Fault.RESET])
async def test_who_did_not_write_an_object_knows_it_too(
    remote: Make, bucket: BucketServer, fault: Fault
) -> None:
    """Also if the contents are equal: two finalizers may write the same bytes."""
    first, second = remote(GUARD_S).objects, remote(GUARD_S).objects
    assert await first.create("keys/a/one", b"same")
    bucket.fail("PUT", fault)
    assert not await second.create("keys/a/one", b"same")


@pytest.mark.parametrize("times", [1, 2])
async def test_a_create_that_met_another_one_is_tried_again(
    remote: Make, bucket: BucketServer, times: int
) -> None:
    """S3 answers 409 to both, or the other one was deleted: then nobody has written the object."""
    objects = remote(GUARD_S).objects
    bucket.fail("PUT", Fault.CONFLICT, times=times)
    assert await objects.create("keys/a/one", b"mine")
    bucket.fail("PUT", Fault.CONFLICT)
    assert not await objects.create("keys/a/one", b"late")
    assert bucket.objects[NAME].data == b"mine"


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.RESET])
async def test_what_failed_is_tried_again(remote: Make, bucket: BucketServer, fault: Fault) -> None:
    objects = remote(GUARD_S).objects
    bucket.fail("PUT", fault)
    assert await objects.create("keys/a/one", b"mine")
    for method in ("GET", "HEAD"):
        bucket.fail(method, fault)
    assert await objects.read("keys/a/one") == b"mine"
    assert [part async for part in objects.stream("keys/a/one")] == [b"mine"]
    bucket.fail("GET", fault)
    assert len(await objects.list("keys/")) == 1


async def test_a_create_that_is_not_answered_is_asked_for(
    remote: Make, bucket: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[asyncio.Timeout] = []
    timeout = asyncio.timeout

    def noted(delay: float | None) -> asyncio.Timeout:
        limits.append(timeout(delay))
        return limits[-1]

    objects = remote(GUARD_S).objects
    bucket.fail("PUT", Fault.SILENT)
    monkeypatch.setattr(asyncio, "timeout", noted)
    task = asyncio.create_task(objects.create("keys/a/one", b"mine"))
    await bucket.silenced.wait()
    limits[0].reschedule(asyncio.get_running_loop().time())
    assert await task
    assert limits[0].expired()
    assert not await objects.create("keys/a/one", b"mine")


async def test_a_create_whose_outcome_stays_unknown_fails(
    remote: Make, bucket: BucketServer
) -> None:
    bucket.fail("PUT", Fault.LOST)
    bucket.fail("HEAD", Fault.ERROR, times=1000)
    with pytest.raises(StorageError, match=r"/keys/a/one: "):
        await remote(SHORT_S).objects.create("keys/a/one", b"mine")


CALLS: dict[str, Callable[[RemoteObjects], Awaitable[object]]] = {
    "read": lambda objects: objects.read("keys/a/one"),
    "read a part": lambda objects: objects.read_range("keys/a/one", 0, 1),
    "stream": lambda objects: anext(objects.stream("keys/a/one")),
    "list": lambda objects: objects.list("keys/"),
    "list folders": lambda objects: objects.children("keys/"),
    "create": lambda objects: objects.create("keys/a/two", b"x"),
    "write": lambda objects: objects.write("keys/a/two", parts_of(b"x")),
    "write in parts": lambda objects: objects.write("keys/a/two", parts_of(b"x" * 9 * MIB)),
    "delete": lambda objects: objects.delete(["keys/a/one"]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("fault", [Fault.SILENT, Fault.ERROR, Fault.RESET])
async def test_a_store_that_stays_down_gives_an_error_with_the_place(
    remote: Make,
    bucket: BucketServer,
    call: Callable[[RemoteObjects], Awaitable[object]],
    fault: Fault,
) -> None:
    objects = remote(SHORT_S).objects
    assert isinstance(objects, RemoteObjects)
    for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
        bucket.fail(method, fault, times=1000)
    with pytest.raises(StorageError) as caught:
        async with asyncio.timeout(GUARD_S):
            await call(objects)
    assert f"://{BUCKET}/{PREFIX}/keys/" in str(caught.value)
    assert "secret-of-a-test" not in str(caught.value)


async def test_a_refusal_says_what_to_do(remote: Make, bucket: BucketServer) -> None:
    for method in ("PUT", "GET", "HEAD"):
        bucket.fail(method, Fault.FORBIDDEN, times=1000)
    with pytest.raises(StorageError, match="check the credentials"):
        await remote(GUARD_S).objects.read("keys/a/one")
    with pytest.raises(StorageError, match="check the credentials"):
        await remote(GUARD_S).check()


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.usefixtures("bucket")
async def test_a_bucket_that_does_not_exist_is_no_empty_one(scheme: str) -> None:
    objects = create_storage(settings(f"{scheme}://elsewhere")).objects
    with pytest.raises(StorageError, match="create the bucket"):
        await objects.read("keys/a/one")
    with pytest.raises(StorageError, match="create the bucket"):
        await objects.list("keys/")


async def test_a_store_that_replaces_what_exists_is_refused(
    remote: Make, bucket: BucketServer
) -> None:
    bucket.replaces = True
    with pytest.raises(StoreRefused, match="If-None-Match"):
        await remote(GUARD_S).check()
    assert not bucket.objects


async def test_a_store_that_lets_several_create_an_object_is_refused(
    local: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks first and writes then, so it refuses what comes later only."""
    exist: set[str] = set()
    waiting: list[str] = []
    all_came = asyncio.Event()

    async def create(path: str, data: bytes) -> bool:
        is_new = path not in exist
        waiting.append(path)
        if len(waiting) == CREATED_AT_ONCE:
            all_came.set()
        await asyncio.wait_for(all_came.wait(), GUARD_S)
        exist.add(path)
        await local.objects.write(path, parts_of(data))
        return is_new

    monkeypatch.setattr(local.objects, "create", create)
    with pytest.raises(StoreRefused, match="If-None-Match"):
        await local.check()
    assert await local.objects.list("check/") == []


async def test_an_upload_that_fails_is_ended(remote: Make, bucket: BucketServer) -> None:
    """Its parts would stay in the bucket and cost money."""

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"x" * MIB
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await remote(GUARD_S).objects.write("keys/a/large", parts())
    assert any("uploads" in one for one in bucket.requests)
    assert not bucket.uploads
    assert not bucket.objects


async def test_an_upload_survives_errors_of_its_parts(remote: Make, bucket: BucketServer) -> None:
    bucket.fail("PUT", Fault.ERROR, part="partNumber=2")
    bucket.fail("PUT", Fault.RESET_AFTER, part="partNumber=1")
    content = bytes(range(256)) * 4096 * 20
    await remote(GUARD_S).objects.write("keys/a/one", parts_of(content))
    assert bucket.objects[NAME].data == content


async def test_a_slow_reader_has_all_the_time(remote: Make) -> None:
    """Each part is a call of its own: a client may take longer for all than one call may."""
    objects = remote(GUARD_S).objects
    await objects.write("keys/a/one", parts_of(b"x" * 9 * MIB))
    stream = objects.stream("keys/a/one")
    await anext(stream)
    # What was begun before does not end with this limit.
    objects._timeout_s = GUARD_S * 2
    assert sum([len(part) async for part in stream]) == 5 * MIB


@pytest.mark.parametrize(
    "store",
    [
        "",
        "s3:///x",
        "s3://user:secret@bucket/x",
        "http://bucket/x",
        "file://host/x",
        "file:///",
        "file:relative",
        "s3://bucket/a/../b",
        "s3://bucket/a//b",
        "s3://bucket/x?secret=1",
    ],
)
def test_settings_that_name_no_store_are_refused(store: str) -> None:
    values = settings("file:///x").model_copy(update={"batch_store": store})
    with pytest.raises(StoreRefused, match="FLEETKEEPER_GATEWAY_BATCH_STORE") as caught:
        create_storage(values)
    assert "secret" not in str(caught.value)

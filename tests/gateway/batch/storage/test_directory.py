"""A directory: a write that returned is durable, one that did not leaves nothing, one process has it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from fleetkeeper_gateway.batch.interfaces import StorageError
from fleetkeeper_gateway.batch.storage import Storage, StoreRefused, create_storage
from fleetkeeper_gateway.batch.storage.local import THREADS, LocalObjects
from tests.support.batch.batch_api import until
from tests.support.batch.batch_storage import files_in, parts_of, paths_in, settings
from tests.support.guards import GUARD_S

MIB = 1024 * 1024
PATH = "keys/a/files/one"


class Syncs:
    """What was synced, in order, and whether the object had its name then."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._fsync = os.fsync
        self.events: list[tuple[str, bool]] = []
        self.held: threading.Event | None = None
        self.began = threading.Event()

    def __call__(self, descriptor: int) -> None:
        """Note it, and sync."""
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        self.events.append((path, self._target.exists()))
        self.began.set()
        if self.held is not None:
            assert self.held.wait(GUARD_S)
        self._fsync(descriptor)


def _wait_for_threads(storage: Storage) -> None:
    """Wait until what was given up is tidied. The store takes no more writes."""
    assert isinstance(storage.objects, LocalObjects)
    storage.objects._threads.shutdown(wait=True)


@pytest.fixture
def syncs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Syncs:
    """The syncs of the object at `PATH`."""
    found = Syncs(directory / PATH)
    monkeypatch.setattr(os, "fsync", found)
    return found


@pytest.mark.parametrize("how", ["create", "write"])
async def test_bytes_are_synced_before_the_name_and_the_name_before_the_return(
    local: Storage, directory: Path, syncs: Syncs, how: str
) -> None:
    if how == "create":
        assert await local.objects.create(PATH, b"content")
    else:
        await local.objects.write(PATH, parts_of(b"con", b"tent"))
    (first, named), *folders, last = syncs.events
    assert Path(first).parent == directory / "staging"
    assert not named
    # Each folder that was made is a name in the one above.
    assert folders == [
        (str(folder), False) for folder in (directory, directory / "keys", directory / "keys/a")
    ]
    assert last == (str(directory / "keys/a/files"), True)


async def test_a_name_that_another_process_gave_is_synced_too(
    local: Storage, directory: Path, syncs: Syncs
) -> None:
    (directory / PATH).parent.mkdir(parents=True)
    (directory / PATH).write_bytes(b"theirs")
    assert not await local.objects.create(PATH, b"ours")
    assert syncs.events[-1] == (str(directory / "keys/a/files"), True)


async def test_a_link_that_is_reported_as_failed_is_ours(
    local: Storage, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system repeats the request after its answer was lost, and finds our own link."""
    link = Path.hardlink_to

    def twice(self: Path, target: Path) -> None:
        link(self, target)
        link(self, target)

    monkeypatch.setattr(Path, "hardlink_to", twice)
    assert await local.objects.create(PATH, b"ours")
    assert not await local.objects.create(PATH, b"ours")


@pytest.mark.parametrize("how", ["create", "write"])
async def test_a_disk_that_hangs_ends_the_call_and_nothing_comes_later(
    local: Storage, directory: Path, syncs: Syncs, how: str
) -> None:
    syncs.held = threading.Event()
    objects = local.objects
    objects._timeout_s = 0.5
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "create": lambda: objects.create(PATH, b"late"),
        "write": lambda: objects.write(PATH, parts_of(b"late")),
    }
    with pytest.raises(StorageError, match=rf"cannot {how} .*/{PATH}: no answer in 0.5 s"):
        await calls[how]()
    syncs.held.set()
    _wait_for_threads(local)
    assert files_in(directory) == ["lock"]


async def test_an_object_without_bytes_leaves_no_staged_file(
    local: Storage, directory: Path
) -> None:
    await local.objects.write(PATH, parts_of())
    _wait_for_threads(local)
    assert files_in(directory) == [PATH, "lock"]


@pytest.mark.parametrize("how", ["create", "write"])
async def test_calls_that_time_out_while_all_threads_hang_leave_nothing_in_the_queue(
    local: Storage, directory: Path, how: str
) -> None:
    """Otherwise each try on a volume that hangs would leave its bytes in memory."""
    objects = local.objects
    assert isinstance(objects, LocalObjects)
    held, begun = threading.Event(), threading.Barrier(THREADS + 1)

    def hang() -> None:
        begun.wait(GUARD_S)
        held.wait(GUARD_S)

    objects._timeout_s = GUARD_S
    hangs = [asyncio.create_task(objects._in_thread("hold", PATH, hang)) for _ in range(THREADS)]
    await asyncio.to_thread(begun.wait, GUARD_S)
    # Those who gave up leave the threads taken.
    for one in hangs:
        one.cancel()
    await asyncio.wait(hangs)
    objects._timeout_s = 0.01
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "create": lambda: objects.create(PATH, b"x" * MIB),
        "write": lambda: objects.write(PATH, parts_of(b"x" * MIB)),
    }
    for _ in range(50):
        with pytest.raises(StorageError, match=rf"cannot {how} .*: no answer in 0.01 s"):
            await calls[how]()
    assert objects._threads._work_queue.qsize() == 0
    held.set()
    objects._timeout_s = GUARD_S
    assert await objects.create(PATH, b"x")
    _wait_for_threads(local)
    assert files_in(directory) == [PATH, "lock"]


async def test_empty_folders_go_with_their_last_object(local: Storage, directory: Path) -> None:
    """Who removes them does not disturb those who put something there."""

    async def one(number: int) -> None:
        for turn in range(20):
            path = f"keys/a/b/{number}-{turn}"
            assert await local.objects.create(path, b"x")
            await local.objects.delete([path])

    await local.objects.create("keys/a/one", b"1")
    await asyncio.gather(*(one(number) for number in range(8)))
    assert not (directory / "keys/a/b").exists()
    await local.objects.delete(["keys/a/one"])
    assert not (directory / "keys").exists()


async def test_a_directory_that_is_gone_is_not_made_again(local: Storage, directory: Path) -> None:
    """Most likely its volume is not mounted any more."""
    os.rename(directory, directory.with_name("elsewhere"))  # noqa: PTH104 - nothing else runs
    with pytest.raises(StorageError, match=r"cannot create .*keys/a/files/one: "):
        await local.objects.create(PATH, b"x")
    assert os.listdir(directory.parent) == ["elsewhere"]  # noqa: PTH208


# -- a process that is killed ---------------------------------------------------------------------

_WRITER = """
import asyncio, sys
from fleetkeeper_gateway.batch.storage import create_storage
from tests.support.batch.batch_storage import parts_of, settings

async def write() -> None:
    storage = create_storage(settings(sys.argv[1]))
    for number in range(1_000_000):
        content = (b"%d " % number) * 20_000
        await storage.objects.create(f"keys/a/created/{number}", content)
        await storage.objects.write(f"keys/a/written/{number}", parts_of(content, content))
        print(number, flush=True)

asyncio.run(write())
"""


async def test_a_killed_process_leaves_what_it_wrote_and_no_halves(directory: Path) -> None:
    url = f"file://{directory}"
    with subprocess.Popen(  # noqa: ASYNC220 - nothing else runs in the loop
        [sys.executable, "-c", _WRITER, url], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        for _ in range(25):
            lines = writer.stdout.readline()
        writer.kill()
        lines += writer.stdout.read()
    count = int(lines.split()[-1]) + 1
    # The kernel gave the lock back.
    storage = create_storage(settings(url))
    found = {one.path: one.bytes for one in await storage.objects.list("keys/")}
    for path in found:
        _, _, how, number = path.split("/")
        content = (b"%d " % int(number)) * 20_000 * (2 if how == "written" else 1)
        assert await storage.objects.read(path) == content
    for turn in range(count):
        assert {f"keys/a/created/{turn}", f"keys/a/written/{turn}"} <= set(found)
    storage.close()


# -- a disk that is full --------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)],
        check=False,
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"this machine lets nobody mount: {mounted.stderr}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


async def test_a_full_disk_fails_the_write_and_keeps_the_rest(small_disk: Path) -> None:
    with closing(create_storage(settings(f"file://{small_disk}/store"))) as storage:
        assert await storage.objects.create("keys/a/one", b"1" * 1000)
        with pytest.raises(StorageError, match=r"keys/a/two: No space left on device; free some"):
            await storage.objects.create("keys/a/two", b"2" * 2 * MIB)
        with pytest.raises(StorageError, match=r"keys/a/three: No space left on device; free some"):
            await storage.objects.write("keys/a/three", parts_of(*[b"3" * 100_000] * 20))
        assert await paths_in(storage) == ["keys/a/one"]
        assert await storage.objects.read("keys/a/one") == b"1" * 1000
        # What failed gives its space back, in a thread that nobody waits for.
        await until(lambda: not files_in(small_disk / "store/staging"))
        assert await storage.objects.create("keys/a/two", b"2" * 500_000)
        _wait_for_threads(storage)
        assert files_in(small_disk / "store/staging") == []


# -- one process ----------------------------------------------------------------------------------


_RACER = """
import asyncio, sys
from fleetkeeper_gateway.batch.storage import create_storage
from tests.support.batch.batch_storage import settings

async def race() -> None:
    storage = create_storage(settings(sys.argv[1], batch_store_shared=True))
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(100):
        if await storage.objects.create(f"keys/a/{number}", sys.argv[2].encode()):
            print(number)
        # Folders come and go under the others' hands.
        await storage.objects.create(f"keys/b/c/{sys.argv[2]}", b"")
        await storage.objects.delete([f"keys/b/c/{sys.argv[2]}"])
    storage.close()

asyncio.run(race())
"""


def test_of_processes_that_share_a_directory_one_creates_an_object(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    with ExitStack() as stack:
        racers = []
        for name in range(3):
            command = [sys.executable, "-c", _RACER, url, str(name)]
            pipe = subprocess.PIPE
            racer = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
            racers.append(stack.enter_context(racer))
            stack.callback(racer.kill)
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        wins = []
        for name, racer in enumerate(racers):
            out, _ = racer.communicate(timeout=GUARD_S)
            assert racer.returncode == 0
            wins += [(int(number), str(name)) for number in out.split()]
    assert sorted(number for number, _ in wins) == list(range(100))
    for number, owner in wins:
        assert (tmp_path / f"keys/a/{number}").read_text() == owner


@pytest.mark.promise("batch-volumes")
def test_a_second_process_is_refused_with_words(local: Storage, directory: Path) -> None:
    own = settings(f"file://{directory}")
    with pytest.raises(StoreRefused, match=f"another process uses {directory}") as caught:
        create_storage(own)
    assert "FLEETKEEPER_GATEWAY_BATCH_STORE_SHARED=true" in str(caught.value)
    local.close()
    create_storage(own).close()


def test_a_directory_that_cannot_be_used_is_refused_with_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    (tmp_path / "file").write_text("")
    with pytest.raises(StoreRefused, match="Not a directory"):
        create_storage(settings(f"file://{tmp_path}/file/store"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreRefused, match="No locks available"):
        create_storage(settings(f"file://{tmp_path}/store"))

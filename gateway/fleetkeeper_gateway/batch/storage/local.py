"""Writes objects to a directory: a volume of one process, or a shared volume."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import structlog
from obstore.store import LocalStore

from fleetkeeper_gateway.batch.storage import durable
from fleetkeeper_gateway.batch.storage.errors import StoreRefused, reason_of
from fleetkeeper_gateway.batch.storage.objects import DELETE, ReadableObjects
from fleetkeeper_gateway.batch.storage.paths import STAGING, checked

log = structlog.get_logger(__name__)

T = TypeVar("T")

THREADS: Final = 8
LOCK: Final = "lock"
"""File on which the process holds a lock."""


class LocalObjects(ReadableObjects):
    """Objects in files. Bytes and names are synced before a write returns."""

    def __init__(self, root: Path, timeout_s: float, *, shared: bool) -> None:
        """Create the directory if it is missing, and lock it if it is not shared.

        Raises:
            OSError: if it cannot be created.
            StoreRefused: if another process has locked it, or the file system has no locks.
        """
        durable.make_folders(root / STAGING)
        # Links are resolved, as in obstore.
        self._root = root.resolve(strict=True)
        self._lock = None if shared else _locked(self._root)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="batch-store")
        self._free = asyncio.Semaphore(THREADS)
        """Free threads. A call waits here and not in the threads' queue, so that a timeout leaves no bytes there."""
        super().__init__(LocalStore(self._root), f"file://{self._root}", timeout_s)

    async def create(self, path: str, data: bytes) -> bool:
        """Create an object. Return False if it exists already, from any writer."""
        with self._staged(path) as staged:
            await self._in_thread("create", path, partial(staged.append, data), staged)
            publish = partial(staged.publish, path, replace=False)
            return await self._in_thread("create", path, publish, staged)

    async def write(self, path: str, parts: AsyncIterator[bytes]) -> int:
        """Write an object of any size, part by part. Return its size in bytes."""
        with self._staged(path) as staged:
            async for part in parts:
                await self._in_thread("write", path, partial(staged.append, part), staged)
            publish = partial(staged.publish, path, replace=True)
            await self._in_thread("write", path, publish, staged)
        return staged.bytes

    async def delete(self, paths: Iterable[str]) -> None:
        """Delete objects. Missing objects are ignored."""
        some = [checked(path) for path in paths]
        if some:
            await self._in_thread(DELETE, some[0], partial(durable.delete, self._root, some))

    def close(self) -> None:
        """End the threads, and release the directory."""
        self._threads.shutdown(wait=False)
        if self._lock is not None:
            self._lock.close()

    @contextmanager
    def _staged(self, path: str) -> Iterator[durable.StagedFile]:
        """Create a file, and remove it at the end if it has no name."""
        checked(path)
        staged = durable.StagedFile(self._root)
        try:
            yield staged
        finally:
            # Otherwise a thread that hangs could create the object after the caller has given up.
            staged.given_up = True
            if staged.begun:
                # Not awaited: on a hung disk, this call hangs too.
                self._threads.submit(self._discard, staged, path)

    @staticmethod
    def _discard(staged: durable.StagedFile, path: str) -> None:
        try:
            staged.discard()
        except OSError as error:
            # The sweeper deletes the file later, by its age.
            log.warning("an unfinished file was not deleted", path=path, error=reason_of(error))

    async def _in_thread(
        self,
        what: str,
        path: str,
        call: Callable[[], T],
        staged: durable.StagedFile | None = None,
    ) -> T:
        async with self._limited(what, path):
            await self._free.acquire()
            if staged is not None:
                staged.begun = True
            done = asyncio.get_running_loop().run_in_executor(self._threads, call)
            done.add_done_callback(self._ended)
            # After a timeout, the thread stays busy until its call ends.
            return await asyncio.shield(done)

    def _ended(self, done: asyncio.Future[T]) -> None:
        self._free.release()
        # The caller may have timed out. Retrieve the exception, or asyncio logs that it was not retrieved.
        if not done.cancelled():
            done.exception()


def _locked(root: Path) -> BinaryIO:
    """Lock a directory for this process. The kernel releases the lock when the process ends.

    Raises:
        StoreRefused: if another process has locked it, or the file system has no locks.
    """
    # Kept open: closing the file releases the lock.
    file = (root / LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise StoreRefused(
            f"another process uses {root}: a directory of its own serves a single replica. Run one, "
            "with the strategy Recreate; or let all replicas mount the same volume and set "
            "FLEETKEEPER_GATEWAY_BATCH_STORE_SHARED=true; or use s3:// or gs://"
        ) from error
    except OSError as error:
        file.close()
        raise StoreRefused(
            f"{root} cannot be locked: {reason_of(error)}. Use a volume of another kind; or, if it is "
            "one that all replicas share, set FLEETKEEPER_GATEWAY_BATCH_STORE_SHARED=true"
        ) from error
    return file

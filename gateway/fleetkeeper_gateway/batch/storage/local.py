"""Writing to a directory: a volume of one process, or one that processes share."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import structlog
from obstore.store import LocalStore

from fleetkeeper_gateway.batch.storage.durable import Directory, StagedFile
from fleetkeeper_gateway.batch.storage.errors import StoreRefused, reason_of
from fleetkeeper_gateway.batch.storage.objects import ReadableObjects
from fleetkeeper_gateway.batch.storage.paths import checked

log = structlog.get_logger(__name__)

T = TypeVar("T")

THREADS: Final = 8
LOCK: Final = "lock"
"""File that the process holds a lock on."""


class LocalObjects(ReadableObjects):
    """Objects in files. Bytes and names are synced before a write returns."""

    def __init__(self, root: Path, timeout_s: float) -> None:
        """Make the directory if it is missing. Raise `OSError` if that fails."""
        self._directory = Directory(root)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="batch-store")
        super().__init__(LocalStore(root), f"file://{root}", timeout_s)

    async def create(self, path: str, data: bytes) -> bool:
        """Write an object that must not exist. Return False if it does, whoever wrote it."""
        checked(path)
        staged = StagedFile(self._directory)
        try:
            return await self._in_thread("create", path, lambda: staged.create(path, data))
        finally:
            # Otherwise a thread that hangs would make the object exist after the caller has given up.
            staged.given_up = True

    async def write(self, path: str, parts: AsyncIterator[bytes]) -> int:
        """Write an object of any size, part by part. Return its bytes."""
        checked(path)
        staged = StagedFile(self._directory)
        try:
            async for part in parts:
                await self._in_thread("write", path, partial(staged.append, part))
            await self._in_thread("write", path, lambda: staged.publish(path, replace=True))
        finally:
            staged.given_up = True
            # Not awaited: on a disk that hangs, this hangs too.
            self._threads.submit(self._discard, staged, path)
        return staged.bytes

    async def delete(self, paths: Iterable[str]) -> None:
        """Delete objects. Those that do not exist are ignored."""
        some = [checked(path) for path in paths]
        if some:
            await self._in_thread("delete", some[0], lambda: self._directory.delete(some))

    async def clear_staging(self, older_than: float) -> int:
        """Delete what writers that ended left behind, by Unix seconds. Return the number of files."""
        return await self._in_thread(
            "clear", "staging", lambda: self._directory.clear_staging(older_than)
        )

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False)

    @staticmethod
    def _discard(staged: StagedFile, path: str) -> None:
        try:
            staged.discard()
        except OSError as error:
            # It is deleted later, by its age.
            log.warning("an unfinished file was not deleted", path=path, error=reason_of(error))

    async def _in_thread(self, what: str, path: str, call: Callable[[], T]) -> T:
        async with self._limited(what, path):
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)


class DirectoryLock:
    """The right of one process to use a directory. The kernel ends it with the process."""

    def __init__(self, root: Path) -> None:
        """Take it.

        Raises:
            StoreRefused: if another process has it, or the file system has no locks.
        """
        # Kept open: closing it gives the lock back.
        self._file = (root / LOCK).open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise StoreRefused(
                f"another process uses {root}: a directory of its own serves a single replica. Run one, "
                "with the strategy Recreate; or let all replicas mount the same volume and set "
                "FLEETKEEPER_GATEWAY_BATCH_STORE_SHARED=true; or use s3:// or gs://"
            ) from error
        except OSError as error:
            self._file.close()
            raise StoreRefused(
                f"{root} cannot be locked: {reason_of(error)}. Use a volume of another kind; or, if it is "
                "one that all replicas share, set FLEETKEEPER_GATEWAY_BATCH_STORE_SHARED=true"
            ) from error

    def close(self) -> None:
        """Give it back."""
        self._file.close()

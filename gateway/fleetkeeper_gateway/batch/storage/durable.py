"""Files that survive a crash of the machine once they exist. The calls block: use them in threads.

obstore writes a file, links it to its name and returns. After a crash the name may be missing, or refer
to an empty file. Here the bytes are synced before the name exists, and the name before a write returns.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from fleetkeeper_gateway.batch.storage.paths import STAGING

SYNC_EVERY_BYTES: Final = 16 * 1024 * 1024
"""Bytes between syncs of a growing file, so that the last sync does not take minutes."""
TRIES: Final = 100
"""Maximum attempts to create a file, because another process may remove its empty folder just before."""


class StagedFile:
    """A file that is written before it gets its name. A lock admits one thread at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = root / STAGING / secrets.token_hex(16)
        self._file: io.FileIO | None = None
        self._synced = 0
        self._turn = threading.Lock()
        self.bytes = 0
        self.begun = False
        """True once a thread may have created the file."""
        self.given_up = False
        """True after another thread has given the file up: it gets no name from then on."""

    def append(self, data: bytes) -> None:
        """Add bytes."""
        with self._turn:
            self._refuse_if_given_up()
            if self._file is None:
                # Unbuffered: on a full disk, a buffer would fail again when it is closed.
                self._file = io.FileIO(self._path, "x")
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            self.bytes += len(data)
            if self.bytes - self._synced >= SYNC_EVERY_BYTES:
                os.fdatasync(self._file.fileno())
                self._synced = self.bytes

    def publish(self, path: str, *, replace: bool) -> bool:
        """Give the file its name, durably. Return False if another file has the name and must not be replaced."""
        self.append(b"")
        with self._turn:
            self._refuse_if_given_up()
            assert self._file is not None  # noqa: S101 - for the type checker
            os.fsync(self._file.fileno())
            target = self._root / path
            for _ in range(TRIES - 1):
                try:
                    return self._name(target, replace=replace)
                except FileNotFoundError:
                    continue
            return self._name(target, replace=replace)

    def discard(self) -> None:
        """Remove the file if it has no name yet."""
        with self._turn:
            self.given_up = True
            if self._file is not None:
                self._file.close()
                self._path.unlink(missing_ok=True)

    def _name(self, target: Path, *, replace: bool) -> bool:
        if not self._root.exists():
            # Not created again: probably the volume is no longer mounted.
            raise FileNotFoundError(errno.ENOENT, "the directory of the store is gone")
        make_folders(target.parent)
        self._refuse_if_given_up()
        named = True
        if replace:
            self._path.replace(target)
        else:
            try:
                target.hardlink_to(self._path)
            except FileExistsError:
                # A network file system repeats a request whose reply was lost.
                named = target.samefile(self._path)
        # Also if another process created the name: it must survive a crash.
        sync_folder(target.parent)
        return named

    def _refuse_if_given_up(self) -> None:
        if self.given_up:
            raise InterruptedError(errno.EINTR, "the write was given up")


def delete(root: Path, paths: Iterable[str]) -> None:
    """Delete objects, durably, and folders that become empty."""
    folders = set()
    for path in paths:
        file = root / path
        file.unlink(missing_ok=True)
        folders.add(file.parent)
    for folder in folders - {root / STAGING}:
        # Another process may have removed it already.
        with suppress(FileNotFoundError):
            sync_folder(folder)
            try:
                os.removedirs(folder)
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY}:
                    raise


def make_folders(folder: Path) -> None:
    """Create a folder and its missing parents, durably."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        # Other processes may create and remove the folder meanwhile: `exist_ok` checks it, and would raise.
        with suppress(FileExistsError):
            path.mkdir()
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

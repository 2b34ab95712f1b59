"""Files that survive a crash of the machine once they are there. Blocking: for threads.

obstore writes a file, links it to its name and returns: after a crash the name may be gone, or lead to
an empty file. Here the bytes are synced before the name exists, and the name before a write returns.
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

STAGING: Final = "staging"
"""Folder of files that have no name yet."""
SYNC_EVERY_BYTES: Final = 16 * 1024 * 1024
"""A long file is synced as it grows, so that the end does not take minutes."""
TRIES: Final = 10
"""Another process removes a folder because it is empty, in the moment before we put something there."""


class Directory:
    """The directory of a store."""

    def __init__(self, root: Path) -> None:
        """Make the directory if it is missing. Raise `OSError` if that fails."""
        self._root = root
        make_folders(root / STAGING)
        self._folders = threading.Lock()

    @property
    def staging(self) -> Path:
        """Return the folder of files without a name."""
        return self._root / STAGING

    def file(self, path: str) -> Path:
        """Return the file of an object."""
        return self._root / path

    def make_folder(self, folder: Path) -> None:
        """Make a folder, durably."""
        with self._folders:
            if not self._root.exists():
                # Not made again: most likely a volume is not mounted any more.
                raise FileNotFoundError(errno.ENOENT, "the directory of the store is gone")
            make_folders(folder)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects, durably, and folders that are empty then."""
        folders = set()
        for path in paths:
            file = self.file(path)
            file.unlink(missing_ok=True)
            folders.add(file.parent)
        for folder in folders:
            try:
                sync_folder(folder)
            except FileNotFoundError:
                continue
            with self._folders:
                self._remove_empty(folder)

    def clear_staging(self, older_than: float) -> int:
        """Delete what writers that ended left behind, by Unix seconds. Return the number of files."""
        cleared = 0
        for file in self.staging.iterdir():
            try:
                old = file.stat().st_mtime < older_than
            except FileNotFoundError:
                continue
            if old:
                file.unlink(missing_ok=True)
                cleared += 1
        return cleared

    def _remove_empty(self, folder: Path) -> None:
        while folder != self._root:
            try:
                folder.rmdir()
            except OSError as error:
                if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY}:
                    return
                if error.errno != errno.ENOENT:
                    raise
            folder = folder.parent


class StagedFile:
    """A file that is written before it gets its name. One thread at a time uses it, in turn."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._path = directory.staging / secrets.token_hex(16)
        self._file: io.FileIO | None = None
        self._synced = 0
        self._turn = threading.Lock()
        self.bytes = 0
        self.given_up = False
        """Set from another thread: it gets no name from now on."""

    def create(self, path: str, data: bytes) -> bool:
        """Write a whole object that must not exist. Return whether it did not."""
        try:
            self.append(data)
            return self.publish(path, replace=False)
        finally:
            self.discard()

    def append(self, data: bytes) -> None:
        """Add bytes."""
        with self._turn:
            self._refuse_if_given_up()
            if self._file is None:
                # Unbuffered: a buffer that finds the disk full fails again when it is closed.
                self._file = io.FileIO(self._path, "x")
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            self.bytes += len(data)
            if self.bytes - self._synced >= SYNC_EVERY_BYTES:
                os.fdatasync(self._file.fileno())
                self._synced = self.bytes

    def publish(self, path: str, *, replace: bool) -> bool:
        """Give it its name, durably. Return False if another file has it, and is not replaced."""
        self.append(b"")
        with self._turn:
            self._refuse_if_given_up()
            assert self._file is not None  # noqa: S101 - for the type checker
            os.fsync(self._file.fileno())
            target = self._directory.file(path)
            for _ in range(TRIES - 1):
                try:
                    return self._name(target, replace=replace)
                except FileNotFoundError:
                    continue
            return self._name(target, replace=replace)

    def discard(self) -> None:
        """Remove it, if it has no name yet."""
        with self._turn:
            self.given_up = True
            if self._file is not None:
                self._file.close()
                self._path.unlink(missing_ok=True)

    def _name(self, target: Path, *, replace: bool) -> bool:
        self._directory.make_folder(target.parent)
        self._refuse_if_given_up()
        named = True
        if replace:
            self._path.replace(target)
        else:
            try:
                target.hardlink_to(self._path)
            except FileExistsError:
                # A network file system repeats a request whose answer was lost.
                named = target.samefile(self._path)
        # Also if another process gave the name: it must not be gone after a crash.
        sync_folder(target.parent)
        return named

    def _refuse_if_given_up(self) -> None:
        if self.given_up:
            raise InterruptedError(errno.EINTR, "the write was given up")


def make_folders(folder: Path) -> None:
    """Make a folder, and those above it that are missing, durably."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for one in reversed(missing):
        # It may be there again, and gone again when it is looked at: `exist_ok` would raise then.
        with suppress(FileExistsError):
            one.mkdir()
        sync_folder(one.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

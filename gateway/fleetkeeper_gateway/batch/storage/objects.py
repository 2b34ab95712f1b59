"""Reads objects from any store, with a time limit for each call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import obstore
from obstore.store import ObjectStore

from fleetkeeper_gateway.batch.interfaces import Object, ObjectMissing, StorageError
from fleetkeeper_gateway.batch.storage.errors import FAILURES, is_bucket_missing, reason_of
from fleetkeeper_gateway.batch.storage.paths import checked

PART_BYTES: Final = 4 * 1024 * 1024
"""Bytes of a stream that are read by one call. Each part has a call of its own, because a client may be slow."""
LISTED_AT_ONCE: Final = 1000
READ: Final = "read"
DELETE: Final = "delete"


class ReadableObjects:
    """The read operations of `Objects`, which all stores share."""

    def __init__(self, store: ObjectStore, place: str, timeout_s: float) -> None:
        """`place`: name of the store in messages, without secrets."""
        self._store = store
        self._place = place
        self._timeout_s = timeout_s

    async def read(self, path: str) -> bytes | None:
        """Return an object; None if it does not exist."""
        checked(path)
        async with self._limited(READ, path):
            try:
                found = await obstore.get_async(self._store, path)
                return (await found.bytes_async()).to_bytes()
            except FileNotFoundError as error:
                if is_bucket_missing(error):
                    raise
                return None

    async def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Return a part of an object.

        Raises:
            ObjectMissing: if there is no such object.
            StorageError: if the call fails, or the object ends before the part does.
        """
        checked(path)
        if not length:
            return b""
        async with self._limited(READ, path):
            found = await obstore.get_range_async(self._store, path, start=offset, length=length)
        if len(found) != length:
            raise StorageError(
                f"cannot read {self._place}/{path}: it ends at {offset + len(found)}, "
                f"and {length} bytes at {offset} were asked for"
            )
        return found.to_bytes()

    async def stream(self, path: str) -> AsyncIterator[bytes]:
        """Yield an object in parts. Raise `ObjectMissing` if there is no such object."""
        checked(path)
        async with self._limited(READ, path):
            size = (await obstore.head_async(self._store, path))["size"]
        for offset in range(0, size, PART_BYTES):
            yield await self.read_range(path, offset, min(PART_BYTES, size - offset))

    async def list(self, prefix: str) -> Sequence[Object]:
        """Return the objects below a prefix that ends in `/`, sorted by path."""
        checked(prefix.removesuffix("/"))
        found: list[Object] = []
        pages = aiter(obstore.list(self._store, prefix, chunk_size=LISTED_AT_ONCE))
        while True:
            async with self._limited("list", prefix):
                page = await anext(pages, None)
            if page is None:
                # In a thread: there may be tens of thousands.
                return await asyncio.to_thread(sorted, found, key=lambda stored: stored.path)
            found += [
                Object(listed["path"], listed["size"], listed["last_modified"].timestamp())
                for listed in page
            ]

    async def children(self, prefix: str) -> Sequence[str]:
        """Return the names of the folders in a folder, sorted."""
        checked(prefix.removesuffix("/"))
        async with self._limited("list", prefix):
            found = await obstore.list_with_delimiter_async(self._store, prefix)
        return sorted(folder.rpartition("/")[2] for folder in found["common_prefixes"])

    @asynccontextmanager
    async def _limited(self, what: str, path: str) -> AsyncIterator[None]:
        """Limit the time of a call; turn its failures into `StorageError`."""
        where = f"{self._place}/{path}"
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                yield
        except FAILURES as error:
            is_missing = isinstance(error, FileNotFoundError) and not is_bucket_missing(error)
            if is_missing and what in {READ, DELETE}:
                raise ObjectMissing(f"cannot {what} {where}: it does not exist") from error
            late = isinstance(error, TimeoutError) and limit.expired()
            reason = f"no answer in {self._timeout_s:g} s" if late else reason_of(error)
            raise StorageError(f"cannot {what} {where}: {reason}") from error

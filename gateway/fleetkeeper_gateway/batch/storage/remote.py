"""Writes to object stores, which may execute a request and still report a failure."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final

import obstore
import structlog

from fleetkeeper_gateway.batch.interfaces import ObjectMissing, StorageError
from fleetkeeper_gateway.batch.storage.objects import DELETE, READ, ReadableObjects
from fleetkeeper_gateway.batch.storage.paths import checked

log = structlog.get_logger(__name__)

NONCE: Final = "nonce"
"""Metadata key by which a writer recognizes its own object."""
CREATE_TRIES: Final = 3
UPLOAD_PART_BYTES: Final = 8 * 1024 * 1024
"""Size of an upload's parts. Stores require at least 5 MiB, and accept 10,000 parts."""
PARTS_AT_ONCE: Final = 2
DELETED_AT_ONCE: Final = 1000


class RemoteObjects(ReadableObjects):
    """Objects in a bucket of S3, Google Cloud Storage, or a compatible store."""

    async def create(self, path: str, data: bytes) -> bool:
        """Create an object. Return False if it exists already, from another writer.

        A failure proves nothing: the store may have written the object and lost the answer. Neither does
        "it exists": the first of two tries may have written it. So the nonce in the object's metadata
        decides.

        Raises:
            StorageError: if the nonce cannot be read. The object may exist then.
        """
        checked(path)
        nonce = secrets.token_hex(16)
        ends = asyncio.get_running_loop().time() + self._timeout_s
        for attempt in range(1, CREATE_TRIES + 1):
            try:
                async with self._limited("create", path):
                    await obstore.put_async(
                        self._store,
                        path,
                        data,
                        mode="create",
                        use_multipart=False,
                        attributes={NONCE: nonce},
                    )
            except StorageError as error:
                owner = await self._owner(path)
                if owner is not None:
                    return owner == nonce
                if attempt == CREATE_TRIES or asyncio.get_running_loop().time() > ends:
                    raise
                log.info("an object is created again", path=path, error=str(error))
            else:
                return True
        raise AssertionError("the last try returns or raises")

    async def write(self, path: str, parts: AsyncIterator[bytes]) -> int:
        """Write an object of any size, part by part. Return its size in bytes.

        The time limit applies to each part; the caller bounds the time of `parts`. A failed upload is
        aborted; if that fails too, its parts stay until the bucket's lifecycle rules remove them.
        """
        checked(path)
        written, closing = 0, False
        writer = obstore.open_writer_async(
            self._store, path, buffer_size=UPLOAD_PART_BYTES, max_concurrency=PARTS_AT_ONCE
        )
        try:
            async for part in parts:
                async with self._limited("write", path):
                    written += await writer.write(part)
            closing = True
            async with self._limited("write", path):
                await writer.close()
        except BaseException as error:
            if not closing:
                await self._end_upload(writer, path, error)
            raise
        return written

    async def delete(self, paths: Iterable[str]) -> None:
        """Delete objects. Missing objects are ignored."""
        rest = iter(paths)
        while some := [checked(path) for path in islice(rest, DELETED_AT_ONCE)]:
            try:
                await self._delete(some)
            except ObjectMissing:
                # S3 ignores missing objects; Google stops at them.
                for path in some:
                    with suppress(ObjectMissing):
                        await self._delete([path])

    async def _delete(self, paths: Sequence[str]) -> None:
        async with self._limited(DELETE, paths[0]):
            await obstore.delete_async(self._store, paths)

    async def _owner(self, path: str) -> str | None:
        """Return the nonce of an object, empty if it has none; None if the object is missing."""
        try:
            async with self._limited(READ, path):
                found = await obstore.get_async(self._store, path, options={"head": True})
                return str(found.attributes.get(NONCE, ""))
        except ObjectMissing:
            return None

    async def _end_upload(
        self, writer: obstore.AsyncWritableFile, path: str, error: BaseException
    ) -> None:
        try:
            async with self._limited("end the upload of", path):
                await writer.__aexit__(type(error), error, None)
        except StorageError as problem:
            log.warning("an upload was not ended", path=path, error=str(problem))

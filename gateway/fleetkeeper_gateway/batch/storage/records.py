"""Records as JSON: decoded strictly, and cached, because records never change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

import structlog
from pydantic import TypeAdapter, ValidationError

from fleetkeeper_gateway.batch.interfaces import Objects
from fleetkeeper_gateway.batch.storage.errors import BrokenObject
from fleetkeeper_gateway.batch.storage.paths import BadPart

log = structlog.get_logger(__name__)

T = TypeVar("T")
One = TypeVar("One")

KEPT_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of the cache of records and heads of parts: bytes of content, plus `ENTRY_BYTES` for each.

The memory is larger: 93 MiB with validations of 100 mistakes of 70 characters.
"""
KEPT_RECORD_BYTES: Final = 16 * 1024
"""Maximum size of a cached record. A client controls the size of its file's mistakes."""
ENTRY_BYTES: Final = 1024
"""Memory of the smallest entry, with its path."""
READ_AT_ONCE: Final = 16


class Kind(Generic[T]):
    """A kind of record: its type, and the path that a record's content requires."""

    def __init__(
        self, what: str, kept_as: type[T], path_of: Callable[[T], str] | None = None
    ) -> None:
        self._what = what
        self._adapter = TypeAdapter(kept_as)
        self._path_of = path_of

    def encode(self, record: T) -> bytes:
        """Encode a record."""
        return self._adapter.dump_json(record)

    def decode(self, path: str, content: bytes) -> T:
        """Decode a record. Fields that are unknown to this version are ignored.

        Raises:
            BrokenObject: if the content is not a record, or belongs to another path.
        """
        try:
            record = self._adapter.validate_json(content, strict=True)
            path_of_record = self._path_of(record) if self._path_of else path
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            reason = f"{place}: {first['msg']}" if place else first["msg"]
            raise self._broken(path, reason) from error
        except BadPart as error:
            raise self._broken(path, str(error)) from error
        if path_of_record != path:
            raise self._broken(path, f"it belongs to {path_of_record}")
        return record

    def _broken(self, path: str, reason: str) -> BrokenObject:
        return BrokenObject(
            f"{path} is no valid {self._what}: {reason}. Restore it from a copy, or delete it"
        )


class Records:
    """The records of a store."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._kept: dict[str, tuple[Any, int]] = {}
        """Cached values by path, each with its size in bytes."""
        self._bytes = 0

    async def read(self, path: str, kind: Kind[T]) -> T | None:
        """Return a record from the store; None if it does not exist."""
        content = await self._objects.read(path)
        return None if content is None else kind.decode(path, content)

    async def kept(self, path: str, kind: Kind[T]) -> T | None:
        """Return a record, from the cache if possible. The caller knows that it exists."""
        if path in self._kept:
            kept: T = self._kept[path][0]
            return kept
        content = await self._objects.read(path)
        if content is None:
            return None
        found = kind.decode(path, content)
        self.keep(path, found, len(content))
        return found

    async def all(self, paths: Sequence[str], kind: Kind[T]) -> list[T]:
        """Return records that exist. A broken record is logged and left out."""

        async def unbroken(path: str) -> T | None:
            try:
                return await self.kept(path, kind)
            except BrokenObject as error:
                log.warning("a record is left out", path=path, error=str(error))
                return None

        return await each(paths, unbroken)

    async def delete(self, paths: Iterable[str]) -> None:
        """Delete objects, and drop their records from the cache."""
        gone = list(paths)
        await self._objects.delete(gone)
        for path in gone:
            self._forget(path)

    def known(self, paths: Iterable[str], kept_as: type[T]) -> dict[str, T]:
        """Return the cached values of this type, by path."""
        found = {path: self._kept[path][0] for path in paths if path in self._kept}
        return {path: value for path, value in found.items() if isinstance(value, kept_as)}

    def keep(self, path: str, found: object, content_bytes: int) -> None:
        """Cache the value of an object that never changes. The oldest entries make room."""
        self._forget(path)
        if content_bytes <= KEPT_RECORD_BYTES:
            self._kept[path] = found, ENTRY_BYTES + content_bytes
            self._bytes += ENTRY_BYTES + content_bytes
        while self._bytes > KEPT_BYTES:
            self._forget(next(iter(self._kept)))

    def _forget(self, path: str) -> None:
        self._bytes -= self._kept.pop(path, (None, 0))[1]


async def each(some: Sequence[One], read: Callable[[One], Awaitable[T | None]]) -> list[T]:
    """Return the results of `read` in order, without None."""
    found: list[T] = []
    # A few at a time, also from the cache, so that other work on the event loop runs in between.
    for start in range(0, len(some), READ_AT_ONCE):
        answers = await asyncio.gather(*map(read, some[start : start + READ_AT_ONCE]))
        found += [answer for answer in answers if answer is not None]
    return found

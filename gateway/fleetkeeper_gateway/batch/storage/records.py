"""Records as JSON: read strictly, and kept in memory, because none ever changes."""

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
"""Records and heads of parts in memory, as bytes of their content and `ENTRY_BYTES` for each.

Python takes more: 93 MiB with validations of 100 mistakes of 70 characters.
"""
KEPT_RECORD_BYTES: Final = 16 * 1024
"""A larger one is read each time: a client decides how long the mistakes of its file are."""
ENTRY_BYTES: Final = 1024
"""What even the smallest one takes in memory, with its path."""
READ_AT_ONCE: Final = 16


class Kind(Generic[T]):
    """A kind of record: its type, and the path where a record of its content must be."""

    def __init__(
        self, what: str, kept_as: type[T], path_of: Callable[[T], str] | None = None
    ) -> None:
        self._what = what
        self._adapter = TypeAdapter(kept_as)
        self._path_of = path_of

    def encode(self, record: T) -> bytes:
        """Return the content of an object."""
        return self._adapter.dump_json(record)

    def decode(self, path: str, content: bytes) -> T:
        """Return the record of an object. Entries that this version does not know are ignored.

        Raises:
            BrokenObject: if it is not one, or that of another path.
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
        """By path, with the bytes that each counts."""
        self._bytes = 0

    async def read(self, path: str, kind: Kind[T]) -> T | None:
        """Return a record from the store; None if it does not exist."""
        content = await self._objects.read(path)
        return None if content is None else kind.decode(path, content)

    async def kept(self, path: str, kind: Kind[T]) -> T | None:
        """Return a record that somebody found to exist, from memory if it was read before."""
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
        """Return records that somebody found to exist. One that is broken is logged, and left out."""

        async def unbroken(path: str) -> T | None:
            try:
                return await self.kept(path, kind)
            except BrokenObject as error:
                log.warning("a record is left out", path=path, error=str(error))
                return None

        return await each(paths, unbroken)

    async def delete(self, paths: Iterable[str]) -> None:
        """Delete objects, and forget their records."""
        gone = list(paths)
        await self._objects.delete(gone)
        for path in gone:
            self._forget(path)

    def known(self, paths: Iterable[str], kept_as: type[T]) -> dict[str, T]:
        """Return what is kept of objects, by path."""
        found = {path: self._kept[path][0] for path in paths if path in self._kept}
        return {path: one for path, one in found.items() if isinstance(one, kept_as)}

    def keep(self, path: str, found: object, content_bytes: int) -> None:
        """Keep what was read of an object that never changes. What was kept first makes room."""
        self._forget(path)
        if content_bytes <= KEPT_RECORD_BYTES:
            self._kept[path] = found, ENTRY_BYTES + content_bytes
            self._bytes += ENTRY_BYTES + content_bytes
        while self._bytes > KEPT_BYTES:
            self._forget(next(iter(self._kept)))

    def _forget(self, path: str) -> None:
        self._bytes -= self._kept.pop(path, (None, 0))[1]


async def each(some: Sequence[One], read: Callable[[One], Awaitable[T | None]]) -> list[T]:
    """Return what is read of each one, in order, without those of which there is nothing."""
    found: list[T] = []
    # A few at a time, also of what is in memory: other work on the event loop runs between.
    for start in range(0, len(some), READ_AT_ONCE):
        answers = await asyncio.gather(*map(read, some[start : start + READ_AT_ONCE]))
        found += [one for one in answers if one is not None]
    return found

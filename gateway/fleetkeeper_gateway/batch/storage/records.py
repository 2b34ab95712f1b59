"""Records as JSON: read strictly, and kept in memory, because none ever changes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, TypeVar

import structlog
from pydantic import TypeAdapter, ValidationError

from fleetkeeper_gateway.batch.interfaces import Objects
from fleetkeeper_gateway.batch.storage.errors import BrokenObject
from fleetkeeper_gateway.batch.storage.paths import BadPart

log = structlog.get_logger(__name__)

T = TypeVar("T")

KEPT: Final = 20_000
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
    """Reads records of a store."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._kept: OrderedDict[str, Any] = OrderedDict()

    async def read(self, path: str, kind: Kind[T]) -> T | None:
        """Return a record from the store; None if it does not exist."""
        content = await self._objects.read(path)
        return None if content is None else kind.decode(path, content)

    async def kept(self, path: str, kind: Kind[T]) -> T | None:
        """Return a record that somebody found to exist, from memory if it was read before."""
        found: T | None = self._kept.get(path)
        if found is None:
            found = await self.read(path, kind)
            if found is not None:
                self._kept[path] = found
        if path in self._kept:
            self._kept.move_to_end(path)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return found

    async def all(self, paths: Iterable[str], kind: Kind[T]) -> list[T]:
        """Return records that somebody found to exist. One that is broken is logged, and left out."""
        free = asyncio.Semaphore(READ_AT_ONCE)

        async def one(path: str) -> T | None:
            async with free:
                try:
                    return await self.kept(path, kind)
                except BrokenObject as error:
                    log.warning("a record is left out", path=path, error=str(error))
                    return None

        found = await asyncio.gather(*map(one, paths))
        return [record for record in found if record is not None]

    def forget(self, path: str) -> None:
        """Forget a record that is deleted."""
        self._kept.pop(path, None)

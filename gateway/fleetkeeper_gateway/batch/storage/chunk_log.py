"""The log of a chunk: parts that are created if absent, each by a writer that has read the earlier parts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple, TypeVar
from zlib import crc32

import structlog

from fleetkeeper_gateway.batch.interfaces import Objects, StorageError
from fleetkeeper_gateway.batch.model import MAX_PART_BYTES, Attempt, Counts, Result, Trouble
from fleetkeeper_gateway.batch.storage import part as parts
from fleetkeeper_gateway.batch.storage.errors import BrokenObject
from fleetkeeper_gateway.batch.storage.paths import DAMAGED

log = structlog.get_logger(__name__)

MEMORY_BYTES: Final = MAX_PART_BYTES
"""Maximum results in memory while a log is read. Results of a larger log are read one by one."""
_SMALL_BYTES: Final = 262_144
"""Size from which a part is checked in a thread, so that the event loop continues."""

Found = TypeVar("Found")


class _Kept(NamedTuple):
    """The place of a line's result: the part, and the place in it."""

    number: int
    entry: parts.Entry


class ChunkLog:
    """A view of the log of a chunk, for reading and writing. See `interfaces.Log` for the rule.

    A part that is damaged, or has a mark `.damaged` beside it, counts as empty. A reader that finds damage
    writes the mark first. From then on all readers treat the part as empty, even if they could read it.
    """

    def __init__(self, objects: Objects, path: Callable[[int], str], lines: range) -> None:
        """Create the view of a log, not yet read. `path` returns the path of a part."""
        self._objects = objects
        self._path = path
        self._lines = lines
        self._turn = asyncio.Lock()
        self._tried: set[tuple[int, bytes]] = set()
        """Number and checksum of our own parts that may or may not exist."""
        self._written: Counter[Attempt] = Counter()
        """Attempts in parts of `_tried` that turned out to exist. A repeated call must not write them again."""
        self._forget()

    def _forget(self) -> None:
        self._next = 0
        self._closed = False
        self._kept: dict[int, _Kept] = {}
        self._troubles: Counter[Attempt] = Counter()

    @property
    def lines(self) -> range:
        """Return the line numbers of the chunk."""
        return self._lines

    @property
    def closed(self) -> bool:
        """Return whether the log is known to be closed."""
        return self._closed

    @property
    def done(self) -> AbstractSet[int]:
        """Return the lines that are known to have a result."""
        return self._kept.keys()

    def troubles(self, line: int, trouble: Trouble) -> int:
        """Return the known number of attempts of a line that ended with this trouble."""
        return self._troubles[Attempt(line, trouble)]

    @property
    def counts(self) -> Counts:
        """Return the number of lines, and of those known to be completed or failed."""
        outcomes = Counter(kept.entry.outcome for kept in self._kept.values())
        return Counts(len(self._lines), outcomes[parts.OK], outcomes[parts.FAILED])

    # -- reading ----------------------------------------------------------------------------------

    async def read(self) -> None:
        """Read the parts since the last call."""
        async with self._turn:
            await self._read()

    async def _read(self) -> None:
        while not self._closed and await self._read_next():
            pass

    async def _read_next(self) -> bool:
        """Read the next part. Return whether there is one."""
        content = await self._objects.read(self._path(self._next))
        if content is None:
            return False
        if await self._is_marked(self._next):
            self._next += 1
            return True
        try:
            part = await _off_loop(len(content), lambda: parts.decode(content))
        except parts.UnknownPart as error:
            raise BrokenObject(f"{self._path(self._next)} cannot be used: {error}") from error
        except parts.DamagedPart as error:
            await self._mark(str(error))
            self._next += 1
            return True
        tried = (self._next, content[-parts.CHECKSUM.size :])
        if tried in self._tried:
            self._tried.discard(tried)
            self._written.update(part.attempts)
        self._add(part)
        return True

    async def _is_marked(self, number: int) -> bool:
        return await self._objects.read(self._path(number) + DAMAGED) is not None

    async def _mark(self, reason: str) -> None:
        path = self._path(self._next)
        # If it exists, another reader made it.
        await self._objects.create(path + DAMAGED, b"")
        log.warning("a part of a log is damaged, and counts as empty", path=path, reason=reason)

    def _add(self, part: parts.Part) -> None:
        """Add the contents of the next part."""
        for line, entry in part.entries:
            self._kept.setdefault(line, _Kept(self._next, entry))
        self._troubles.update(part.attempts)
        self._closed = part.head.closing
        self._next += 1

    # -- writing ----------------------------------------------------------------------------------

    async def append(
        self, results: Sequence[Result], attempts: Sequence[Attempt] = (), *, close: bool = False
    ) -> AbstractSet[int]:
        """Write results and attempts, durably. With `close`, also close the log if each line has a result.

        Raises:
            StorageError: if the store fails, or has a part that cannot be read now. The same call may
                be repeated.
            ValueError: if a line belongs to another chunk.
        """
        wanted = {result.line: result for result in reversed(results)}
        if any(line not in self._lines for line in wanted):
            raise ValueError(f"lines {sorted(wanted)} are not all in {self._lines}")
        async with self._turn:
            left = Counter(attempts)
            try:
                return await self._append(wanted, left, close=close)
            except BaseException:
                # The caller repeats the call, including attempts that were written before it failed.
                self._written.update(Counter(attempts) - left)
                raise

    async def _append(
        self, wanted: Mapping[int, Result], attempts: Counter[Attempt], *, close: bool
    ) -> AbstractSet[int]:
        """Write the results and attempts that are not written yet. Remove written attempts from `attempts`."""
        ours: set[int] = set()
        is_checked = False
        while not self._closed:
            repeated = attempts & self._written
            self._written -= repeated
            attempts -= repeated
            left = [result for line, result in sorted(wanted.items()) if line not in self._kept]
            some = _that_fit(left, parts.size_without(attempts.total()))
            closing = close and len(some) == len(left) == len(self._lines) - len(self._kept)
            if not (some or attempts or closing):
                break
            if closing and not is_checked:
                # Once a call: parts that are read from here on have no mark yet.
                is_checked = True
                ours.clear()
                await self._forget_if_marked()
            elif await self._create(some, attempts, closing=closing):
                attempts.clear()
                ours.update(result.line for result in some)
            elif not await self._read_next():
                path = self._path(self._next)
                raise StorageError(f"{path} exists, but cannot be read yet. Try again")
        return {
            line for line, result in wanted.items() if line in ours or self._has(result)
        } & self.done

    async def _create(
        self, results: Sequence[Result], attempts: Counter[Attempt], *, closing: bool
    ) -> bool:
        """Write the next part. Return False if it exists."""

        def prepared() -> tuple[bytes, parts.Part]:
            content = parts.encode(results, attempts.elements(), closing=closing)
            return content, parts.decode(content)

        content, part = await _off_loop(sum(map(parts.size_of, results)), prepared)
        tried = (self._next, content[-parts.CHECKSUM.size :])
        was_tried = tried in self._tried
        # Stays if the call fails: an existing part may be ours.
        self._tried.add(tried)
        is_ours = await self._objects.create(self._path(self._next), content)
        if is_ours:
            self._add(part)
        if is_ours or not was_tried:
            self._tried.discard(tried)
        return is_ours

    async def _forget_if_marked(self) -> None:
        """Read all parts again if another reader has marked a part whose results we count."""
        for number in sorted({kept.number for kept in self._kept.values()}):
            if await self._is_marked(number):
                self._forget()
                await self._read()
                return

    def _has(self, result: Result) -> bool:
        """Return whether the log contains exactly this result."""
        kept = self._kept.get(result.line)
        return kept is not None and kept.entry[1:] == (
            len(result.text),
            parts.outcome_of(result),
            crc32(result.text),
        )

    # -- results ----------------------------------------------------------------------------------

    async def results(self, *, ok: bool | None = None) -> AsyncIterator[Result]:
        """Yield all results in the order of their lines, or only those with this value of `ok`.

        Raises:
            StorageError: if a part cannot be read, or has changed.
        """
        some = {
            line: kept
            for line, kept in sorted(self._kept.items())
            if ok is None or (kept.entry.outcome == parts.OK) == ok
        }
        texts = await self._together(some.values())
        for line, (number, entry) in some.items():
            if number in texts:
                first, content = texts[number]
                text = content[entry.offset - first : entry.offset - first + entry.size]
            else:
                text = await self._objects.read_range(self._path(number), entry.offset, entry.size)
            if crc32(text) != entry.checksum:
                raise StorageError(f"{self._path(number)} has changed since it was read. Try again")
            yield entry.result(line, text)

    async def _together(self, some: Iterable[_Kept]) -> Mapping[int, tuple[int, bytes]]:
        """Return the bytes of each part that contain the texts, with their offset; nothing if they are too large."""
        spans: dict[int, range] = {}
        for number, entry in some:
            first, end = entry.offset, entry.offset + entry.size
            known = spans.get(number, range(first, end))
            spans[number] = range(min(first, known.start), max(end, known.stop))
        if sum(map(len, spans.values())) > MEMORY_BYTES:
            return {}
        return {
            number: (
                span.start,
                await self._objects.read_range(self._path(number), span.start, len(span)),
            )
            for number, span in spans.items()
        }


def _that_fit(results: Sequence[Result], size: int) -> Sequence[Result]:
    """Return the first results that fit into a part of this size without them.

    A result that fits into no part gets a part of its own.
    """
    for position, result in enumerate(results):
        size += parts.size_of(result)
        if position and size > MAX_PART_BYTES:
            return results[:position]
    return results


async def _off_loop(size: int, work: Callable[[], Found]) -> Found:
    """Run work on this number of bytes, in a thread if it is large."""
    return work() if size <= _SMALL_BYTES else await asyncio.to_thread(work)

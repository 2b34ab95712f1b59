"""Merges the segments of a batch into its files, in the order of the input, in bounded memory.

Of several results of a line, that with the lowest fence counts. Segments may be added while this
runs, so what counts is decided once, and then read by segment and position.
"""

from __future__ import annotations

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Final, NamedTuple

from fleetkeeper_gateway.batch.interfaces import Batches, StorageError
from fleetkeeper_gateway.batch.model import BatchRecord

MEMORY_BYTES: Final = 67_108_864
"""Text of results that is in memory at the same time. More is read in several passes."""
_PART_BYTES: Final = 262_144


class Place(NamedTuple):
    """A result that counts. The least of a line does; the rest of the fields make that definite."""

    fence: int
    segment: str
    offset: int
    ok: bool
    size: int


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a batch that count, by line."""

    batches: Batches
    record: BatchRecord
    places: Mapping[int, Place]
    texts: Mapping[int, bytes] | None
    """All texts, if they are small enough."""
    memory_bytes: int

    async def lines(self, numbers: Sequence[int], other: Other) -> AsyncIterator[bytes]:
        """Return lines of a file, each with its end, in parts of a suitable size.

        Args:
            numbers: the lines, in order.
            other: makes the text of a line without a result.

        Raises:
            StorageError: if a segment cannot be read.
        """
        part = bytearray()
        for group in self._groups(numbers):
            texts = self.texts if self.texts is not None else await self._read(group)
            for number in group:
                text = texts.get(number)
                part += (await other(number) if text is None else text) + b"\n"
                if len(part) >= _PART_BYTES:
                    yield bytes(part)
                    part.clear()
        if part:
            yield bytes(part)

    def _groups(self, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
        """Return runs of lines whose texts fit into memory."""
        first = size = 0
        for position, number in enumerate(numbers):
            place = self.places.get(number)
            size += place.size if place is not None else 0
            if size > self.memory_bytes and position > first:
                yield numbers[first:position]
                first, size = position, place.size if place is not None else 0
        if numbers[first:]:
            yield numbers[first:]

    async def _read(self, numbers: Iterable[int]) -> Mapping[int, bytes]:
        wanted = {
            (place.segment, place.offset): number
            for number in numbers
            if (place := self.places.get(number)) is not None
        }
        texts: dict[int, bytes] = {}
        if not wanted:
            return texts
        async for segment, results in self.batches.results(self.record):
            for offset, result in enumerate(results):
                number = wanted.get((segment, offset))
                if number is not None:
                    texts[number] = result.text
        if len(texts) != len(wanted):
            raise StorageError(
                f"{len(wanted) - len(texts)} results of {self.record.id} were there, and are gone"
            )
        return texts


Other = Callable[[int], Awaitable[bytes]]


async def read_results(
    batches: Batches, record: BatchRecord, lines: int, memory_bytes: int = MEMORY_BYTES
) -> Results:
    """Return the results of a batch that count.

    Args:
        batches: where they are.
        record: the batch.
        lines: number of lines; results of others are ignored.
        memory_bytes: text of results that may be in memory at the same time.

    Raises:
        StorageError: if a segment cannot be read.
    """
    places: dict[int, Place] = {}
    texts: dict[int, bytes] | None = {}
    size = 0
    async for segment, results in batches.results(record):
        for offset, result in enumerate(results):
            place = Place(result.fence, segment, offset, result.ok, len(result.text))
            best = places.get(result.line)
            if not 0 <= result.line < lines or (best is not None and best <= place):
                continue
            places[result.line] = place
            size += place.size - (best.size if best is not None else 0)
            if size > memory_bytes:
                texts = None
            if texts is not None:
                texts[result.line] = result.text
    return Results(batches, record, places, texts, memory_bytes)

"""The queue of `interfaces.Queue`, by functions in Redis.

A chunk that waits or is held is an entry of its batch's stream. A process holds the entries that are
pending for its name. An entry that it does not renew for 60 s is replaced by a new entry. So a late
process holds nothing: neither `renew` nor `done` nor `give_back` finds its entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import structlog
from pydantic import TypeAdapter, ValidationError
from redis.asyncio.connection import AbstractConnection

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import Held, Waiting
from fleetkeeper_gateway.batch.model import BatchRecord
from fleetkeeper_gateway.batch.queue.link import Link, Timing

log = structlog.get_logger(__name__)

T = TypeVar("T")

PART = 500
"""Maximum chunks of a call. Longer calls would delay the limits, which use the same server."""
MAX_SKIPPED = 4000
"""Maximum flows that a call skips. Lua has room for 8,000 arguments."""
DEADLINE = "012d"
"""Format of a deadline in a place, so that texts sort as numbers do."""
_NEVER_MS = 1 << 50
_RECORD = TypeAdapter(BatchRecord)


class RedisQueue(Link):
    """The queue of one process."""

    def __init__(
        self, connect: Callable[[], AbstractConnection], process: str, timing: Timing
    ) -> None:
        super().__init__(connect, timing)
        self._process = process
        """Name of the process, as the holder of chunks."""

    async def add(self, record: BatchRecord, model: str, chunks: Iterable[int]) -> None:
        """Queue chunks of a batch, except those that wait or are held already."""
        place = f"{record.key_id}/{record.expires:{DEADLINE}}/{record.id}/{model}"
        # The metadata may be 8 KiB, and no worker needs it.
        text = _RECORD.dump_json(record, exclude={"metadata"})
        for part in _parts(list(chunks)):
            await self._call("add", record.id, place, text, *part)

    async def keys(self) -> Mapping[str, int]:
        """Return the keys with waiting chunks, each with its running lines on all pods."""
        found: dict[str, int] = {}
        begin = b"-"
        while begin:
            begin, *pairs = await self._call("keys", begin, int(self._timing.running_s))
            found |= {key.decode(): lines for key, lines in _pairs(pairs)}
        return found

    async def take(
        self, key_id: str, most: int, skip: Collection[str] = (), *, before: float | None = None
    ) -> Sequence[Held]:
        """Hold waiting chunks of a key, at most 500, the earliest deadline first.

        If the reply of a call is lost, its chunks wait again after 60 s.
        """
        most = min(most, PART)
        skipped = [flow for flow in skip if flow.startswith(f"{key_id}/")][:MAX_SKIPPED]
        taken: list[Held] = []
        begin = f"[{key_id}/".encode()
        end = f"({key_id}0"  # 0 follows the slash
        if before is not None:
            end = f"({key_id}/{math.ceil(before):{DEADLINE}}"
        while begin and len(taken) < most:
            left = most - len(taken)
            span = (begin, end)
            begin, *batches = await self._call("take", self._process, key_id, left, *span, *skipped)
            for batch in batches:
                taken += _held_of(*batch)
        return taken

    async def renew(self, held: Iterable[Held], running: Mapping[str, int]) -> set[Held]:
        """Renew the chunks that this process holds; return those that it no longer holds."""
        lines = "".join(f"/{key}/{count}" for key, count in running.items() if count)
        lost: set[Held] = set()
        for part in _parts(list(held)) or [[]]:
            found = await self._call("renew", self._process, lines, *_entries(part))
            lost |= {part[position] for position in found}
        return lost

    async def give_back(self, held: Iterable[Held]) -> None:
        """Return chunks to the queue. Chunks that are no longer ours are ignored."""
        for part in _parts(list(held)):
            await self._call("give_back", self._process, *_entries(part))

    async def done(self, held: Held) -> None:
        """Remove a chunk whose log is closed. If it is no longer ours, another process removes it."""
        await self._call("done", self._process, *_entries([held]))

    async def release(self, process: str) -> None:
        """Return all chunks of an ended process to the queue."""
        cursor = b""
        while cursor != b"0":
            (cursor,) = await self._call("release", cursor or b"0", process)

    async def state(self, record: BatchRecord) -> Waiting | None:
        """Return the chunks of a batch, those not renewed in time included; None if Redis has no such batch."""
        idle_ms = int(self._timing.idle_s * 1000) if self._is_settled else _NEVER_MS
        found = await self._call("state", record.id, idle_ms)
        return Waiting(*found) if found else None

    async def emptied(self) -> Sequence[str]:
        """Return the IDs of batches whose last chunk was finished since the last call."""
        return [name.decode() for name in await self._call("emptied")]

    async def remove(self, record: BatchRecord) -> None:
        """Remove a batch from the queue."""
        await self._call("remove", record.id)

    async def leads(self, what: str) -> bool:
        """Take or renew a lease of 30 s for a task of one process. Two holders do no harm."""
        return await self._leads(what, self._timing.lead_s)

    async def resign(self, what: str) -> None:
        """Release the lease of a task, if it is ours."""
        await self._leads(what, 0)

    async def _leads(self, what: str, seconds: float) -> bool:
        (is_ours,) = await self._call("lead", what, self._process, int(seconds * 1000))
        return bool(is_ours)


def _parts(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[start : start + PART] for start in range(0, len(items), PART)]


def _pairs(items: Sequence[T]) -> Iterator[tuple[T, T]]:
    return zip(items[::2], items[1::2], strict=True)


def _entries(held: Iterable[Held]) -> list[str]:
    return [value for each in held for value in (each.batch.id, each.entry)]


def _held_of(place: bytes, text: bytes, *pairs: bytes) -> Iterator[Held]:
    """Return the chunks of one batch in the answer of `take`."""
    try:
        record = _RECORD.validate_json(text)
    except ValidationError:
        # Another version wrote the record. Its chunks wait again in a minute, and the next `add` rewrites it.
        metrics.DEFECTS.labels("record").inc()
        log.exception("the record of a batch in Redis cannot be read", place=place.decode())
        return
    model = place.decode().split("/", 3)[3]
    for entry, chunk in _pairs(pairs):
        yield Held(record, model, int(chunk), entry.decode())

"""What the parts of the process know of one another.

The order of writes, which every part relies on:

1. An input file: its bytes, then its record.
2. A batch: its marker in `active`, then its record by a conditional put, then the 200. Validation
   writes the index of lines, then `Validated` by a conditional put.
3. A result: a segment, durably, then `Queue.commit`. A segment never changes.
4. The end: output and error files, then `Final` by a conditional put, then what Redis knows of the
   batch goes, then its segments and its index, then the marker.

So each later object proves the earlier ones, and Redis can be emptied at any time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from fleetkeeper_gateway.batch.model import (
    BatchRecord,
    Counts,
    FileRecord,
    Final,
    LineRef,
    Result,
    Validated,
)


class StorageError(Exception):
    """The store failed or did not answer in time. The caller may try again."""


class ObjectMissing(StorageError):
    """The object to read a part of does not exist. Trying again does not help."""


@dataclass(frozen=True, slots=True)
class Object:
    """An object of the store."""

    path: str
    bytes: int
    modified: float
    """Unix seconds."""


class Objects(Protocol):
    """A store of objects. Every method may raise `StorageError`.

    A write that returned is durable. On a local volume it is synced, with its directory.
    """

    async def create(self, path: str, data: bytes) -> bool:
        """Write an object that must not exist. Return False if it does, whoever wrote it."""

    async def write(self, path: str, parts: AsyncIterator[bytes]) -> int:
        """Write an object of any size, part by part. Return its bytes. Nothing is visible before the end."""

    async def read(self, path: str) -> bytes | None:
        """Return an object; None if it does not exist."""

    async def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Return a part of an object. Raise `ObjectMissing` if it does not exist."""

    def stream(self, path: str) -> AsyncIterator[bytes]:
        """Return the parts of an object. Raise `ObjectMissing` if it does not exist."""

    async def list(self, prefix: str, *, after: str = "") -> Sequence[Object]:
        """Return the objects below a prefix that ends in `/`, sorted by path."""

    async def delete(self, paths: Iterable[str]) -> None:
        """Delete objects. Those that do not exist are ignored."""


class Files(Protocol):
    """The files of all keys. A file of another key does not exist."""

    async def put(self, record: FileRecord) -> None:
        """Make a file whose bytes were written exist."""

    async def get(self, key_id: str, file_id: str) -> FileRecord | None:
        """Return a file; None if the key has none of that ID."""

    async def list(self, key_id: str) -> Sequence[FileRecord]:
        """Return the files of a key, newest first."""

    async def delete(self, key_id: str, file_id: str) -> bool:
        """Delete a file. Return whether it existed."""

    def data_path(self, key_id: str, file_id: str) -> str:
        """Return the path of a file's bytes."""


class Batches(Protocol):
    """The batches of all keys, as their objects."""

    async def create(self, record: BatchRecord) -> bool:
        """Write the marker and the record. Return False if the ID exists."""

    async def get(self, key_id: str, batch_id: str) -> BatchRecord | None:
        """Return a batch; None if the key has none of that ID."""

    async def list(self, key_id: str) -> Sequence[BatchRecord]:
        """Return the batches of a key, newest first."""

    async def active(self) -> Sequence[BatchRecord]:
        """Return the batches that have not ended, of all keys."""

    async def put_validated(
        self, record: BatchRecord, validated: Validated, lines: Sequence[LineRef]
    ) -> None:
        """Keep what the input file was found to be. The first one that is kept counts."""

    async def validated(self, record: BatchRecord) -> Validated | None:
        """Return what the input file was found to be."""

    async def lines(self, record: BatchRecord) -> Sequence[LineRef]:
        """Return where the lines are. Only after `put_validated`."""

    async def cancel(self, record: BatchRecord, at: int) -> None:
        """Ask for the end of a batch. Idempotent."""

    async def cancelled_at(self, record: BatchRecord) -> int | None:
        """Return when the end was asked for."""

    async def add_segment(self, record: BatchRecord, results: Sequence[Result]) -> str:
        """Write results, durably. Return the name of the segment, at most 24 characters."""

    def results(self, record: BatchRecord) -> AsyncIterator[tuple[str, Sequence[Result]]]:
        """Return all segments with their names."""

    async def put_final(self, record: BatchRecord, final: Final) -> Final:
        """Keep how the batch ended. Return the one that counts: the first that was kept."""

    async def final(self, record: BatchRecord) -> Final | None:
        """Return how the batch ended."""

    async def forget_active(self, record: BatchRecord) -> None:
        """Remove the marker of a batch that has ended, and its segments and index."""


class QueueDown(Exception):
    """Redis does not answer, or was reset and is rebuilt at the moment. Nothing was taken or committed."""


NO_ROUTES: Mapping[str, str] = MappingProxyType({})


def flow_of(key_id: str, model: str) -> str:
    """Return the name of a flow: the lines of a key for a model.

    The models of two keys may have one name and be of two services.
    """
    return f"{key_id}/{model}"  # an ID of a key has no slash


@dataclass(frozen=True, slots=True)
class Taken:
    """A line under a lease of this process."""

    batch: BatchRecord
    line: LineRef
    attempt: int
    """From 1."""
    fence: int
    entry: str
    """ID of the entry in the stream."""
    model: str

    @property
    def flow(self) -> str:
        """Return the flow of the line."""
        return flow_of(self.batch.key_id, self.model)


@dataclass(frozen=True, slots=True)
class Commit:
    """A result that is kept in a segment, to be recorded."""

    taken: Taken
    segment: str
    offset: int
    """Position of the result in the segment, in results from 0."""
    ok: bool


class Queue(Protocol):
    """Lines that wait and run. Every method may raise `QueueDown`."""

    async def add(
        self, record: BatchRecord, validated: Validated, lines: Sequence[LineRef]
    ) -> None:
        """Queue the lines of a batch. Idempotent: lines that are queued, run or are done stay so."""

    async def take(
        self, free: Mapping[str, int], wait_s: float, routes: Mapping[str, str] = NO_ROUTES
    ) -> Sequence[Taken]:
        """Take lines under a lease of 30 s.

        Batches are chosen by deadline, then fairly by key. Lines whose lease ran out are taken again.

        Args:
            free: most lines of each route, and of all flows without a route together (`*`).
            wait_s: longest wait for lines.
            routes: the route of flows, which is in `free`.
        """

    async def renew(self, taken: Iterable[Taken]) -> set[Taken]:
        """Renew leases that are still ours. Return those that are not."""

    async def give_back(self, taken: Iterable[Taken], *, attempt_counts: bool) -> None:
        """Return lines that were not computed. A 429 does not count as an attempt."""

    async def commit(self, commits: Sequence[Commit]) -> set[int]:
        """Record results of one batch. Return the lines whose result counts; others had one."""

    async def counts(self, record: BatchRecord) -> Counts | None:
        """Return the progress; None if the queue does not know the batch."""

    async def outstanding(self, record: BatchRecord) -> int | None:
        """Return the lines without a result; None if the queue does not know the batch."""

    async def remove(self, record: BatchRecord) -> int:
        """Forget a batch, with its leases. Return how many it had: lines that run."""

    async def leads(self, what: str) -> bool:
        """Take or renew a lease of 30 s for a task that one process does, such as `finalize:ID`."""

    async def resign(self, what: str) -> None:
        """Give the lease of a task back, if it is ours."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a service answered to a line."""

    status: int
    body: bytes
    request_id: str
    retry_after_s: float | None = None
    refused: str | None = None
    """The code of the gateway's own refusal; None if the service answered."""


class NotAnswered(Exception):
    """A request got no answer. `sent` says whether it may have been worked on."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class Sender(Protocol):
    """Sends one line to the OpenAI-compatible URL of the settings."""

    async def send(self, key_id: str, endpoint: str, body: bytes) -> Answer:
        """Send a request in tier batch, on behalf of a key.

        Raises:
            NotAnswered: if no complete answer came.
        """

"""Interfaces between the parts of the batch process.

The store is the source of truth. Redis holds the queue of chunks, and may lose it at any time.

Every part relies on this order of writes:

1. An input file: its bytes, then its record.
2. A batch: its marker in `active`, then its record by a conditional put, then the 200. Validation
   writes the index of lines, then `Validated` by a conditional put, which divides the lines into chunks.
3. Results: parts of the log of their chunk, each created if absent (`Log`). A part never changes. The
   last part closes the log.
4. The end, once all logs are closed: output and error files under new IDs, then `Final` by a
   conditional put. Then the batch is removed from Redis, then its logs and its index, then the marker.

So each object proves that the earlier ones exist, and Redis can be emptied at any time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fleetkeeper_gateway.batch.model import (
    Attempt,
    BatchRecord,
    Counts,
    FileRecord,
    Final,
    LineRef,
    Progress,
    Result,
    Trouble,
    Usage,
    Validated,
)


class StorageError(Exception):
    """The store failed or did not answer in time. The caller may try again."""


class ObjectMissing(StorageError):
    """The object of a partial read does not exist. A retry does not help."""


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
        """Create an object. Return False if it exists already, from any writer."""

    async def write(self, path: str, parts: AsyncIterator[bytes]) -> int:
        """Write an object of any size, part by part, visible only when complete. Return its size in bytes."""

    async def read(self, path: str) -> bytes | None:
        """Return an object; None if it does not exist."""

    async def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Return a part of an object. Raise `ObjectMissing` if it does not exist."""

    def stream(self, path: str) -> AsyncIterator[bytes]:
        """Yield an object in parts. Raise `ObjectMissing` if it does not exist."""

    async def list(self, prefix: str) -> Sequence[Object]:
        """Return the objects below a prefix that ends in `/`, sorted by path."""

    async def delete(self, paths: Iterable[str]) -> None:
        """Delete objects. Those that do not exist are ignored."""


class Files(Protocol):
    """The files of all keys. A file of another key does not exist."""

    async def put(self, record: FileRecord) -> None:
        """Write the record of a file, whose bytes were written before. From then on the file exists."""

    async def get(
        self, key_id: str, file_id: str, *, may_be_expired: bool = False
    ) -> FileRecord | None:
        """Return a file; None if the key has no file with that ID.

        An expired file stays until all batches have ended whose input it is.
        """

    async def list(self, key_id: str) -> Sequence[FileRecord]:
        """Return the files of a key, newest first."""

    async def usage(self, key_id: str) -> Usage:
        """Return the files and bytes of a key, without changes of other replicas in the last minute."""

    async def delete(self, key_id: str, file_id: str) -> bool:
        """Delete a file. Return whether it existed."""

    def data_path(self, key_id: str, file_id: str) -> str:
        """Return the path of a file's bytes."""


class Log(Protocol):
    """A view of the results of one chunk, for reading and writing.

    Part n is created if absent, by a writer that has read the parts 0 to n-1, and contains only lines that
    none of them contains. If part n exists already, the writer reads it, drops the lines that it contains,
    and tries n+1. After a part that closes the log, all results are dropped. So each line has at most one
    result, with any number of writers and any delay. The rule needs neither Redis nor a clock nor a lease.

    Every method may raise `StorageError`. Then the write may or may not have happened; the same call may
    be repeated.
    """

    @property
    def lines(self) -> range:
        """Return the line numbers of the chunk."""

    @property
    def closed(self) -> bool:
        """Return whether the log is known to be closed."""

    @property
    def done(self) -> AbstractSet[int]:
        """Return the lines that are known to have a result."""

    @property
    def counts(self) -> Counts:
        """Return the number of lines, and of those known to be completed or failed."""

    def troubles(self, line: int, trouble: Trouble) -> int:
        """Return the known number of attempts of a line that ended with this trouble."""

    async def read(self) -> None:
        """Read the parts since the last call."""

    async def append(
        self, results: Sequence[Result], attempts: Sequence[Attempt] = (), *, close: bool = False
    ) -> AbstractSet[int]:
        """Write results and attempts, durably. With `close`, also close the log if each line has a result.

        Results of lines that already have a result are dropped. Without anything left to write, no part
        is written. If results were lost with a damaged part meanwhile, the log stays open: see `closed`
        and `done`.

        Returns:
            The lines whose result of this call counts.
        """

    def results(self, *, ok: bool | None = None) -> AsyncIterator[Result]:
        """Yield all results in the order of their lines, or only those with this value of `ok`.

        At most 16 MiB and one result are in memory. Call `read` first.
        """


class Index(Sequence[LineRef]):
    """Positions of the lines of an input file, and their division into chunks."""

    @property
    @abstractmethod
    def chunks(self) -> Sequence[range]:
        """Return the line numbers of each chunk."""


class Batches(Protocol):
    """The batches of all keys, read from and written to their objects."""

    async def create(self, record: BatchRecord) -> bool:
        """Write the marker and the record. Return False if the ID exists."""

    async def get(self, key_id: str, batch_id: str) -> BatchRecord | None:
        """Return a batch; None if the key has no batch with that ID."""

    async def ids(self, key_id: str) -> Sequence[str]:
        """Return the IDs of the batches of a key, newest first. No record is read."""

    async def several(self, key_id: str, batch_ids: Sequence[str]) -> Sequence[BatchRecord]:
        """Return batches of a key in this order, without missing and broken ones."""

    async def active(self) -> Sequence[BatchRecord]:
        """Return the active batches of all keys."""

    async def active_ids(self, key_id: str) -> Sequence[str]:
        """Return the IDs of the active batches of a key. No record is read."""

    async def make_room(self, key_id: str, most: int) -> int:
        """If a key has `most` batches, delete those that ended first. Return the number that it may add."""

    async def put_validated(
        self, record: BatchRecord, validated: Validated, lines: Sequence[LineRef]
    ) -> None:
        """Write the validation of the input file, and its chunks. The first writer wins."""

    async def validated(self, record: BatchRecord) -> Validated | None:
        """Return the validation of the input file. If it is damaged, it has a mistake."""

    async def index(self, record: BatchRecord, lines: Sequence[LineRef] | None = None) -> Index:
        """Return the index of lines and chunks. Call it only after `put_validated`.

        Args:
            record: the batch.
            lines: all lines, if the stored index is lost. The chunks are still the stored ones.
        """

    async def cancel(self, record: BatchRecord, at: int) -> None:
        """Request the cancellation of a batch. Idempotent."""

    async def cancelled_at(self, record: BatchRecord) -> int | None:
        """Return the time of the cancellation request (of the creation, if it is damaged); None without a request."""

    def log(self, record: BatchRecord, chunk: int, lines: range) -> Log:
        """Return the log of a chunk, not yet read."""

    async def progress(self, record: BatchRecord, validated: Validated) -> Progress:
        """Return the progress in the logs of a batch. It never decreases. Each part is read once."""

    async def put_final(self, record: BatchRecord, final: Final) -> Final:
        """Write the end of a batch. Return the one that counts, which is the first."""

    async def final(self, record: BatchRecord) -> Final | None:
        """Return the end of a batch. If it is damaged, the batch has failed, with a mistake."""

    async def forget_active(self, record: BatchRecord) -> None:
        """Remove the logs, the index and the marker of an ended batch."""


class QueueDown(Exception):
    """Redis does not answer, or must not be used now. It may have executed the call."""


def flow_of(key_id: str, model: str) -> str:
    """Return the name of a flow: the lines of a key for a model.

    Models of two keys may have the same name and belong to different services.
    """
    return f"{key_id}/{model}"  # an ID of a key has no slash


class Route(NamedTuple):
    """Where the lines of a flow go."""

    name: str
    """The service, or the flow while the service is unknown."""
    wake: str | None = None
    """Wake header of all lines for the service; None: each batch wakes it at its own time."""
    start_p90_s: int | None = None
    """The time in which the service starts; None if it is not known."""


@dataclass(frozen=True, slots=True)
class Held:
    """A chunk that a process holds: no other process takes it while it is renewed."""

    batch: BatchRecord
    """The batch, without its metadata, which no worker needs."""
    model: str
    chunk: int
    entry: str
    """ID of the entry in the stream of the batch."""

    @property
    def flow(self) -> str:
        """Return the flow of its lines."""
        return flow_of(self.batch.key_id, self.model)


@dataclass(frozen=True, slots=True)
class Waiting:
    """The chunks of a batch in Redis."""

    held: int
    """Chunks that processes hold."""


class Queue(Protocol):
    """The queue of chunks, which may be incomplete, doubled or old. Every method may raise `QueueDown`."""

    @property
    def server(self) -> int:
        """Return a number that changes after a restart of Redis.

        Then all chunks whose log is not closed must be added again.
        """

    async def add(self, record: BatchRecord, model: str, chunks: Iterable[int]) -> None:
        """Queue chunks of a batch, except those that wait or are held already. QueueDown if Redis is full."""

    async def keys(self) -> Mapping[str, int]:
        """Return the keys with waiting chunks, each with its running lines on all pods."""

    async def take(
        self, key_id: str, most: int, skip: Collection[str] = (), *, before: float | None = None
    ) -> Sequence[Held]:
        """Hold waiting chunks of a key, the earliest deadline first.

        Args:
            key_id: the key.
            most: maximum number of chunks. One call takes at most 500.
            skip: flows whose chunks are not taken.
            before: Unix seconds; only batches with an earlier deadline.
        """

    async def renew(self, held: Iterable[Held], running: Mapping[str, int]) -> set[Held]:
        """Renew the chunks that this process holds; return those that it no longer holds.

        Args:
            held: all chunks of this process. A chunk that is not renewed for 60 s waits again.
            running: running lines of this process, by key.
        """

    async def give_back(self, held: Iterable[Held]) -> None:
        """Return chunks to the queue. Chunks that are no longer ours are ignored."""

    async def done(self, held: Held) -> None:
        """Remove a chunk whose log is closed."""

    async def release(self, process: str) -> None:
        """Return all chunks of an ended process to the queue."""

    async def state(self, record: BatchRecord) -> Waiting | None:
        """Return the chunks of a batch, those not renewed in time included; None if Redis has no such batch."""

    async def emptied(self) -> Sequence[str]:
        """Return the IDs of batches whose last chunk was finished since the last call."""

    async def remove(self, record: BatchRecord) -> None:
        """Remove a batch from the queue."""

    async def leads(self, what: str) -> bool:
        """Take or renew a lease of 30 s for a task of one process. Two holders do no harm."""

    async def resign(self, what: str) -> None:
        """Release the lease of a task, if it is ours."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a line."""

    status: int
    body: bytes
    request_id: str
    retry_after_s: float | None = None
    refused: str | None = None
    """Error code of the gateway's own refusal; None if the service answered."""


class NotAnswered(Exception):
    """A request got no answer. `sent`: an engine may have worked on it."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class AnswerTooLarge(NotAnswered):
    """The answer to a request exceeds the maximum size. A retry would get the same answer."""

    def __init__(self, most: int) -> None:
        super().__init__(f"the answer has more than {most} bytes", sent=True)
        self.most = most


class Sender(Protocol):
    """Sends lines to the OpenAI-compatible URL of the settings."""

    async def send(
        self, key_id: str, endpoint: str, body: bytes, wake: str | None = None
    ) -> Answer:
        """Send a request in tier batch, on behalf of a key.

        `wake` is the wake header for the gateway; None if the request wakes no service.

        Raises:
            AnswerTooLarge: if the answer has too many bytes.
            NotAnswered: if no complete answer came.
        """

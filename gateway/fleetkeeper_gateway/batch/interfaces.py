"""What the parts of the process know of one another.

The store is the truth. Redis knows which chunks wait, and may lose it at any time.

The order of writes, which every part relies on:

1. An input file: its bytes, then its record.
2. A batch: its marker in `active`, then its record by a conditional put, then the 200. Validation
   writes the index of lines, then `Validated` by a conditional put. The lines are cut into chunks there.
3. Results: parts of the log of their chunk, each created if absent (`Log`). A part never changes. The
   last one closes the log.
4. The end, once all logs are closed: output and error files under new IDs, then `Final` by a
   conditional put, then what Redis knows of the batch goes, then its logs and its index, then the marker.

So each later object proves the earlier ones, and Redis can be emptied at any time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

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

    async def list(self, prefix: str) -> Sequence[Object]:
        """Return the objects below a prefix that ends in `/`, sorted by path."""

    async def delete(self, paths: Iterable[str]) -> None:
        """Delete objects. Those that do not exist are ignored."""


class Files(Protocol):
    """The files of all keys. A file of another key does not exist."""

    async def put(self, record: FileRecord) -> None:
        """Make a file whose bytes were written exist."""

    async def get(
        self, key_id: str, file_id: str, *, may_be_expired: bool = False
    ) -> FileRecord | None:
        """Return a file; None if the key has none of that ID.

        One that has expired stays until the batches whose input it is have ended.
        """

    async def list(self, key_id: str) -> Sequence[FileRecord]:
        """Return the files of a key, newest first."""

    async def usage(self, key_id: str) -> Usage:
        """Return what a key has stored, without the changes of other replicas in the last minute."""

    async def delete(self, key_id: str, file_id: str) -> bool:
        """Delete a file. Return whether it existed."""

    def data_path(self, key_id: str, file_id: str) -> str:
        """Return the path of a file's bytes."""


class Log(Protocol):
    """The results of one chunk, as one reader and writer knows them.

    Part n is created if absent, by a writer that has read the parts 0 to n-1, and has only lines that
    none of them has. A writer whose part exists reads that part, drops the lines that it has, and tries
    n+1. After a part that closes the log, everything is dropped. So each line has at most one result,
    whoever writes, however late. Neither Redis nor a clock nor a lease takes part in this rule.

    Every method may raise `StorageError`. Then nothing is known of what was written; the same call may be
    repeated.
    """

    @property
    def lines(self) -> range:
        """Return the numbers of the lines of the chunk."""

    @property
    def closed(self) -> bool:
        """Return whether the log is known to be closed."""

    @property
    def done(self) -> AbstractSet[int]:
        """Return the lines that are known to have a result."""

    @property
    def counts(self) -> Counts:
        """Return how many lines there are, and how many of them are known to be completed or failed."""

    def troubles(self, line: int, trouble: Trouble) -> int:
        """Return how many attempts of a line are known to have ended so."""

    async def read(self) -> None:
        """Read the parts that were not read yet."""

    async def append(
        self, results: Sequence[Result], attempts: Sequence[Attempt] = (), *, close: bool = False
    ) -> AbstractSet[int]:
        """Write results and attempts, durably. Close the log if asked to, once each line has a result.

        Results of lines that have one are dropped. Nothing is written if nothing is left to write. If a
        damaged part took results away meanwhile, the log stays open: see `closed` and `done`.

        Returns:
            The lines whose result of this call counts.
        """

    def results(self, *, ok: bool | None = None) -> AsyncIterator[Result]:
        """Return all results in the order of their lines, or only those that are ok, or are not.

        At most 16 MiB and one result are in memory. Call `read` before.
        """


class Index(Sequence[LineRef]):
    """Where the lines of an input file are, and how they are cut into chunks."""

    @property
    @abstractmethod
    def chunks(self) -> Sequence[range]:
        """Return the numbers of the lines of each chunk."""


class Batches(Protocol):
    """The batches of all keys, as their objects."""

    async def create(self, record: BatchRecord) -> bool:
        """Write the marker and the record. Return False if the ID exists."""

    async def get(self, key_id: str, batch_id: str) -> BatchRecord | None:
        """Return a batch; None if the key has none of that ID."""

    async def ids(self, key_id: str) -> Sequence[str]:
        """Return the IDs of the batches of a key, newest first. No record is read."""

    async def several(self, key_id: str, batch_ids: Sequence[str]) -> Sequence[BatchRecord]:
        """Return batches of a key in this order, without those that are gone or broken."""

    async def active(self) -> Sequence[BatchRecord]:
        """Return the batches that have not ended, of all keys."""

    async def active_ids(self, key_id: str) -> Sequence[str]:
        """Return the IDs of the batches of a key that have not ended. No record is read."""

    async def make_room(self, key_id: str, most: int) -> int:
        """Delete the batches of a key that ended first, if it has `most`. Return how many it may add."""

    async def put_validated(
        self, record: BatchRecord, validated: Validated, lines: Sequence[LineRef]
    ) -> None:
        """Keep what the input file was found to be, and its chunks. The first one that is kept counts."""

    async def validated(self, record: BatchRecord) -> Validated | None:
        """Return what the input file was found to be. If that is damaged, it has a mistake."""

    async def index(self, record: BatchRecord, lines: Sequence[LineRef] | None = None) -> Index:
        """Return where the lines and chunks are. Only after `put_validated`.

        Args:
            record: the batch.
            lines: all lines, if the kept index is gone. The chunks stay those that were kept.
        """

    async def cancel(self, record: BatchRecord, at: int) -> None:
        """Ask for the end of a batch. Idempotent."""

    async def cancelled_at(self, record: BatchRecord) -> int | None:
        """Return when the end was asked for. If that is damaged, it was asked for at any time."""

    def log(self, record: BatchRecord, chunk: int, lines: range) -> Log:
        """Return the log of a chunk, of which nothing was read yet."""

    async def progress(self, record: BatchRecord, validated: Validated) -> Progress:
        """Return what the logs of a batch have. It never goes back. Parts are read once."""

    async def put_final(self, record: BatchRecord, final: Final) -> Final:
        """Keep how the batch ended. Return the one that counts: the first that was kept."""

    async def final(self, record: BatchRecord) -> Final | None:
        """Return how the batch ended. If that is damaged, it has failed, with a mistake."""

    async def forget_active(self, record: BatchRecord) -> None:
        """Remove the marker of a batch that has ended, and its logs and index."""


class QueueDown(Exception):
    """Redis does not answer, or must not be used now. It may have done what it was asked."""


def flow_of(key_id: str, model: str) -> str:
    """Return the name of a flow: the lines of a key for a model.

    The models of two keys may have one name and be of two services.
    """
    return f"{key_id}/{model}"  # an ID of a key has no slash


@dataclass(frozen=True, slots=True)
class Held:
    """A chunk that a process holds: others do not take it while it is renewed."""

    batch: BatchRecord
    """Without its metadata, which no worker needs."""
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
    """What Redis knows of a batch."""

    held: int
    """Chunks that processes hold."""


class Queue(Protocol):
    """Which chunks wait, as advice: it may be lost, doubled or old. Every method may raise `QueueDown`."""

    @property
    def server(self) -> int:
        """Return a number that changes when Redis was started again.

        Then all chunks whose log is not closed are to be added again.
        """

    async def add(self, record: BatchRecord, model: str, chunks: Iterable[int]) -> None:
        """Queue chunks of a batch. Those that wait or are held stay so. QueueDown if Redis has no room."""

    async def keys(self) -> Mapping[str, int]:
        """Return the keys that have waiting chunks, with the lines of theirs that run, on all pods."""

    async def take(
        self, key_id: str, most: int, skip: Collection[str] = (), *, before: float | None = None
    ) -> Sequence[Held]:
        """Hold waiting chunks of a key, those with the earliest deadline first.

        Args:
            key_id: the key.
            most: number of chunks, of which one call holds 500 at most.
            skip: flows of which none is taken.
            before: only of batches whose deadline is earlier than this, in Unix seconds.
        """

    async def renew(self, held: Iterable[Held], running: Mapping[str, int]) -> set[Held]:
        """Renew what this process still holds; return what it does not hold any more.

        Args:
            held: every chunk of this process. What nobody renews for 60 s waits again.
            running: lines of this process that run, by key.
        """

    async def give_back(self, held: Iterable[Held]) -> None:
        """Let chunks wait again. Those that are no longer ours stay where they are."""

    async def done(self, held: Held) -> None:
        """Forget a chunk whose log is closed."""

    async def release(self, process: str) -> None:
        """Let all chunks wait again that a process held, which has ended."""

    async def state(self, record: BatchRecord) -> Waiting | None:
        """Return what waits of a batch, also what nobody renews; None if Redis does not know it."""

    async def emptied(self) -> Sequence[str]:
        """Return the IDs of batches whose last chunk was done since the last call."""

    async def remove(self, record: BatchRecord) -> None:
        """Forget a batch."""

    async def leads(self, what: str) -> bool:
        """Take or renew a lease of 30 s for a task that one process does. Two may do it without harm."""

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


class AnswerTooLarge(NotAnswered):
    """A request got an answer of more bytes than are kept. Another one would get the same."""

    def __init__(self, most: int) -> None:
        super().__init__(f"the answer has more than {most} bytes", sent=True)
        self.most = most


class Sender(Protocol):
    """Sends one line to the OpenAI-compatible URL of the settings."""

    async def send(self, key_id: str, endpoint: str, body: bytes) -> Answer:
        """Send a request in tier batch, on behalf of a key.

        Raises:
            AnswerTooLarge: if the answer has too many bytes.
            NotAnswered: if no complete answer came.
        """

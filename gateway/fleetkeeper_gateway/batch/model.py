"""Values that the parts of the process exchange. Pure: no library, no I/O."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_LINES = 50_000
MAX_FILE_BYTES = 209_715_200
MAX_ATTEMPTS = 5
"""Maximum attempts of a line that were sent and got no proper answer; 429 and 503 do not count."""
MAX_KILLS = 2
"""Maximum worker processes that may end while they handle the answer of a line, before it fails."""
MAX_CHUNK_LINES = 256
MAX_CHUNK_BYTES = 4_194_304
"""Maximum input of a chunk. A longer line is a chunk of its own."""
MAX_PART_BYTES = 16_777_216


class Status(enum.StrEnum):
    """Status of a batch, as OpenAI's API names it."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a key. It exists once its record exists; its bytes never change."""

    id: str
    """`file-` and 32 hexadecimal digits."""
    key_id: str
    filename: str
    purpose: str
    """batch or batch_output."""
    bytes: int
    created: int
    """Unix seconds."""
    expires: int | None = None
    """Unix seconds after which it may be deleted; None: by the retention of the settings."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Files and bytes that a key has stored."""

    files: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch as it was created. It never changes."""

    id: str
    """`batch_` and 32 hexadecimal digits."""
    key_id: str
    input_file: str
    endpoint: str
    """Path of every line, such as /v1/chat/completions."""
    completion_window: str
    """As the client sent it, such as 24h."""
    created: int
    """Unix seconds."""
    expires: int
    """Unix seconds: the end of the completion window."""
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)
    output_expires_after: int | None = None
    """Seconds after which the output files expire; None: by the retention of the settings."""


@dataclass(frozen=True, slots=True)
class LineRef:
    """The position of a line in the input file."""

    number: int
    """From 0. Empty lines have no number."""
    offset: int
    length: int
    """Bytes, without the end of the line."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake in an input file, as `errors` of a failed batch lists it."""

    code: str
    message: str
    line: int | None = None
    """From 1, as OpenAI counts."""
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Validated:
    """The result of validating the input file. It never changes."""

    lines: int
    model: str
    """The common model of all lines; empty if there are mistakes."""
    tokens: int
    """Estimated tokens of all lines, by the formula of the limits."""
    at: int
    """Unix seconds."""
    mistakes: tuple[Mistake, ...] = ()
    """At most 100 mistakes. With any mistake the batch fails and no line runs."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one line in a part of a chunk's log."""

    line: int
    ok: bool
    """True if it belongs in the output file; otherwise in the error file."""
    text: bytes
    """The line of the output or error file, JSON without an end of line."""
    ran: bool = True
    """False if the batch ended first. Then the line counts neither as completed nor as failed."""


class Trouble(enum.IntEnum):
    """The end of an attempt without an answer."""

    FAILED = 0
    """The line was sent, and got no proper answer."""
    KILLED = 1
    """The process that handled the answer ended."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt of a line that counts."""

    line: int
    trouble: Trouble


@dataclass(frozen=True, slots=True)
class Counts:
    """Progress of a batch, in lines."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress in the logs of a batch: the written results, and the open chunks."""

    counts: Counts
    open: frozenset[int]
    """Chunks whose log is not closed."""


@dataclass(frozen=True, slots=True)
class Final:
    """The end of a batch. Created once; a second writer reads it."""

    status: Status
    """completed, expired, cancelled or failed."""
    at: int
    """Unix seconds."""
    counts: Counts
    output_file: str | None = None
    error_file: str | None = None
    mistakes: tuple[Mistake, ...] = ()
    """Reasons of the failure, without the mistakes in its input file."""

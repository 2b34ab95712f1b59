"""Paths of objects, made only of checked parts, so that no ID leads out of its key. Pure.

keys/KEY/files/FILE/data               bytes of a file
keys/KEY/files/FILE/file.json          its record: the file exists once this does
keys/KEY/batches/BATCH/batch.json      its record: the batch exists once this does
keys/KEY/batches/BATCH/lines-DIGEST    index: positions of the lines of the input file
keys/KEY/batches/BATCH/chunks.json     validation of the input file, and its chunks
keys/KEY/batches/BATCH/cancel.json     time of the cancellation request
keys/KEY/batches/BATCH/final.json      end of the batch
keys/KEY/logs/BATCH/CHUNK-PART         results of a chunk, immutable
keys/KEY/logs/BATCH/CHUNK-PART.damaged marker: the part counts as empty
active/KEY/BATCH                       marker: the batch may not have ended
staging/                               in a directory: files that have no name yet

Results are not below their batch, so that a list of a key's batches does not contain all parts.

A batch of an earlier version may have `validated.json` and `keys/KEY/segments/BATCH/`. Nothing reads them. If
it has not ended, it starts again from its input. Segments are deleted an hour after its end.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from fleetkeeper_gateway.batch.interfaces import Object

KEYS: Final = "keys/"
ACTIVE: Final = "active/"
STAGING: Final = "staging/"
DATA: Final = "data"
FILE_RECORD: Final = "file.json"
BATCH_RECORD: Final = "batch.json"
VALIDATED: Final = "chunks.json"
CANCEL: Final = "cancel.json"
FINAL: Final = "final.json"
DAMAGED: Final = ".damaged"

Group = Mapping[str, Object]
"""Objects of a file or batch by the last part of their path."""

# A key's ID is the name of a Secret, which Kubernetes limits to a DNS subdomain.
_KEY = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_FILE = re.compile(r"file-[0-9a-f]{32}")
_BATCH = re.compile(r"batch_[0-9a-f]{32}")
_LOG_PART = re.compile(r"[0-9]{5}-[0-9]{4}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")


class BadPart(ValueError):
    """A key ID, file ID, batch ID or path is not allowed in a path."""


def checked(path: str) -> str:
    """Return a path below the root of the store.

    Raises:
        BadPart: if a part is empty, begins with a dot, or has characters that are not allowed.
    """
    if not all(map(_PART.fullmatch, path.split("/"))):
        raise BadPart(f"{path[:80]!r} is no path of the store")
    return path


def is_key_id(text: str) -> bool:
    """Return whether this is a valid key ID."""
    return _KEY.fullmatch(text) is not None


def is_file_id(text: str) -> bool:
    """Return whether this is a valid file ID."""
    return _FILE.fullmatch(text) is not None


def is_batch_id(text: str) -> bool:
    """Return whether this is a valid batch ID."""
    return _BATCH.fullmatch(text) is not None


def key_root(key_id: str) -> str:
    """Return the prefix of everything that belongs to a key."""
    return f"{KEYS}{_part(_KEY, 'key ID', key_id)}/"


def files_of(key_id: str) -> str:
    """Return the prefix of the files of a key."""
    return f"{key_root(key_id)}files/"


def file_object(key_id: str, file_id: str, name: str) -> str:
    """Return the path of an object of a file: `DATA` or `FILE_RECORD`."""
    return f"{files_of(key_id)}{_part(_FILE, 'file ID', file_id)}/{name}"


def batches_of(key_id: str) -> str:
    """Return the prefix of the batches of a key."""
    return f"{key_root(key_id)}batches/"


def batch_object(key_id: str, batch_id: str, name: str) -> str:
    """Return the path of an object of a batch; without a name, the prefix of its objects."""
    return f"{batches_of(key_id)}{_part(_BATCH, 'batch ID', batch_id)}/{name}"


def index(key_id: str, batch_id: str, digest: str) -> str:
    """Return the path of an index of lines."""
    return batch_object(key_id, batch_id, f"lines-{_part(_DIGEST, 'digest', digest)}")


def logs_of(key_id: str, batch_id: str) -> str:
    """Return the prefix of the results of a batch."""
    return f"{key_root(key_id)}logs/{_part(_BATCH, 'batch ID', batch_id)}/"


def log_part(key_id: str, batch_id: str, chunk: int, number: int) -> str:
    """Return the path of a part of a chunk's log."""
    name = f"{chunk:05}-{number:04}"
    return f"{logs_of(key_id, batch_id)}{_part(_LOG_PART, 'part of a log', name)}"


def markers_of(key_id: str) -> str:
    """Return the prefix of the markers of a key."""
    return f"{ACTIVE}{_part(_KEY, 'key ID', key_id)}/"


def marker(key_id: str, batch_id: str) -> str:
    """Return the path of the marker of a batch."""
    return f"{markers_of(key_id)}{_part(_BATCH, 'batch ID', batch_id)}"


def parse_marker(path: str) -> tuple[str, str] | None:
    """Return the key ID and batch ID of a marker's path; None for other paths."""
    key_id, _, batch_id = path.removeprefix(ACTIVE).partition("/")
    if path.startswith(ACTIVE) and is_key_id(key_id) and is_batch_id(batch_id):
        return key_id, batch_id
    return None


def by_owner(objects: Iterable[Object]) -> Mapping[str, Group]:
    """Group the objects below a key by the file or batch that they belong to, and by name.

    Objects in other places are left out.
    """
    groups: defaultdict[str, dict[str, Object]] = defaultdict(dict)
    for stored in objects:
        places = stored.path.split("/")
        if len(places) == 5 and (is_file_id(places[3]) or is_batch_id(places[3])):
            groups[places[3]][places[4]] = stored
    return dict(groups)


def not_needed(objects: Iterable[Object]) -> list[Object]:
    """Return the objects that an ended batch does not need: its logs and indexes."""
    return [stored for stored in objects if not stored.path.endswith(".json")]


def _part(pattern: re.Pattern[str], what: str, text: str) -> str:
    if not pattern.fullmatch(text):
        raise BadPart(f"{text[:80]!r} is no {what}")
    return text

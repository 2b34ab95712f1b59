"""Where objects are. A path is made of checked parts alone, so that no ID leads out of its key. Pure.

keys/KEY/files/FILE/data               bytes of a file
keys/KEY/files/FILE/file.json          its record: the file exists once this does
keys/KEY/batches/BATCH/batch.json      what was asked for: the batch exists once this does
keys/KEY/batches/BATCH/lines-DIGEST    where the lines of the input file are
keys/KEY/batches/BATCH/validated.json  what the input file was found to be
keys/KEY/batches/BATCH/cancel.json     when the end was asked for
keys/KEY/batches/BATCH/final.json      how the batch ended
keys/KEY/segments/BATCH/SEGMENT        results, immutable
active/KEY/BATCH                       marker: the batch may not have ended

Results are not below their batch: who lists the batches of a key must not list all their segments.
"""

from __future__ import annotations

import re
from typing import Final

KEYS: Final = "keys/"
ACTIVE: Final = "active/"
DATA: Final = "data"
FILE_RECORD: Final = "file.json"
BATCH_RECORD: Final = "batch.json"
VALIDATED: Final = "validated.json"
CANCEL: Final = "cancel.json"
FINAL: Final = "final.json"
INDEX_PREFIX: Final = "lines-"

# A key's ID is the name of a Secret, which Kubernetes limits to a DNS subdomain.
_KEY = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_FILE = re.compile(r"file-[0-9a-f]{32}")
_BATCH = re.compile(r"batch_[0-9a-f]{32}")
# Fences had 12 digits in earlier versions. A batch may have segments of both.
_SEGMENT = re.compile(r"[0-9a-f]{16}-[0-9a-f]{7}|[0-9a-f]{12}-[0-9a-f]{11}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")


class BadPart(ValueError):
    """A key ID, file ID, batch ID or path that must not become part of a path."""


def checked(path: str) -> str:
    """Return a path below the root of the store.

    Raises:
        BadPart: if a part of it is empty, begins with a dot, or has other characters.
    """
    if not all(map(_PART.fullmatch, path.split("/"))):
        raise BadPart(f"{path[:80]!r} is no path of the store")
    return path


def checked_prefix(prefix: str) -> str:
    """Return a prefix that ends in `/`. Raise `BadPart` if it does not, or is no path."""
    checked(prefix.removesuffix("/"))
    if not prefix.endswith("/"):
        raise BadPart(f"{prefix[:80]!r} must end in /")
    return prefix


def is_key_id(text: str) -> bool:
    """Return whether a key may have this ID."""
    return _KEY.fullmatch(text) is not None


def is_file_id(text: str) -> bool:
    """Return whether a file may have this ID."""
    return _FILE.fullmatch(text) is not None


def is_batch_id(text: str) -> bool:
    """Return whether a batch may have this ID."""
    return _BATCH.fullmatch(text) is not None


def key_root(key_id: str) -> str:
    """Return the prefix of everything that belongs to a key."""
    return f"{KEYS}{_part(_KEY, 'key ID', key_id)}/"


def files_of(key_id: str) -> str:
    """Return the prefix of the files of a key."""
    return f"{key_root(key_id)}files/"


def file_object(key_id: str, file_id: str, name: str) -> str:
    """Return the path of one of the two objects of a file: `DATA` or `FILE_RECORD`."""
    return checked(f"{files_of(key_id)}{_part(_FILE, 'file ID', file_id)}/{name}")


def batches_of(key_id: str) -> str:
    """Return the prefix of the batches of a key."""
    return f"{key_root(key_id)}batches/"


def batch_root(key_id: str, batch_id: str) -> str:
    """Return the prefix of the objects of a batch, without its results."""
    return f"{batches_of(key_id)}{_part(_BATCH, 'batch ID', batch_id)}/"


def batch_object(key_id: str, batch_id: str, name: str) -> str:
    """Return the path of an object of a batch."""
    return checked(f"{batch_root(key_id, batch_id)}{name}")


def index(key_id: str, batch_id: str, digest: str) -> str:
    """Return the path of an index of lines."""
    name = f"{INDEX_PREFIX}{_part(_DIGEST, 'digest', digest)}"
    return batch_object(key_id, batch_id, name)


def all_segments_of(key_id: str) -> str:
    """Return the prefix of the results of all batches of a key."""
    return f"{key_root(key_id)}segments/"


def segments_of(key_id: str, batch_id: str) -> str:
    """Return the prefix of the results of a batch."""
    return f"{all_segments_of(key_id)}{_part(_BATCH, 'batch ID', batch_id)}/"


def segment(key_id: str, batch_id: str, name: str) -> str:
    """Return the path of a segment."""
    return f"{segments_of(key_id, batch_id)}{_part(_SEGMENT, 'segment', name)}"


def markers_of(key_id: str) -> str:
    """Return the prefix of the markers of a key."""
    return f"{ACTIVE}{_part(_KEY, 'key ID', key_id)}/"


def marker(key_id: str, batch_id: str) -> str:
    """Return the path of the marker of a batch."""
    return f"{markers_of(key_id)}{_part(_BATCH, 'batch ID', batch_id)}"


def parse_marker(path: str) -> tuple[str, str] | None:
    """Return the key ID and batch ID of a marker; None if the path is not one of a marker."""
    key_id, _, batch_id = path.removeprefix(ACTIVE).partition("/")
    if path.startswith(ACTIVE) and is_key_id(key_id) and is_batch_id(batch_id):
        return key_id, batch_id
    return None


def _part(pattern: re.Pattern[str], what: str, text: str) -> str:
    if not pattern.fullmatch(text):
        raise BadPart(f"{text[:80]!r} is no {what}")
    return text

"""Readers of fields of live objects, which anybody may have written.

There are two kinds of fields. An optional field that cannot be read gets a default. A field that
identifies the object, or counts something, has no default: without it the whole object is
`Unreadable`, and its last readable state stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from sys import intern
from typing import Any, Final

Live = dict[str, Any]
"""An object of Kubernetes, decoded."""

TEXT_LIMIT: Final = 256
"""Characters kept of names, hashes, reasons and similar texts: Kubernetes' own are at most 253."""
MESSAGE_LIMIT: Final = 1024
"""Characters kept of messages in objects."""
LARGEST_COUNT: Final = 2**63 - 1
UNREAD: Final = "fleetkeeper.io/unread"
"""The top-level field that marks a stand-in for an object that was not read. No object has it."""
_DIGITS: Final = re.compile(r"[0-9]{1,19}")


class Unreadable(ValueError):
    """An unreadable field without a default; the message says which."""


@dataclass(frozen=True, slots=True)
class Place:
    """The identity and the version of an object that was seen."""

    kind: str
    namespace: str
    name: str
    version: int


def place_of(kind: str, live: Mapping[str, Any]) -> Place:
    """Return the identity of a namespaced object.

    Raises:
        Unreadable: its name or namespace cannot be read.
    """
    meta = required_map(live.get("metadata"), "metadata")
    return Place(
        kind=intern(str(kind)),
        namespace=intern(required_name(meta.get("namespace"), "metadata.namespace")),
        name=required_name(meta.get("name"), "metadata.name"),
        version=version_of(live),
    )


def stand_in(why: str, **metadata: str) -> Live:
    """Return the stand-in for an object that was not read, with its known metadata."""
    return {"metadata": metadata, UNREAD: why}


def required_map(value: object, where: str) -> Mapping[str, Any]:
    """Return the mapping; empty if there is none.

    Raises:
        Unreadable: the value is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Unreadable(f"{where} is not an object")
    return value


def required_name(value: object, where: str) -> str:
    """Return a name, UID or namespace.

    Raises:
        Unreadable: it is missing, is not a string, or is longer than any in Kubernetes.
    """
    if not isinstance(value, str) or not 0 < len(value) <= TEXT_LIMIT:
        raise Unreadable(f"{where} is not a valid name")
    return value


def required_count(value: object, where: str, default: int = 0) -> int:
    """Return a count; `default` if there is none.

    Raises:
        Unreadable: it is not a non-negative 64-bit integer.
    """
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_COUNT:
        raise Unreadable(f"{where} is not a non-negative integer")
    return value


def version_of(live: Mapping[str, Any]) -> int:
    """Return the resourceVersion as a number: Kubernetes promises that greater is newer (KEP-5504).

    It is 0 if it is missing or not a number.
    """
    return digits(as_map(live.get("metadata")).get("resourceVersion"))


def digits(value: object) -> int:
    """Return the number in a string of ASCII digits; 0 for anything else, even other digits."""
    text = value if isinstance(value, str) else ""
    return int(text) if _DIGITS.fullmatch(text) else 0


def count(value: object) -> int:
    """Return a count; 0 if it cannot be read."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > LARGEST_COUNT:
        return 0
    return value


def as_map(value: object) -> Mapping[str, Any]:
    """Return the mapping; empty for anything else."""
    return value if isinstance(value, Mapping) else {}


def maps(value: object) -> list[Mapping[str, Any]]:
    """Return the mappings of a list; empty for anything else."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def text(value: object, limit: int = TEXT_LIMIT) -> str:
    """Return the beginning of a string in a form that can be encoded; empty for anything else."""
    if not isinstance(value, str):
        return ""
    kept = value[:limit]
    return kept if kept.isascii() else kept.encode(errors="replace").decode()


def message(value: object) -> str:
    """Return the beginning of a message."""
    return text(value, MESSAGE_LIMIT)


def controller_uid(meta: Mapping[str, Any]) -> str | None:
    """Return the UID of the controller in the owner references; None if there is none."""
    for owner in maps(meta.get("ownerReferences")):
        if owner.get("controller"):
            return text(owner.get("uid")) or None
    return None

"""Reading fields of live objects that anybody may have written.

Two kinds of field are told apart. An optional field that cannot be read has a default. A field that
says which object this is, or how many of something there are, has none: then the whole object is
`Unreadable`, and what was known of it before stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from fleetkeeper.plan.model import Manifest

TEXT_LIMIT: Final = 256
"""Characters kept of names, hashes, reasons and the like: Kubernetes' own are at most 253."""
MESSAGE_LIMIT: Final = 1024
"""Characters kept of messages of others."""
LARGEST_COUNT: Final = 2**63 - 1
UNREAD: Final = "fleetkeeper.io/unread"
"""The top-level field of a stand-in for an object whose content was not read. No object has it."""
_DIGITS: Final = re.compile(r"[0-9]{1,19}")
_COST: Final = re.compile(r"[+-]?[0-9]{1,9}")


class Unreadable(ValueError):
    """Something of an object that has no default cannot be read; the message says what."""


def stand_in(why: str, **metadata: str) -> Manifest:
    """Return the stand-in for an object that was not read, with the metadata that is known."""
    return {"metadata": metadata, UNREAD: why}


def required_map(value: object, where: str) -> Mapping[str, Any]:
    """Return the mapping; empty where there is none.

    Raises:
        Unreadable: it is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Unreadable(f"{where} is not an object")
    return value


def required_name(value: object, where: str) -> str:
    """Return a name, UID or namespace.

    Raises:
        Unreadable: it is missing, is not a string, or is longer than any of Kubernetes.
    """
    if not isinstance(value, str) or not 0 < len(value) <= TEXT_LIMIT:
        raise Unreadable(f"{where} is not a name")
    return value


def required_count(value: object, where: str, default: int = 0) -> int:
    """Return a number of things; `default` where there is none.

    Raises:
        Unreadable: it is not a whole number of 64 bits that is zero or more.
    """
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_COUNT:
        raise Unreadable(f"{where} is not a count")
    return value


def version_of(live: Mapping[str, Any]) -> int:
    """Return the resourceVersion as a number: Kubernetes promises that greater is newer (KEP-5504).

    0 where it is missing or is not a number.
    """
    return digits(as_map(live.get("metadata")).get("resourceVersion"))


def digits(value: object) -> int:
    """Return the number that ASCII digits stand for; 0 for anything else, other scripts included."""
    text = value if isinstance(value, str) else ""
    return int(text) if _DIGITS.fullmatch(text) else 0


def cost(annotation: object) -> int:
    """Return a pod's deletion cost; 0 where it is not a number or one that leaves no room below."""
    text = annotation if isinstance(annotation, str) else ""
    return int(text) if _COST.fullmatch(text) else 0


def count(value: object) -> int:
    """Return a number of things; 0 where it cannot be read."""
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
    """Return the beginning of a string that can be encoded; empty for anything else."""
    if not isinstance(value, str):
        return ""
    kept = value[:limit]
    return kept if kept.isascii() else kept.encode(errors="replace").decode()


def message(value: object) -> str:
    """Return the beginning of a message."""
    return text(value, MESSAGE_LIMIT)


def seconds_of(timestamp: object) -> float | None:
    """Return the seconds since the epoch of an RFC 3339 time; None where there is no readable one."""
    if not isinstance(timestamp, str):
        return None
    try:
        return datetime.fromisoformat(timestamp).timestamp()
    except (ValueError, OverflowError):
        return None


def controller_uid(meta: Mapping[str, Any]) -> str | None:
    """Return the UID of the controller in the owner references, None where there is none."""
    for owner in maps(meta.get("ownerReferences")):
        if owner.get("controller"):
            return text(owner.get("uid")) or None
    return None

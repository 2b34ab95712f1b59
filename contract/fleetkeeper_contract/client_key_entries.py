"""Reading and writing the entries of a client key's Secret.

The gateway and `fleetkeeper keys` share it, so that a key that the command writes is one that the gateway
accepts. An error names the entry and the rule, never the value: people paste keys into wrong places.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fleetkeeper_contract import client_keys as entry
from fleetkeeper_contract import rfc3339
from fleetkeeper_contract.tiers import TIER_LABELS

DEFAULT_TIER = "standard"
MAX_LIST = 256
"""Longest list of namespaces or globs."""
MAX_LIMIT = 1_000_000_000

ENTRIES = frozenset(
    {
        entry.DIGEST,
        entry.OLD_UNTIL,
        entry.NAME,
        entry.NAMESPACES,
        entry.MODELS,
        entry.HIGHEST_TIER,
        entry.EXPIRES,
        entry.REQUESTS_PER_MINUTE,
        entry.TOKENS_PER_MINUTE,
        entry.CONCURRENCY,
    }
)
_KEY = re.compile(re.escape(entry.KEY_PREFIX) + "[A-Za-z0-9_-]{43}")
_DIGEST = re.compile("[0-9a-f]{64}")
_NAMESPACE = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_GLOB = re.compile(r"[A-Za-z0-9._:/*?\[\]!-]{1,256}")
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", flags=re.ASCII
)
_NUMBER = re.compile("[1-9][0-9]{0,9}")


class BadEntry(ValueError):
    """An entry that cannot be used. The message names it and its rule."""


@dataclass(frozen=True, slots=True)
class ClientKey:
    """The entries of a key's Secret."""

    name: str
    digests: tuple[str, ...]
    """SHA-256 in lower-case hexadecimal: one, or while the key rotates the old one and the new one."""
    namespaces: tuple[str, ...]
    models: tuple[str, ...] = ("*",)
    highest_tier: str = DEFAULT_TIER
    expires: float | None = None
    """Unix seconds."""
    old_until: float | None = None
    """Unix seconds. None: the old one is accepted until it is removed."""
    requests_per_minute: tuple[tuple[str, int], ...] = ()
    """Limits by tier. A tier that is absent has none."""
    tokens_per_minute: tuple[tuple[str, int], ...] = ()
    concurrency: tuple[tuple[str, int], ...] = ()


def new_key(random: bytes) -> str:
    """Return the key for `KEY_BYTES` random bytes.

    Raises:
        ValueError: the number of bytes is wrong.
    """
    if len(random) != entry.KEY_BYTES:
        raise ValueError(f"a key needs {entry.KEY_BYTES} random bytes")
    return entry.KEY_PREFIX + base64.urlsafe_b64encode(random).rstrip(b"=").decode()


def is_key(text: str) -> bool:
    """Return whether a text has the form of a key, so that no weak secret is one."""
    return _KEY.fullmatch(text) is not None


def digest_of(key: str) -> str:
    """Return the digest that the Secret holds for a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def decoded_entries(data: object) -> dict[str, str]:
    """Return the entries of a Secret's `data`.

    Raises:
        BadEntry: it is not a map of texts in base64.
    """
    if not isinstance(data, Mapping):
        raise BadEntry("the Secret has no data")
    found = {}
    for name, value in data.items():
        try:
            found[str(name)] = base64.b64decode(value, validate=True).decode()
        except (TypeError, ValueError, binascii.Error) as problem:
            raise BadEntry(f"{_shown(name)} is not UTF-8 text") from problem
    return found


def parse_entries(entries: Mapping[str, str], *, default_name: str) -> ClientKey:
    """Return the key that the entries describe.

    An unknown entry is an error: a misspelled `expires` must not make a key that never ends.

    Raises:
        BadEntry: an entry is missing, unknown or malformed.
    """
    unknown = sorted(entries.keys() - ENTRIES)
    if unknown:
        raise BadEntry(
            f"{_shown(unknown[0])} is not an entry of a key; known: {', '.join(sorted(ENTRIES))}"
        )
    values = {name: value.strip() for name, value in entries.items()}
    digests = _digests(values.get(entry.DIGEST, ""))
    old_until = _time(entry.OLD_UNTIL, values.get(entry.OLD_UNTIL))
    if old_until is not None and len(digests) != 2:
        raise BadEntry(f"{entry.OLD_UNTIL} needs two digests in {entry.DIGEST}, the old one first")
    return ClientKey(
        name=_name(values.get(entry.NAME) or default_name),
        digests=digests,
        namespaces=_namespaces(values.get(entry.NAMESPACES, "")),
        models=_models(values.get(entry.MODELS, "*")),
        highest_tier=_tier(entry.HIGHEST_TIER, values.get(entry.HIGHEST_TIER, DEFAULT_TIER)),
        expires=_time(entry.EXPIRES, values.get(entry.EXPIRES)),
        old_until=old_until,
        **{
            field: parse_limit(name, values[name]) if name in values else ()
            for field, name in _LIMITS.items()
        },
    )


_LIMITS = {
    "requests_per_minute": entry.REQUESTS_PER_MINUTE,
    "tokens_per_minute": entry.TOKENS_PER_MINUTE,
    "concurrency": entry.CONCURRENCY,
}


def entries_of(key: ClientKey) -> dict[str, str]:
    """Return the entries that describe a key. What has its default is left out."""
    found = {
        entry.DIGEST: ",".join(key.digests),
        entry.NAME: key.name,
        entry.NAMESPACES: ",".join(key.namespaces),
        entry.MODELS: ",".join(key.models),
        entry.HIGHEST_TIER: key.highest_tier,
    }
    for name, moment in ((entry.EXPIRES, key.expires), (entry.OLD_UNTIL, key.old_until)):
        if moment is not None:
            found[name] = rfc3339.format(moment)
    for field, name in _LIMITS.items():
        limits: tuple[tuple[str, int], ...] = getattr(key, field)
        if limits:
            found[name] = format_limit(limits)
    return found


def parse_limit(name: str, text: str) -> tuple[tuple[str, int], ...]:
    """Return the limits by tier of `100`, or of `realtime=20,standard=100`.

    Raises:
        BadEntry: it has another form.
    """
    if "=" not in text:
        return tuple((tier, _limit(name, text)) for tier in TIER_LABELS)
    found: dict[str, int] = {}
    for part in text.split(","):
        tier, _, number = part.partition("=")
        tier = _tier(name, tier.strip())
        if tier in found:
            raise BadEntry(f"{name} has the tier {tier} twice")
        found[tier] = _limit(name, number.strip())
    return tuple((tier, found[tier]) for tier in TIER_LABELS if tier in found)


def format_limit(limits: tuple[tuple[str, int], ...]) -> str:
    """Return limits as `parse_limit` reads them."""
    if len(limits) == len(TIER_LABELS) and len({number for _, number in limits}) == 1:
        return str(limits[0][1])
    return ",".join(f"{tier}={number}" for tier, number in limits)


def parse_time(name: str, text: str) -> float:
    """Return the Unix seconds of an RFC 3339 time.

    Raises:
        BadEntry: it has another form.
    """
    moment = rfc3339.parse(text.upper()) if _TIME.fullmatch(text) else None
    if moment is None:
        raise BadEntry(f"{name} is not an RFC 3339 time with a zone, such as 2030-01-31T00:00:00Z")
    return moment


def _time(name: str, text: str | None) -> float | None:
    return None if text is None else parse_time(name, text)


def _digests(text: str) -> tuple[str, ...]:
    found = tuple(part.strip().lower() for part in text.split(","))
    if not all(_DIGEST.fullmatch(part) for part in found):
        raise BadEntry(
            f"{entry.DIGEST} is not the SHA-256 of a key: 64 hexadecimal digits, or two such digests "
            "with a comma between them"
        )
    if len(found) > 2 or len(set(found)) != len(found):
        raise BadEntry(f"{entry.DIGEST} must have one digest, or two different ones")
    return found


def _name(text: str) -> str:
    if len(text) > 128 or not text.isprintable():
        raise BadEntry(f"{entry.NAME} must have at most 128 printable characters")
    return text


def _namespaces(text: str) -> tuple[str, ...]:
    found = _list(entry.NAMESPACES, text)
    if not all(_NAMESPACE.fullmatch(part) for part in found):
        raise BadEntry(
            f"{entry.NAMESPACES} must list names of namespaces, without patterns, such as team-a,team-b"
        )
    return found


def _models(text: str) -> tuple[str, ...]:
    found = _list(entry.MODELS, text)
    if not all(_GLOB.fullmatch(part) for part in found):
        raise BadEntry(
            f"{entry.MODELS} must list globs of model names (* and ?), such as llama-*,chat"
        )
    return found


def _list(name: str, text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if len(found) > MAX_LIST:
        raise BadEntry(f"{name} has more than {MAX_LIST} items")
    return found


def _tier(name: str, text: str) -> str:
    if text not in TIER_LABELS:
        raise BadEntry(f"{name} names no tier; the tiers are {', '.join(TIER_LABELS)}")
    return text


def _limit(name: str, text: str) -> int:
    if not _NUMBER.fullmatch(text) or int(text) > MAX_LIMIT:
        raise BadEntry(
            f"{name} must be a number from 1 to {MAX_LIMIT}, or a list such as realtime=20,standard=100"
        )
    return int(text)


def _shown(name: object) -> str:
    """Return the name of an entry, cut, in printable characters."""
    return ascii(str(name)[:40])[1:-1]

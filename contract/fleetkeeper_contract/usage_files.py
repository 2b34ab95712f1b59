"""Files with the usage of an hour: JSON lines that the gateway writes, and that `fleetkeeper usage` reads.

A file is named for the hour in UTC in which its lines were written: 2026-11-25T23.jsonl. Its lines
come in groups. The last line of a group is its commit: it has the member `cursors`. What follows the
last commit was cut off by a crash and does not count. Groups consist of

- entries, one for each attempt of a request: {"time", "attempt", "request", and the members of a sum
  apart from `hour` and `requests`};
- sums of requests of one hour: {"hour", "namespace", "service", "model", "tier", "key", "requests",
  "aborted", "prompt", "cached", "answer"}; `key` is null where no grant says who sent the request;
- losses: {"lost": entries, "hour", "namespace", "service", "prompt", "cached", "answer"}: what an
  engine counted and its ledger did not have any more.

A request counts in the hour in which it ended. Files of past hours keep sums only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

SUFFIX: Final = ".jsonl"
HOUR_FORMAT: Final = "%Y-%m-%dT%H"
HOUR_S: Final = 3600
DIMENSIONS: Final = ("key", "model", "tier", "service")
"""Dimensions by which usage can be grouped. A service is NAMESPACE/NAME."""
COUNTS: Final = ("requests", "aborted", "prompt", "cached", "answer")


class BadUsageQueryError(ValueError):
    """A query for usage that cannot be answered. The message says what to change."""


def hour_of(time: float) -> str:
    """Return the name of the hour of Unix seconds."""
    return datetime.fromtimestamp(time, UTC).strftime(HOUR_FORMAT)


def parse_hour(name: str) -> float:
    """Return the Unix seconds at which an hour begins.

    Raises:
        ValueError: if it is not the name of an hour.
    """
    return datetime.strptime(name, HOUR_FORMAT).replace(tzinfo=UTC).timestamp()


def file_of(hour: str) -> str:
    """Return the name of an hour's file."""
    return f"{hour}{SUFFIX}"


def hours_of_files(names: Iterable[str]) -> list[str]:
    """Return the hours of those names that are files of usage, in order."""
    found = []
    for name in names:
        if name.endswith(SUFFIX):
            try:
                parse_hour(name.removesuffix(SUFFIX))
            except ValueError:
                continue
            found.append(name.removesuffix(SUFFIX))
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The dimensions of a sum of tokens within an hour."""

    namespace: str
    service: str
    model: str = ""
    tier: str | None = None
    key: str | None = None
    """None: unattributed."""


@dataclass(slots=True)
class Counts:
    """Requests and their tokens."""

    requests: int = 0
    aborted: int = 0
    prompt: int = 0
    cached: int = 0
    answer: int = 0

    def add(self, other: Counts) -> None:
        """Add another's counts."""
        self.requests += other.requests
        self.aborted += other.aborted
        self.prompt += other.prompt
        self.cached += other.cached
        self.answer += other.answer

    def document(self) -> dict[str, int]:
        """Return them by name."""
        return {name: getattr(self, name) for name in COUNTS}


@dataclass(frozen=True, slots=True)
class Line:
    """An entry, a sum or a loss."""

    hour: str
    dimensions: Dimensions
    counts: Counts
    """The counts. In a loss, `requests` is the number of lost entries."""
    lost: bool = False


def parse_line(found: Mapping[str, Any]) -> Line:
    """Return the counts of a line that is no commit.

    Raises:
        ValueError: if it is none of the lines above.
    """
    try:
        hour = found["hour"] if "hour" in found else hour_of(found["time"])
        parse_hour(hour)
        lost = "lost" in found
        requests = found["lost"] if lost else found.get("requests", 1)
        counts = [requests, int(found.get("aborted", 0)), *(found[name] for name in COUNTS[2:])]
        place = Dimensions(
            found["namespace"],
            found["service"],
            found.get("model", ""),
            found.get("tier"),
            found.get("key"),
        )
    except (KeyError, TypeError, ValueError, OverflowError, OSError) as problem:
        raise ValueError(f"not a line of usage: {type(problem).__name__} {problem}") from problem
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("not a line of usage: a count is no number from 0")
    return Line(hour, place, Counts(*counts), lost)


def committed(lines: Iterable[bytes]) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Yield the whole groups of a file, each with the number of bytes up to its end.

    Everything after the first line that is not whole is left out.
    """
    group: list[dict[str, Any]] = []
    size = 0
    for line in lines:
        size += len(line)
        try:
            found = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            return
        if not isinstance(found, dict):
            return
        group.append(found)
        if "cursors" in found:
            yield group, size
            group = []


def lines_of(file: Iterable[bytes]) -> Iterator[Line]:
    """Yield the counts of a file."""
    for group, _ in committed(file):
        for found in group[:-1]:
            yield parse_line(found)


def parse_dimensions(text: str) -> tuple[str, ...]:
    """Return the dimensions in a comma-separated list.

    Raises:
        BadUsageQueryError: if one of them is unknown or repeated.
    """
    by = tuple(part.strip() for part in text.split(",") if part.strip())
    wrong = [name for name in by if name not in DIMENSIONS]
    if wrong or len(set(by)) != len(by):
        raise BadUsageQueryError(
            f"by is {text[:80]!r}; it must be some of {', '.join(DIMENSIONS)}, each once"
        )
    return by


@dataclass(slots=True)
class Report:
    """Usage of a time, by some dimensions."""

    since: float
    """Unix seconds: whole hours from the one that contains it."""
    until: float
    """Hours that begin before it."""
    by: tuple[str, ...]
    rows: dict[tuple[str, ...], Counts] = field(default_factory=dict)
    unattributed: Counts = field(default_factory=Counts)
    lost: Counts = field(default_factory=Counts)
    """`requests` is the number of lost entries."""

    def add(self, line: Line) -> None:
        """Add a line if it is of this time."""
        begin = parse_hour(line.hour)
        if not self.since - HOUR_S < begin < self.until:
            return
        if line.lost:
            self.lost.add(line.counts)
        elif line.dimensions.key is None:
            self.unattributed.add(line.counts)
        else:
            place = tuple(_value(line.dimensions, name) for name in self.by)
            self.rows.setdefault(place, Counts()).add(line.counts)

    def document(self) -> dict[str, Any]:
        """Return the report as the gateway answers it."""
        return {
            "since": self.since,
            "until": self.until,
            "by": list(self.by),
            "rows": [
                {**dict(zip(self.by, place, strict=True)), **counts.document()}
                for place, counts in sorted(self.rows.items())
            ],
            "unattributed": self.unattributed.document(),
            "lost": {
                "entries": self.lost.requests,
                "prompt": self.lost.prompt,
                "cached": self.lost.cached,
                "answer": self.lost.answer,
            },
        }


def _value(dimensions: Dimensions, name: str) -> str:
    if name == "service":
        return f"{dimensions.namespace}/{dimensions.service}"
    return str(getattr(dimensions, name) or "")

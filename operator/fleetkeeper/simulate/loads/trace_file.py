"""The parser of traces: CSV, also compressed with gzip. Messages name FILE:LINE, the column and the error."""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from fleetkeeper.simulate.loads.arrivals import Row
from fleetkeeper_contract.tiers import TIER_LABELS

TIME: Final = "t_s"
INPUT: Final = "input_tokens"
OUTPUT: Final = "output_tokens"
TIER: Final = "tier"
NEEDED: Final = (TIME, INPUT, OUTPUT)
STANDARD: Final = TIER_LABELS.index("standard")
GZIP_MAGIC: Final = b"\x1f\x8b"


class BadTrace(ValueError):
    """A file that is no trace. The message names the place, the column and the error."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a file in the order of time; the first arrives at 0."""

    rows: tuple[Row, ...]
    has_tiers: bool = False
    """True if the file has the column tier."""
    notes: tuple[str, ...] = ()
    """Changes to the rows, for the user."""

    @property
    def seconds(self) -> float:
        """The time of the last arrival."""
        return self.rows[-1][0]


def parse_trace(name: str, content: bytes, kv_capacity_tokens: float) -> Trace:
    """Return the trace in a file's content. `name` appears in messages.

    The times start at 0, so they may be seconds since any date. Rows that are out of order are sorted,
    and a note says so. A request that the KV cache cannot hold is an error.

    Raises:
        BadTrace: the content is not a trace; contains the first error.
    """
    reader = csv.reader(io.StringIO(_text(name, content), newline=""))
    header = next(_filled(reader), None)
    if header is None:
        raise BadTrace(f"{name}: the file is empty; it needs the columns {', '.join(NEEDED)}")
    place = f"{name}:{reader.line_num}"
    columns = _columns(place, [cell.strip() for cell in header])
    rows: list[Row] = []
    for cells in _filled(reader):
        row = _row(f"{name}:{reader.line_num}", cells, columns)
        tokens = row[2] + row[3]
        if tokens > kv_capacity_tokens:
            raise BadTrace(
                f"{name}:{reader.line_num}: {INPUT} + {OUTPUT}: {tokens} tokens are more than the KV cache "
                f"of a replica holds ({kv_capacity_tokens:.0f}); remove the row or choose other hardware"
            )
        rows.append(row)
    if not rows:
        raise BadTrace(f"{place}: the file has a header and no requests; add at least one row")
    return _ordered(name, rows, has_tiers=TIER in columns)


def _text(name: str, content: bytes) -> str:
    if name.endswith(".gz") and content and not content.startswith(GZIP_MAGIC):
        raise BadTrace(
            f"{name}: the name ends in .gz, but the content is not gzip; rename the file"
        )
    try:
        if content.startswith(GZIP_MAGIC):
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise BadTrace(f"{name}: broken gzip: {problem}; write the file again") from problem
    except UnicodeDecodeError as problem:
        raise BadTrace(f"{name}: not UTF-8 text; a trace is CSV or gzip of CSV") from problem


def _filled(reader: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yield the rows that are not blank."""
    return (cells for cells in reader if any(cell.strip() for cell in cells))


def _columns(place: str, header: Sequence[str]) -> Mapping[str, int]:
    missing = [column for column in NEEDED if column not in header]
    if missing:
        raise BadTrace(
            f"{place}: column {missing[0]} is missing; the columns are {', '.join(header)}"
        )
    return {column: header.index(column) for column in (*NEEDED, TIER) if column in header}


def _row(place: str, cells: Sequence[str], columns: Mapping[str, int]) -> Row:
    texts = {column: _cell(place, cells, column, at) for column, at in columns.items()}
    tier = texts.get(TIER, "")
    if tier and tier not in TIER_LABELS:
        raise BadTrace(f"{place}: {TIER}: {tier!r} is unknown; use {', '.join(TIER_LABELS)}")
    return (
        _number(place, TIME, texts[TIME]),
        TIER_LABELS.index(tier) if tier else STANDARD,
        _whole(place, INPUT, texts[INPUT]),
        _whole(place, OUTPUT, texts[OUTPUT]),
    )


def _cell(place: str, cells: Sequence[str], column: str, at: int) -> str:
    text = cells[at].strip() if at < len(cells) else ""
    if not text and column != TIER:
        raise BadTrace(f"{place}: {column}: the value is missing")
    return text


def _number(place: str, column: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise BadTrace(f"{place}: {column}: {text!r} is not a number") from None
    if not math.isfinite(number):
        raise BadTrace(f"{place}: {column}: {text} is not a finite number")
    if number < 0:
        raise BadTrace(f"{place}: {column}: {text} is negative")
    return number


def _whole(place: str, column: str, text: str) -> int:
    number = _number(place, column, text)
    if not number.is_integer():
        raise BadTrace(f"{place}: {column}: {text} is not a whole number of tokens")
    return int(number)


def _ordered(name: str, rows: list[Row], *, has_tiers: bool) -> Trace:
    late = sum([b[0] < a[0] for a, b in pairwise(rows)])
    notes: tuple[str, ...] = ()
    if late:
        rows.sort(key=lambda row: row[0])
        notes = (f"{name}: rows out of order: {late}; the trace is sorted by {TIME}",)
    first = rows[0][0]
    moved = tuple((row[0] - first, *row[1:]) for row in rows) if first else tuple(rows)
    return Trace(moved, has_tiers, notes)

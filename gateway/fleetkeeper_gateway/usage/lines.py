"""Turns a page of a ledger into lines of a file and a new cursor. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fleetkeeper_contract.usage_files import (
    COUNTS,
    Counts,
    Dimensions,
    Line,
    hour_of,
    parse_line,
)
from fleetkeeper_gateway.usage.pages import MAX_PAGE_TOKENS, Cursor, Entry, Page, Tokens

OTHER: Final = "other"
"""Model of the entries beyond a service's maximum of model names."""
CLOCK_SLACK_S = 60.0
MAX_AGE_S = 7 * 86_400.0
"""Maximum age of an entry of a pod that was never read before."""


@dataclass(frozen=True, slots=True)
class Pod:
    """The fields of an engine's pod that usage needs."""

    uid: str
    namespace: str
    service: str


@dataclass(frozen=True, slots=True)
class Room:
    """The dimensions that lines of a pod's page may have (`bounds`)."""

    model: Callable[[str], str]
    """Returns the model name for a line: its own, or OTHER."""
    keeps_attempts: bool = True
    """True if each attempt has a line. Otherwise the requests of a key are summed."""
    keeps_dimensions: bool = True
    """True if lines of unattributed requests have model and tier."""


ALL_ROOM: Final = Room(lambda model: model)


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of reading a page."""

    lines: tuple[dict[str, Any], ...]
    cursor: Cursor
    attributed: tuple[Entry, ...]
    """Entries whose attempt was not read before."""
    unattributed: Counts
    lost: Counts
    """`requests` is the number of lost entries."""


def read_page(
    page: Page,
    cursor: Cursor,
    pod: Pod,
    now: float,
    is_known: Callable[[str], bool],
    *,
    room: Room = ALL_ROOM,
) -> Reading:
    """Compare a page with a pod's cursor, and return the new entries, lines and losses.

    A router may send an attempt to several engines, and all of them work for it. The first entry that
    is read counts for the key; the others are unattributed.

    Args:
        page: the entries after `cursor`, or the first ones of another boot.
        cursor: the place up to which the pod was read.
        pod: the pod.
        now: Unix seconds. Times of entries are clamped to the range from the last reading to now.
        is_known: returns whether an attempt was read before, from any pod.
        room: the dimensions that lines may have.
    """
    if page.boot != cursor.boot:
        cursor = Cursor(pod.uid, page.boot, seen=cursor.seen)
    fresh = [entry for entry in page.entries if entry.n > cursor.next]
    attributed: dict[str, Entry] = {}
    rest: list[Entry] = []
    for entry in fresh:
        if entry.attempt is None or entry.attempt in attributed or is_known(entry.attempt):
            rest.append(entry)
        else:
            attributed[entry.attempt] = entry
    totals = page.totals if page.totals is not None else cursor.totals
    following = max(page.next, cursor.next)
    lost = _lost(totals, [cursor.totals, *fresh], following - cursor.next - len(fresh))
    earliest = max(cursor.seen - CLOCK_SLACK_S, now - MAX_AGE_S)

    def end_of(entry: Entry) -> float:
        return min(max(entry.time, earliest), now)

    own = [(entry, room.model(entry.model), end_of(entry)) for entry in attributed.values()]
    if room.keeps_attempts:
        lines = [_entry_line(entry, pod, model, end) for entry, model, end in own]
    else:
        lines = sum_lines(_line(entry, pod, model, entry.key, end) for entry, model, end in own)
    unattributed = [_unattributed(entry, pod, end_of(entry), room) for entry in rest]
    lines += sum_lines(unattributed)
    if any(lost.document().values()):
        lines.append(
            _sum_line(hour_of(now), Dimensions(pod.namespace, pod.service), lost, lost=True)
        )
    return Reading(
        tuple(lines),
        replace(cursor, next=following, totals=totals, seen=now),
        tuple(attributed.values()),
        _sum(unattributed),
        lost,
    )


def sum_lines(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Return one line for each hour and each combination of dimensions."""
    sums: dict[tuple[str, Dimensions, bool], Counts] = {}
    for line in lines:
        sums.setdefault((line.hour, line.dimensions, line.lost), Counts()).add(line.counts)
    return [
        _sum_line(hour, dimensions, counts, lost=lost)
        for (hour, dimensions, lost), counts in sums.items()
    ]


def summed(documents: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sums of the lines of a file."""
    return sum_lines(map(parse_line, documents))


def encode(lines: Iterable[dict[str, Any]], cursors: Iterable[Cursor]) -> bytes:
    """Return a group with its commit."""
    commit = {"cursors": [cursor.document() for cursor in cursors]}
    return b"".join(
        json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in (*lines, commit)
    )


def _entry_line(entry: Entry, pod: Pod, model: str, end: float) -> dict[str, Any]:
    return {
        "time": round(end, 3),
        "attempt": entry.attempt,
        "request": entry.request,
        "namespace": pod.namespace,
        "service": pod.service,
        "model": model,
        "tier": entry.tier,
        "key": entry.key,
        "aborted": entry.aborted,
        "prompt": entry.prompt,
        "cached": entry.cached,
        "answer": entry.answer,
    }


def _unattributed(entry: Entry, pod: Pod, end: float, room: Room) -> Line:
    if room.keeps_dimensions:
        return _line(entry, pod, room.model(entry.model), None, end)
    counts = _counts(entry)
    return Line(hour_of(end), Dimensions(pod.namespace, pod.service, OTHER), counts)


def _line(entry: Entry, pod: Pod, model: str, key: str | None, end: float) -> Line:
    place = Dimensions(pod.namespace, pod.service, model, entry.tier, key)
    return Line(hour_of(end), place, _counts(entry))


def _counts(entry: Entry) -> Counts:
    return Counts(1, int(entry.aborted), entry.prompt, entry.cached, entry.answer)


def _lost(totals: Tokens, read: Sequence[Tokens], entries: int) -> Counts:
    """Return the counts that the engine dropped: neither in the entries nor read before."""

    def left(name: str) -> int:
        found: int = getattr(totals, name) - sum(getattr(tokens, name) for tokens in read)
        return min(max(0, found), MAX_PAGE_TOKENS)

    lost = (left(name) for name in COUNTS[2:])
    return Counts(min(max(0, entries), MAX_PAGE_TOKENS), 0, *lost)


def _sum_line(hour: str, place: Dimensions, counts: Counts, *, lost: bool) -> dict[str, Any]:
    line: dict[str, Any] = {"hour": hour, "namespace": place.namespace, "service": place.service}
    if lost:
        line["lost"] = counts.requests
    else:
        line |= {"model": place.model, "tier": place.tier, "key": place.key}
        line |= {"requests": counts.requests, "aborted": counts.aborted}
    return line | {name: getattr(counts, name) for name in COUNTS[2:]}


def _sum(lines: Iterable[Line]) -> Counts:
    found = Counts()
    for line in lines:
        found.add(line.counts)
    return found

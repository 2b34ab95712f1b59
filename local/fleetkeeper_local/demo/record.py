"""The record of a run: moments, and Fleetkeeper's reasons for its decisions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from fleetkeeper_local.load.open_loop import Sample
from fleetkeeper_local.load.summary import Row, summarise

OURS, FLEET = "demo", "fleetkeeper"
TWICE_S = 6.0


@dataclass(frozen=True, slots=True)
class Moment:
    """One line of the timeline; its time is in seconds of the wall clock."""

    at_s: float
    who: str
    """`demo` acted on the fleet, or `fleetkeeper` made a decision."""
    text: str


@dataclass(frozen=True, slots=True)
class Frozen:
    """The times of an engine that was frozen, in seconds since the load started."""

    begin_s: float
    """It was frozen."""
    ejected_s: float
    """It stopped receiving requests."""
    ended_s: float
    """It ended, and its connections with it."""


def seconds_of(timestamp: str) -> float:
    """Return a Kubernetes timestamp in seconds."""
    return datetime.fromisoformat(timestamp).timestamp()


def moments_of_events(events: Iterable[dict[str, Any]], since_s: float) -> list[Moment]:
    """Return the operator's Events about the service in order of time, each text once."""
    found: dict[tuple[str, str], Moment] = {}
    for event in events:
        when = event.get("eventTime") or event.get("firstTimestamp") or event.get("lastTimestamp")
        reason, text = str(event.get("reason", "")), str(event.get("message", ""))
        if when is None or seconds_of(when) < since_s or (reason, text) in found:
            continue
        found[reason, text] = Moment(seconds_of(when), FLEET, text)
    return sorted(found.values(), key=lambda moment: moment.at_s)


def moments_of_decisions(decisions: Iterable[dict[str, Any]], since_s: float) -> list[Moment]:
    """Return the decisions of a status that changed something."""
    moments = []
    for row in decisions:
        at_s = seconds_of(str(row["time"]))
        if at_s < since_s:
            continue
        moments.append(Moment(at_s, FLEET, _words_of(row)))
    return sorted(moments, key=lambda moment: moment.at_s)


def _words_of(row: dict[str, Any]) -> str:
    """Return the text of a decision."""
    what, old, new = str(row["what"]), str(row.get("from", "")), str(row.get("to", ""))
    message, reason = str(row.get("message", "")), str(row.get("reason", ""))
    if not old:
        return message or new  # a breaker's message says what it did
    change = f"{what} {old} -> {new}"
    if message.lower().startswith(change.lower()):
        return message
    return f"{change}: {message or reason}"


def merged(*lists: Iterable[Moment]) -> list[Moment]:
    """Return all moments in order of time; those reported twice within seconds appear once.

    Events and decisions report the same change: the longer text stays.
    """
    result: list[Moment] = []
    for moment in sorted((m for each in lists for m in each), key=lambda m: (m.at_s, -len(m.text))):
        twin = next((n for n, m in enumerate(result) if _same(m, moment)), None)
        if twin is None:
            result.append(moment)
        elif len(moment.text) > len(result[twin].text):
            result[twin] = replace(result[twin], text=moment.text)
    return result


def _same(one: Moment, other: Moment) -> bool:
    """Return whether both report the same change, comparing the texts before the reason."""
    if abs(one.at_s - other.at_s) > TWICE_S or one.who != other.who:
        return False
    heads = [moment.text.partition(":")[0].lower() for moment in (one, other)]
    return heads[0] == heads[1] and (" -> " in heads[0] or one.text.lower() == other.text.lower())


def page(
    title: str,
    *,
    start_s: float,
    moments: Sequence[Moment],
    samples: Sequence[Sample],
    frozen: Frozen | None,
    notes: Sequence[str] = (),
) -> str:
    """Return one page of text: what happened, when and why; requests by stage and tier; failures.

    Args:
        title: the first line.
        start_s: start of the load by the wall clock.
        moments: in order of time.
        samples: all requests; their times count from `start_s`.
        frozen: the engine that was frozen.
        notes: the last lines.
    """
    lines = [title, "=" * len(title), "", "Timeline (seconds since the load started)", ""]
    lines += [
        f"{moment.at_s - start_s:7.0f}  {'** ' if moment.who == OURS else '   '}{moment.text}"
        for moment in moments
    ]
    lines += [
        "",
        "** are actions of the demo; all other lines are reports of Fleetkeeper and Kubernetes.",
        "",
    ]
    lines += ["Requests by stage", "", *_table(summarise(samples, lambda s: s.arrival.phase)), ""]
    lines += ["Requests by tier", "", *_table(summarise(samples)), ""]
    lines += [
        "retried: answered after at least one 429 (Retry-After) or a connection that broke before the",
        "first token. shed: refused with 429 after all retries. Times count from the intended send time.",
        "",
    ]
    lines += [*_failures(samples, frozen), "", *notes]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row]) -> list[str]:
    head = (
        f"{'':12}{'sent':>7}{'answered':>10}{'retried':>9}{'shed':>9}{'failed':>8}"
        f"{'p50 s':>8}{'p95 s':>8}{'TTFT p95 s':>17}"
    )
    return [head] + [
        f"{row.name:12}{row.requests:7}{row.succeeded:10}{row.repeated:9}{row.shed:9}{row.failures:8}"
        f"{_number(row.p50_s):>8}{_number(row.p95_s):>8}{_number(row.first_token_p95_s):>17}"
        for row in rows
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def failed(samples: Iterable[Sample]) -> list[Sample]:
    """Return the requests that neither succeeded nor were refused with 429 after all retries."""
    return [s for s in samples if not s.outcome.ok and s.outcome.status != 429]


ENDING_S = 10.0
"""Connections of an ended engine break within its grace period and the router's update."""


def inside(samples: Iterable[Sample], frozen: Frozen | None) -> list[Sample]:
    """Return requests that failed in the frozen engine: sent before it was ejected, ended with it.

    A request that timed out at the client, or failed later, has another cause.
    """
    if frozen is None:
        return []
    return [
        s
        for s in samples
        if s.outcome.cause != "timeout"
        and s.sent_s <= frozen.ejected_s
        and frozen.begin_s <= s.ended_s <= frozen.ended_s + ENDING_S
    ]


def _failures(samples: Sequence[Sample], frozen: Frozen | None) -> list[str]:
    broken = failed(samples)
    if not broken:
        return ["Failed requests: none."]
    held = inside(broken, frozen)
    lines = [f"Failed requests: {len(broken)} of {len(samples)}; {len(held)} in the frozen engine."]
    causes: dict[str, int] = {}
    for sample in broken:
        where = "frozen engine" if sample in held else "elsewhere"
        key = f"{sample.outcome.cause} ({where})"
        causes[key] = causes.get(key, 0) + 1
    lines += [f"{count:6}  {cause}" for cause, count in sorted(causes.items())]
    return lines

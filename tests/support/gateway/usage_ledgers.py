"""Engines' ledgers in memory, and what must be true of everything that was read from them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetkeeper_contract.usage_files import Counts, Report, committed
from fleetkeeper_gateway.usage.engines import parse_page
from fleetkeeper_gateway.usage.lines import Pod
from fleetkeeper_gateway.usage.pages import Page
from fleetkeeper_gateway.usage.store import UsageStore

NOW = 1_764_111_600.0
"""2025-11-25T23:00:00Z."""
COUNTED = ("prompt", "cached", "answer")


def an_entry(attempt: str | None, time: float, tokens: int, **more: Any) -> dict[str, Any]:
    """An entry without its number."""
    return {
        "attempt": attempt,
        "request": attempt and f"r-{attempt}",
        "key": attempt and "key-1",
        "tier": "standard",
        "model": "m",
        "prompt": tokens,
        "cached": tokens // 2,
        "answer": 2 * tokens,
        "aborted": False,
        "time": time,
        **more,
    }


@dataclass
class Ledger:
    """The ledger of one pod, as its control port shows it."""

    name: str
    capacity: int = 20_000
    page_entries: int = 1_000
    boot: str = "boot-1"
    namespace: str = "team"
    entries: list[dict[str, Any]] = field(default_factory=list)

    @property
    def pod(self) -> Pod:
        """The pod."""
        return Pod(self.name, self.namespace, "chat")

    def add(self, entry: dict[str, Any]) -> None:
        """Append an entry."""
        self.entries.append({"n": len(self.entries) + 1, **entry})

    def document(self, boot: str, after: int) -> dict[str, Any]:
        """A page, as in the answer."""
        newest = len(self.entries)
        after = min(after, newest) if boot == self.boot else 0
        first = max(after + 1, newest - self.capacity + 1)
        last = min(first + self.page_entries - 1, newest)
        return {
            "boot": self.boot,
            "next": last,
            "oldest": max(1, newest - self.capacity + 1),
            "newest": newest,
            "counting": True,
            "errors": 0,
            "entries": self.entries[first - 1 : last],
            "totals": tokens_of(self.entries[:last]),
            "unattributed": tokens_of([e for e in self.entries[:last] if not e["attempt"]]),
            "lost": first - after - 1,
        }

    def page(self, boot: str, after: int) -> Page:
        """A page, checked."""
        return parse_page(json.dumps(self.document(boot, after)).encode())

    def read_into(self, store: UsageStore, now: float) -> None:
        """Read everything that is new."""
        while True:
            cursor = store.cursor(self.name)
            reading = store.append(self.page(cursor.boot, cursor.next), self.pod, now)
            if reading.cursor.next >= len(self.entries):
                return


def tokens_of(entries: list[dict[str, Any]]) -> dict[str, int]:
    """The sums of entries."""
    return {name: sum(entry[name] for entry in entries) for name in COUNTED}


def all_counts(report: Report) -> Counts:
    """Attributed, unattributed and lost together. Lost entries count as requests."""
    found = Counts()
    for counts in (*report.rows.values(), report.unattributed, report.lost):
        found.add(counts)
    return found


def assert_complete(report: Report, *ledgers: Ledger) -> None:
    """Every entry counts exactly once."""
    entries = [entry for ledger in ledgers for entry in ledger.entries]
    found = all_counts(report)
    assert {name: getattr(found, name) for name in COUNTED} == tokens_of(entries)
    assert found.requests == len(entries)


def some_ledgers() -> tuple[Ledger, Ledger]:
    """Two pods of one service."""
    first, second = Ledger("pod-1", page_entries=3), Ledger("pod-2", page_entries=3)
    return first, second


def fill(first: Ledger, second: Ledger, now: float, round_: int) -> None:
    """Five entries for each; one attempt is the same, because a router sent it to both."""
    for index in range(4):
        first.add(an_entry(f"a-{round_}-{index}", now - index, 10 + index))
        second.add(an_entry(f"b-{round_}-{index}" if index % 2 else None, now - index, 100))
    # A router sent this attempt to both.
    first.add(an_entry(f"twice-{round_}", now, 7))
    second.add(an_entry(f"twice-{round_}", now, 8))


STORES: list[UsageStore] = []
"""Every store that a test opened, also those whose process ended; closed after the test."""


def opened(directory: Path, now: float = NOW, retention_days: int = 90) -> UsageStore:
    """A store on a directory, as a process begins with it."""
    store = UsageStore(directory, retention_days)
    STORES.append(store)
    store.open(now)
    return store


def whole(store: UsageStore, *by: str) -> Report:
    """A report of all times."""
    return store.report(0.0, 2.0**33, by or ("key", "model", "tier", "service"))


def ends_of_groups(path: Path) -> list[int]:
    """The places in a file after each commit."""
    return [end for _, end in committed(path.read_bytes().splitlines(keepends=True))]

"""Progress on standard error: of an upload, and of the lines of a batch until it ends."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fleetkeeper.commands.batch.api import ApiError, BatchApi, Document, OnBytes

WINDOW_S: Final = 60.0
"""Time over which a rate is taken."""
GIVE_UP_S: Final = 600.0
"""Time without an answer after which waiting ends. The batch continues."""
LINE_EVERY_S: Final = 30.0
"""Without a terminal, a line is printed as often."""
ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines of a batch."""

    total: int
    completed: int
    failed: int

    @property
    def done(self) -> int:
        """Return the lines that have a result."""
        return self.completed + self.failed


def counts_of(batch: Document) -> Counts:
    """Return the lines of a batch; zeros while they are not known."""
    told = batch.get("request_counts") or {}
    return Counts(*(int(told.get(name) or 0) for name in ("total", "completed", "failed")))


@dataclass
class Pace:
    """How fast lines end, from what was seen of them in the last minute."""

    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def see(self, at_s: float, done: int) -> None:
        """Add the lines that had a result at a time of a monotonic clock."""
        self._seen.append((at_s, done))
        # One that is older stays, so that the rate is one of a whole minute.
        while len(self._seen) > 2 and self._seen[1][0] <= at_s - WINDOW_S:
            self._seen.popleft()

    @property
    def per_s(self) -> float | None:
        """Return lines per second; None before two observations."""
        if len(self._seen) < 2:
            return None
        (begin_s, first), (end_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (end_s - begin_s) if end_s > begin_s else None

    def remaining_s(self, counts: Counts) -> float | None:
        """Return the seconds until all lines have a result at this rate; None if there is none."""
        rate = self.per_s
        return (counts.total - counts.done) / rate if rate else None


def in_words(counts: Counts, pace: Pace) -> str:
    """Return the figures beside the bar: lines, failures, rate, and an estimate of the end."""
    words = [f"{counts.done:,}/{counts.total:,} lines"]
    if counts.failed:
        words.append(f"{counts.failed:,} failed")
    rate, remaining_s = pace.per_s, pace.remaining_s(counts)
    if rate is not None:
        words.append(f"{rate:.1f}/s")
    if remaining_s:
        words.append(f"about {duration(remaining_s)} left")
    return ", ".join(words)


def duration(seconds: float) -> str:
    """Return a time in two units, such as 2h 5m."""
    whole = max(0, round(seconds))
    for size, unit, smaller, smaller_unit in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size}{unit} {rest}{smaller_unit}"
    return f"{whole}s"


@contextmanager
def upload_bar(total: int) -> Iterator[OnBytes]:
    """Draw the progress of an upload; nothing without a terminal."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("uploading"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)


class LinesBar:
    """The progress of a batch's lines; plain lines of text without a terminal."""

    def __init__(self, console: Console) -> None:
        """Draw on a console."""
        self._console = console
        self._next_line_s = 0.0
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[words]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self.progress.add_task("", total=None, words="")

    def show(self, status: str, counts: Counts, pace: Pace, trouble: str = "") -> None:
        """Draw a state. `trouble`: why it may be old."""
        words = trouble or in_words(counts, pace)
        self.progress.update(
            self._task,
            description=status,
            total=counts.total or None,
            completed=counts.done,
            words=words,
        )
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s >= self._next_line_s:
            self._next_line_s = now_s + LINE_EVERY_S
            self._console.print(f"{status}: {words}", soft_wrap=True, markup=False, highlight=False)


async def until_ended(api: BatchApi, batch: Document, interval_s: float) -> Document:
    """Draw the progress of a batch until it has ended, and return it.

    Answers that fail for a while are waited for: the batch goes on meanwhile.

    Args:
        api: the server.
        batch: as it was last seen.
        interval_s: from one question to the next.

    Raises:
        ApiError: the server refuses, or gave no answer for ten minutes.
    """
    bar, pace = LinesBar(Console(stderr=True)), Pace()
    answered_s = time.monotonic()
    with bar.progress:
        while True:
            counts = counts_of(batch)
            pace.see(time.monotonic(), counts.done)
            bar.show(batch["status"], counts, pace)
            if batch["status"] in ENDED:
                return batch
            trouble: ApiError | None = None
            while True:
                await asyncio.sleep(interval_s)
                try:
                    batch, answered_s = await api.get(batch["id"]), time.monotonic()
                    break
                except ApiError as problem:
                    trouble = problem
                    if not problem.transient or time.monotonic() - answered_s > GIVE_UP_S:
                        raise
                bar.show(batch["status"], counts, pace, f"waiting for the server: {trouble}")

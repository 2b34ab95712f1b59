"""Progress on standard error: of an upload, and of the lines of a batch until it ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fleetkeeper.commands.batch.model import ENDED, ApiError, Counts, Document, counts_of

if TYPE_CHECKING:
    from fleetkeeper.commands.batch.server import Server

WINDOW_S: Final = 60.0
"""Time over which a rate is taken."""
GIVE_UP_S: Final = 600.0
"""Time without an answer after which waiting ends. The batch continues."""
LINE_EVERY_S: Final = 30.0
"""Without a terminal, a line is printed as often."""


@dataclass
class Pace:
    """The rate at which lines end, from the counts of the last minute."""

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


def bytes_bar() -> Progress:
    """Return the progress of a file on its way; it draws nothing without a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


@contextmanager
def uploading(path: Path) -> Iterator[BinaryIO]:
    """Open a file, and draw how much of it was read."""
    with bytes_bar() as progress, progress.open(path, "rb", description="uploading") as file:
        yield file


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


def until_ended(server: Server, batch: Document, interval_s: float) -> Document:
    """Draw the progress of a batch until it has ended, and return it.

    Answers that fail for a while are waited for: the batch goes on meanwhile.

    Args:
        server: that runs it.
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
                time.sleep(interval_s)
                try:
                    batch, answered_s = server.get(batch["id"]), time.monotonic()
                    break
                except ApiError as problem:
                    trouble = problem
                    if not problem.transient or time.monotonic() - answered_s > GIVE_UP_S:
                        raise
                bar.show(batch["status"], counts, pace, f"waiting for the server: {trouble}")

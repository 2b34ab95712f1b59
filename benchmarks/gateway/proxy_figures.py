"""The arithmetic of the gateway's benchmark: cells of a block, differences and ratios, goals, the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

Cell = TypeVar("Cell")
DIRECT, OURS, FULL, BEFORE = "direct", "gateway", "gateway, full", "before"
P50_GOAL_MS: Final = 1.5
P99_GOAL_MS: Final = 8.0
GAP_GOAL_MS: Final = 5.0
FULL_GOAL: Final = 1.10


@dataclass(frozen=True, slots=True)
class LatencyCell:
    """Requests at a fixed rate through one contender in one block."""

    p50_ms: float
    p99_ms: float
    answered: int
    failed: int
    cpu_ms: float
    """Processor time of the contender for each request; 0 for direct requests."""


@dataclass(frozen=True, slots=True)
class CapacityCell:
    """Clients that send one request after another."""

    per_s: float
    per_core_s: float
    """Requests for each second of processor time of the contender; infinite for direct requests."""
    failed: int


@dataclass(frozen=True, slots=True)
class StreamCell:
    """Streams that run at the same time."""

    first_p50_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    failed: int


@dataclass(frozen=True, slots=True)
class MemoryCell:
    """Resident memory without requests, and with open streams."""

    idle_mib: float
    open_mib: float | None
    """None if not all streams began in time."""
    streams: int


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over blocks."""

    median: float
    low: float
    high: float

    def text(self, digits: int, unit: str = "") -> str:
        """Return it for people: `1.2 ms (1.0 to 1.4)`."""
        return f"{self.median:.{digits}f}{unit} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed.

    Raises:
        ValueError: there is no value.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no request was answered, so it has no latency; see its log")
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Iterable[float]) -> Spread:
    """Return the median and the extremes."""
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found))


def added(
    blocks: Sequence[Mapping[str, Cell]], name: str, figure: Callable[[Cell], float]
) -> Spread:
    """Return what a contender adds to direct requests. Both are of the same block."""
    return spread(figure(block[name]) - figure(block[DIRECT]) for block in blocks)


def ratio(
    blocks: Sequence[Mapping[str, Cell]], name: str, to: str, figure: Callable[[Cell], float]
) -> Spread:
    """Return the figure of one contender divided by that of another of the same block."""
    return spread(figure(block[name]) / figure(block[to]) for block in blocks)


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Return the contenders in the order of a block: each is first in turn, so none always follows another."""
    turn = number % len(names)
    return [*names[turn:], *names[:turn]]


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal of the issue's table, and what was measured for it."""

    text: str
    measured: Spread
    digits: int
    unit: str
    met: bool

    def row(self) -> list[str]:
        """Return the goal as a row."""
        figure = self.measured.text(self.digits, self.unit)
        return [self.text, figure, "met" if self.met else "**missed**"]


def at_most(text: str, measured: Spread, limit: float, digits: int, unit: str = "") -> Goal:
    """Return a goal that is met if the median over the blocks does not exceed a limit."""
    return Goal(text, measured, digits, unit, measured.median <= limit)

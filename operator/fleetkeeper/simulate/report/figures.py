"""Figures as values, and the places of what the page draws: lines over time, and points with ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from fleetkeeper.simulate.comparison import Spread

WIDTH: Final = 880
LEFT: Final = 64
RIGHT: Final = WIDTH - 16
TOP: Final = 10
BOTTOM: Final = 26
LETTER: Final = 6.6
"""Width of a letter of a label, pixels."""
LINE: Final = 15
LOAD: Final = -1
"""The style of the load, which belongs to no alternative."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """A line over time."""

    name: str
    style: int
    """The number of its color; LOAD for the load's."""
    points: Sequence[Point]
    steps: bool = False
    """Whether each value holds until the next."""
    area: bool = False
    """Whether it is filled, without a line."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear or logarithmic axis with ticks and their texts."""

    low: float
    high: float
    text: Callable[[float], str]
    log: bool = False

    def ratio(self, value: float) -> float:
        """Return the place of a value between 0 and 1."""
        low, high, value = self.low, self.high, max(value, self.low)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        ratio = (value - low) / (high - low)
        return min(1.0, max(0.0, ratio))

    def ticks(self, wanted: int) -> list[float]:
        """Return about `wanted` round values."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            return [float(10.0**power) for power in range(first, last + 1)]
        step = round_step((self.high - self.low) / wanted)
        count = math.floor((self.high - self.low) / step + 1e-9)
        return [self.low + number * step for number in range(count + 1)]


def round_step(step: float) -> float:
    """Return the next of 1, 2, 5, 10 ... times a power of ten."""
    power = float(10 ** math.floor(math.log10(step)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))


def axis_to(highest: float, text: Callable[[float], str], wanted: int = 4) -> Axis:
    """Return a linear axis from 0 to a round value of at least `highest`."""
    step = round_step(max(highest, 1e-9) / wanted)
    return Axis(0.0, step * math.ceil(max(highest, 1e-9) / step - 1e-9), text)


def log_axis(values: Iterable[float], text: Callable[[float], str]) -> Axis:
    """Return a logarithmic axis over whole powers of ten around the positive values."""
    known = [value for value in values if value > 0]
    low, high = (min(known), max(known)) if known else (0.001, 1.0)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return Axis(10.0**first, 10.0 ** max(last, first + 1), text, log=True)


def known_values(series: Iterable[Series]) -> list[float]:
    """Return all values that are known."""
    return [y for each in series for _, y in each.points if not math.isnan(y)]


def known_runs(points: Iterable[Point]) -> Iterator[list[Point]]:
    """Yield the runs of points whose values are known: a line has gaps where they are not."""
    run: list[Point] = []
    for point in points:
        if math.isnan(point[1]):
            if run:
                yield run
            run = []
        else:
            run.append(point)
    if run:
        yield run


@dataclass(frozen=True, slots=True)
class Dot:
    """A point with ranges, and its name."""

    name: str
    style: int
    across: Spread
    up: Spread


@dataclass(frozen=True, slots=True)
class Figure:
    """Lines over time, or points. Places are pixels in the figure."""

    id: str
    """Unique on the page, for the texts of screen readers."""
    title: str
    across: Axis
    up: Axis
    series: Sequence[Series] = ()
    dots: Sequence[Dot] = ()
    objective: float | None = None
    height: int = 190
    ticks: int = 4

    @property
    def bottom(self) -> int:
        """The place of the lower axis."""
        return self.height - BOTTOM

    def x(self, value: float) -> float:
        """Return the place of a value across."""
        return LEFT + (RIGHT - LEFT) * self.across.ratio(value)

    def y(self, value: float) -> float:
        """Return the place of a value up."""
        return self.bottom - (self.bottom - TOP) * self.up.ratio(value)

    def paths(self, series: Series) -> Iterator[str]:
        """Yield the path of each part of a line that is known."""
        for run in known_runs(series.points):
            (x, y), *others = [(self.x(at), self.y(value)) for at, value in run]
            path = f"M{x:.1f},{y:.1f}"
            for to_x, to_y in others:
                path += f"H{to_x:.1f}V{to_y:.1f}" if series.steps else f"L{to_x:.1f},{to_y:.1f}"
            yield f"{path}V{self.bottom:.1f}H{x:.1f}Z" if series.area else path

    def labels(self) -> list[Point]:
        """Return the places of the names beside the points, moved where another one is."""
        taken: list[tuple[float, float, float]] = []
        for dot in self.dots:
            x, place = self.x(dot.across.median), self.y(dot.up.median) - 8
            width = LETTER * len(dot.name)
            left = x + 9 if x + 9 + width < WIDTH else x - 9 - width
            steps = [number * sign for number in range(len(taken) + 2) for sign in (1, -1)]
            free = (
                candidate
                for candidate in (place + LINE * step for step in steps)
                if TOP + 4 <= candidate <= self.bottom
                and not any(
                    abs(candidate - other) < LINE and left < end and start < left + width
                    for start, end, other in taken
                )
            )
            taken.append((left, left + width, next(free, place)))
        return [(left, place) for left, _, place in taken]

    @property
    def description(self) -> str:
        """The values in words, for screen readers."""
        texts = [
            f"{dot.name}: {self.across.text(dot.across.median)}, {self.up.text(dot.up.median)}"
            for dot in self.dots
        ]
        for series in self.series:
            known = known_values([series])
            if known:
                low, high = self.up.text(min(known)), self.up.text(max(known))
                texts.append(f"{series.name}: {low} to {high}")
        return "; ".join(texts)

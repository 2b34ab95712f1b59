"""Figures as SVG without a library: lines over time, and points with ranges. Colors come from the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 880
LEFT: Final = 64
RIGHT: Final = 16
TOP: Final = 10
BOTTOM: Final = 26
LETTER: Final = 6.6
"""Width of a letter of a label, pixels."""
LINE: Final = 15
STYLES: Final = 8
"""Styles of series that the page defines; more series repeat them."""
LOAD: Final = -1
"""The style of the load, which belongs to no alternative."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """A line. `style`: number of its color, LOAD for the load's. `steps`: each value holds until the next. `area`: filled, without a line."""

    name: str
    style: int
    points: Sequence[Point]
    steps: bool = False
    area: bool = False


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


def time_axis(seconds: float) -> Axis:
    """Return the axis of a run's time, in minutes or hours."""
    if seconds > 3 * 3600:
        return Axis(0.0, seconds / 3600, lambda value: f"{value:g} h")
    return Axis(0.0, seconds / 60, lambda value: f"{value:g} min")


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
class Panel:
    """Lines over time. `seconds`: the length of the run. `objective`: a value to mark, and its text."""

    title: str
    series: Sequence[Series]
    seconds: float
    axis: Axis
    height: int = 190
    objective: tuple[float, str] | None = None
    ticks: int = 4

    def svg(self, number: str) -> str:
        """Return the figure. `number`: unique on the page, for the texts of screen readers."""
        time = time_axis(self.seconds)
        scale = time.high / self.seconds
        frame = _Frame(time, self.axis, self.height)
        parts = [*frame.grid(self.ticks)]
        for series in self.series:
            for run in known_runs(series.points):
                placed = [(frame.x(at * scale), frame.y(value)) for at, value in run]
                parts += _line(series, placed, frame.bottom)
        if self.objective is not None:
            parts += frame.mark(*self.objective)
        return wrapped(number, self.title, self._description(), self.height, parts)

    def _description(self) -> str:
        texts = []
        for series in self.series:
            known = [value for _, value in series.points if not math.isnan(value)]
            if known:
                low, high = self.axis.text(min(known)), self.axis.text(max(known))
                texts.append(f"{series.name}: {low} to {high}")
        return "; ".join(texts)


def style_name(number: int) -> str:
    """Return the class of a style in the page."""
    return "load" if number == LOAD else f"s{number % STYLES}"


def _line(series: Series, points: Sequence[Point], bottom: float) -> Iterator[str]:
    path = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    for x, y in points[1:]:
        path += f"H{x:.1f}V{y:.1f}" if series.steps else f"L{x:.1f},{y:.1f}"
    style = style_name(series.style)
    if series.area:
        yield f'<path class="area {style}" d="{path}V{bottom:.1f}H{points[0][0]:.1f}Z"/>'
    else:
        yield f'<path class="line {style}" d="{path}"/>'


@dataclass(frozen=True, slots=True)
class _Frame:
    """The places of values in a figure, and its grid."""

    across: Axis
    up: Axis
    height: int

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * self.across.ratio(value)

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - TOP) * self.up.ratio(value)

    def grid(self, ticks: int) -> Iterator[str]:
        right = WIDTH - RIGHT
        for value in self.up.ticks(ticks):
            y = self.y(value)
            yield f'<path class="grid" d="M{LEFT},{y:.1f}H{right}"/>'
            yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(self.up.text(value))}</text>'
        for value in self.across.ticks(8):
            x = self.x(value)
            anchor = "end" if x > right - 20 else "middle"
            yield f'<path class="grid" d="M{x:.1f},{self.bottom}v5"/>'
            yield f'<text class="tick" x="{x:.1f}" y="{self.bottom + 18}" text-anchor="{anchor}">{escape(self.across.text(value))}</text>'

    def mark(self, value: float, text: str) -> Iterator[str]:
        y = self.y(value)
        yield f'<path class="objective" d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text class="objective-text" x="{WIDTH - RIGHT}" y="{y - 5:.1f}" text-anchor="end">{escape(text)}</text>'


@dataclass(frozen=True, slots=True)
class Dot:
    """A point with ranges: (median, least, most) across and up."""

    name: str
    style: int
    across: tuple[float, float, float]
    up: tuple[float, float, float]


def scatter_svg(number: str, title: str, dots: Sequence[Dot], *, across: Axis, up: Axis) -> str:
    """Return a figure of points, each with its name beside it."""
    height = 300
    frame = _Frame(across, up, height)
    parts = [*frame.grid(5)]
    taken: list[tuple[float, float, float]] = []
    for dot in dots:
        (x, x_low, x_high), (y, y_low, y_high) = (
            tuple(map(frame.x, dot.across)),
            tuple(map(frame.y, dot.up)),
        )
        style = style_name(dot.style)
        parts.append(
            f'<path class="range {style}" d="M{x_low:.1f},{y:.1f}H{x_high:.1f}M{x:.1f},{y_low:.1f}V{y_high:.1f}"/>'
        )
        parts.append(f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
        parts.append(_label(dot.name, x, y, taken, frame.bottom))
    described = "; ".join(
        f"{dot.name}: {across.text(dot.across[0])}, {up.text(dot.up[0])}" for dot in dots
    )
    return wrapped(number, title, described, height, parts)


def _label(
    name: str, x: float, y: float, taken: list[tuple[float, float, float]], bottom: float
) -> str:
    """Return a label beside a point, moved down while another one is there."""
    width = LETTER * len(name)
    left = x + 9 if x + 9 + width < WIDTH else x - 9 - width
    place = y - 8
    free = [place + LINE * number * sign for number in range(len(taken) + 2) for sign in (1, -1)]
    for candidate in free:
        is_inside = TOP + 4 <= candidate <= bottom
        if is_inside and not any(
            abs(candidate - other) < LINE and left < end and start < left + width
            for start, end, other in taken
        ):
            place = candidate
            break
    taken.append((left, left + width, place))
    return f'<text class="label" x="{left:.1f}" y="{place:.1f}">{escape(name)}</text>'


def wrapped(number: str, title: str, description: str, height: int, parts: Iterable[str]) -> str:
    """Return the SVG element with texts for screen readers."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{number}-t {number}-d">'
        f'<title id="{number}-t">{escape(title)}</title><desc id="{number}-d">{escape(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )

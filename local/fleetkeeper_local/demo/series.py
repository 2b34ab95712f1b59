"""Series for a figure from recorded values: gaps, rates and steps. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import isnan, nan

from fleetkeeper_local.demo.recorder import Points


def gapped(points: Sequence[tuple[float, float]], gap_s: float) -> Points:
    """Return the points, with a NaN in each gap longer than `gap_s`, so that no line crosses it."""
    drawn: list[tuple[float, float]] = []
    for at_s, value in points:
        if drawn and at_s - drawn[-1][0] > gap_s:
            drawn.append((drawn[-1][0] + 1e-3, nan))
        drawn.append((at_s, value))
    return tuple(drawn)


def spread(times_s: Iterable[float], end_s: float, bin_s: float) -> Points:
    """Return the rate per second in bins of `bin_s`, at their middle; ignore later times."""
    counts = [0] * max(1, int(end_s // bin_s))
    for at_s in times_s:
        number = int(at_s // bin_s)
        if 0 <= number < len(counts):
            counts[number] += 1
    return tuple(((n + 0.5) * bin_s, count / bin_s) for n, count in enumerate(counts))


def steps_of(points: Points, end_s: float) -> list[tuple[float, float, float]]:
    """Return periods (begin, end, value) of constant value; a NaN ends one and starts none."""
    found: list[tuple[float, float, float]] = []
    for (begin, value), (end, _) in pairwise([*points, (end_s, nan)]):
        if isnan(value):
            continue
        if found and found[-1][1] == begin and found[-1][2] == value:
            found[-1] = (found[-1][0], end, value)
        else:
            found.append((begin, end, value))
    return found

"""Bucket edges of the histograms that the engine exports and at which the operator counts attainment."""

from __future__ import annotations

MAX_RATIO = 1.25
"""No edge is more than this factor above the previous one, except for integers below 5, and for latencies."""

_DIVISIONS = ((1.0, 2.0, 4), (2.0, 5.0, 5), (5.0, 10.0, 4))


_LATENCY_STEPS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5)
MAX_LATENCY_RATIO = 1.5
"""The same for the latencies that users see. No decision is based on them, so their edges are coarser:
with `MAX_RATIO`, a pod would export a hundred more series."""


def _edges_between(lowest: float, highest: float) -> tuple[float, ...]:
    """Return edges from `lowest` to `highest`, each at most 1.25 times the previous one.

    Within a decade, 1 -> 2 -> 5 -> 10 is divided geometrically into 4, 5 and 4 steps (ratios 1.189,
    1.201, 1.189). Objectives of 20, 50, 100, 200, 500 ms ... are therefore exact edges, and
    snapping such an objective down to an edge changes nothing. Values are rounded to 4 digits.
    """
    edges = {lowest, highest}
    decade = 1e-6
    while decade <= highest:
        for start, end, steps in _DIVISIONS:
            for step in range(steps):
                edge = float(f"{decade * start * (end / start) ** (step / steps):.4g}")
                if lowest < edge < highest:
                    edges.add(edge)
        decade = float(f"{decade * 10:.4g}")
    return tuple(sorted(edges))


def _whole_edges_between(lowest: int, highest: int) -> tuple[float, ...]:
    """Return edges for counts: rounded to whole numbers, without duplicates."""
    return tuple(sorted({float(round(edge)) for edge in _edges_between(lowest, highest)}))


def _latency_edges_between(lowest: float, highest: float) -> tuple[float, ...]:
    """Return edges from `lowest` to `highest`: 1, 1.5, 2, 2.5, 3, 4, 5 and 7.5 in each decade.

    Common SLOs, such as 50 ms or 2 s, are therefore exact edges.
    """
    edges = {
        float(f"{step * 10.0**decade:.4g}") for decade in range(-3, 2) for step in _LATENCY_STEPS
    }
    return tuple(sorted({lowest, highest, *(edge for edge in edges if lowest < edge < highest)}))


QUEUE_WAIT_EDGES_S = _edges_between(0.005, 60.0)
BATCH_TIME_EDGES_S = _edges_between(0.001, 10.0)
BATCH_SEQUENCES_EDGES = _whole_edges_between(1, 2048)
BATCH_TOKENS_EDGES = _whole_edges_between(1, 65536)
TIME_TO_FIRST_TOKEN_EDGES_S = _latency_edges_between(0.01, 60.0)
INTER_TOKEN_LATENCY_EDGES_S = _latency_edges_between(0.001, 2.5)

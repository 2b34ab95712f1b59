"""Bucket boundaries of the engine's two histograms, and objectives snapped down to them.

The engine's contract fixes the boundaries (engine_image/contract/metrics.json); a test keeps both equal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class Edges(NamedTuple):
    """The bucket boundaries at which a service's attainment is counted, in seconds."""

    queue_wait_s: float
    batch_time_s: float


def edges_between(lowest: float, highest: float) -> tuple[float, ...]:
    """Return boundaries from `lowest` to `highest`: 1, 2 and 5 of each decade and geometric steps between.

    From 1 to 2, 2 to 5 and 5 to 10 there are 4, 5 and 4 steps. So common objectives (20, 50, 100, 200,
    500 ms) are boundaries, and none is more than 1.21 times the previous one. Rounded to 4 significant
    digits.
    """
    edges = {lowest, highest}
    for exponent in range(-6, 3):
        for start, end, steps in ((1, 2, 4), (2, 5, 5), (5, 10, 4)):
            for step in range(steps):
                edge = float(f"{10.0**exponent * start * (end / start) ** (step / steps):.4g}")
                if lowest < edge < highest:
                    edges.add(edge)
    return tuple(sorted(edges))


QUEUE_WAIT_EDGES_S = edges_between(0.005, 60.0)
BATCH_TIME_EDGES_S = edges_between(0.001, 10.0)


def snap_down(objective_s: float, edges: Sequence[float]) -> float:
    """Return the largest boundary not above the objective; the smallest if all are above.

    Example: an objective of 0.45 s between 0.416 s and 0.5 s is judged at 0.416 s: stricter, never laxer.
    """
    index = bisect_right(edges, objective_s * (1 + 1e-9))
    return edges[max(0, index - 1)]

"""The bucket edges of the two promised histograms, and objectives snapped down to them.

The engine's contract fixes the edges (engine_image/contract/metrics.json; a test holds both equal).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class Edges(NamedTuple):
    """The bucket edges at which a service's attainment is counted, seconds."""

    queue_wait_s: float
    batch_time_s: float


def edges_between(lowest: float, highest: float) -> tuple[float, ...]:
    """Edges from `lowest` to `highest`; in each decade 1, 2 and 5 with 4, 5 and 4 geometric steps between.

    So the common objectives (20, 50, 100, 200, 500 ms) are edges, and no edge is more than 1.21
    times the one before. Rounded to 4 significant digits.
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
    """The largest edge not above the objective; the smallest edge when all are above.

    Example: an objective of 0.45 s among (0.416, 0.5) is judged at 0.416 s: stricter, never laxer.
    """
    index = bisect_right(edges, objective_s * (1 + 1e-9))
    return edges[max(0, index - 1)]

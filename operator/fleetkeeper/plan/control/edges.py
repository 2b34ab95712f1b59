"""The bucket edges of the two promised histograms, and objectives snapped down to them.

The engine's contract fixes the edges (engine_image/contract/metrics.json; a test holds both equal).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def geometric_edges(low: float, high: float, ratio: float = 1.25) -> tuple[float, ...]:
    """Edges from `low` to `high`, evenly spaced on a logarithmic scale, each at most `ratio` times the last."""
    count = 1
    while low * ratio**count < high:
        count += 1
    step = (high / low) ** (1 / count)
    return tuple(float(f"{low * step**index:.4g}") for index in range(count + 1))


QUEUE_WAIT_EDGES_S = geometric_edges(0.005, 60.0)
BATCH_TIME_EDGES_S = geometric_edges(0.001, 10.0)


def snap_down(objective_s: float, edges: Sequence[float]) -> float:
    """The largest edge not above the objective; the smallest edge when all are above.

    Example: an objective of 0.5 s among (0.41, 0.508) is judged at 0.41 s: stricter, never laxer.
    """
    index = bisect_right(edges, objective_s * (1 + 1e-9))
    return edges[max(0, index - 1)]

"""Objectives snapped down to bucket boundaries of the engine's histograms."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class Edges(NamedTuple):
    """The bucket boundaries at which a service's attainment is counted, in seconds."""

    queue_wait_s: float
    batch_time_s: float


def snap_down(objective_s: float, edges: Sequence[float]) -> float:
    """Return the largest boundary not above the objective; the smallest if all are above.

    Example: an objective of 0.45 s between 0.416 s and 0.5 s is judged at 0.416 s: stricter, never laxer.
    """
    index = bisect_right(edges, objective_s * (1 + 1e-9))
    return edges[max(0, index - 1)]

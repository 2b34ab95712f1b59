"""Containment of defects for tests of single parts."""

from __future__ import annotations

from collections.abc import Callable

from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics


def new_defects(
    metrics: OperatorMetrics | None = None,
    *,
    monotonic: Callable[[], float] = lambda: 100.0,
    changed: Callable[[Key], None] = lambda _key: None,
) -> Defects:
    """Return an empty memory of defects, counted in `metrics`."""
    counter = (metrics or OperatorMetrics()).defects
    return Defects(counter, monotonic=monotonic, changed=changed)


def counted(metrics: OperatorMetrics) -> dict[str, float]:
    """Return the number of defects by step."""
    return {
        sample.labels["where"]: sample.value
        for sample in next(iter(metrics.defects.collect())).samples
        if sample.name.endswith("_total")
    }

"""The texts of a drawn panel: the units of Grafana, and the names of series."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

SCALES: Mapping[str, Sequence[tuple[float, str]]] = {
    "s": ((60.0, " min"), (1.0, " s"), (1e-3, " ms"), (1e-6, " µs")),
    "bytes": ((2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1.0, " B")),
    "percentunit": ((0.01, "%"),),
    "none": ((1e6, " M"), (1e3, " k"), (1.0, "")),
    "reqps": ((1e3, " k/s"), (1.0, " req/s")),
    "ops": ((1e3, " k/s"), (1.0, " ops/s")),
}
"""By unit: the size and the name of each scale, largest first."""


def scale_of(unit: str, largest: float) -> tuple[float, str]:
    """Return size and name of the scale that suits an axis with this largest value.

    Raises:
        KeyError: the unit is none that the dashboards use.
    """
    scales = SCALES[unit]
    return next((scale for scale in scales if largest >= scale[0]), scales[-1])


def series_name(legend: str, labels: Mapping[str, str]) -> str:
    """Return a legend with the values of its labels."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend).strip()

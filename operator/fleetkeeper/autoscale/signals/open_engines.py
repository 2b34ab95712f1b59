"""Pods whose engine accepts requests without a grant although the service demands them, and since when.

An engine of an older image does not know grants and exports no such metric, which counts as 0. A new
demand takes up to two minutes to reach a running engine, so a short run is no problem.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from fleetkeeper.autoscale.constants import FRESH_S, FUTURE_S, OPEN_ENGINE_S
from fleetkeeper.autoscale.signals.samples import PodSample, why_impossible
from fleetkeeper.autoscale.types import ControlInputs

DEMANDED: Final = 1.0


class OpenRun(NamedTuple):
    """A run of samples that report no demand for grants: times of the first and the last."""

    since: float
    newest: float

    @property
    def is_long(self) -> bool:
        """Return whether the engine has had time to read the demand."""
        return self.newest - self.since >= OPEN_ENGINE_S


def open_runs(
    inputs: ControlInputs, before: Mapping[str, OpenRun], now: float, *, were_open: bool
) -> dict[str, OpenRun]:
    """Return the runs of all ready pods that report no demand for grants, if the service demands them.

    A pod without a fresh sample keeps its run. Only a sample with the demand ends it. `were_open`: the
    status of the service says that an engine was open before this process started.
    """
    demands = inputs.settings.demands_grants
    ready = {pod.name for pod in inputs.pods if demands and pod.ready and not pod.deleting}
    runs = {name: run for name, run in before.items() if name in ready}
    for sample in inputs.samples:
        if sample.pod not in ready or not _is_usable(sample, now):
            continue
        if sample.gauges.grants_demanded == DEMANDED:
            runs.pop(sample.pod, None)
            continue
        run = runs.get(sample.pod)
        first = sample.time - (OPEN_ENGINE_S if were_open else 0.0)
        runs[sample.pod] = OpenRun(first if run is None else run.since, sample.time)
    return runs


def _is_usable(sample: PodSample, now: float) -> bool:
    fresh = -FUTURE_S <= now - sample.time <= FRESH_S
    return fresh and not why_impossible(sample, math.inf, None)

"""Pods that have reported a state in successive samples, and since when: a hung engine, an open engine.

Only the engine knows how long its current step may take, so it decides itself whether it is hung
(`fleetkeeper_hung`). The loop does not infer that from counters: a long step, requests that wait for
the memory cap, and a grammar that compiles all look the same. An engine that is too old to export the
metric is never called hung; its liveness probe decides.

An open engine accepts requests without a grant although the service demands them. An engine of an older
image does not know grants and exports no such metric, which counts as 0. A new demand takes up to two
minutes to reach a running engine, so a short run is no problem.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from fleetkeeper.autoscale.constants import FRESH_S, FUTURE_S, OPEN_ENGINE_S
from fleetkeeper.autoscale.signals.samples import PodSample, why_impossible
from fleetkeeper.autoscale.types import ControlInputs, PodView

HUNG: Final = 1.0
DEMANDED: Final = 1.0


class Run(NamedTuple):
    """A run of samples that report the same: times of the first and the last."""

    since: float
    newest: float

    def lasted(self, seconds: float) -> bool:
        """Return whether the samples span so many seconds."""
        return self.newest - self.since >= seconds


def _is_usable(sample: PodSample, now: float) -> bool:
    is_fresh = -FUTURE_S <= now - sample.time <= FRESH_S
    return is_fresh and not why_impossible(sample, math.inf, None)


def hang_runs(
    samples: Sequence[PodSample], pods: Sequence[PodView], before: Mapping[str, Run], now: float
) -> dict[str, Run]:
    """Return the runs of all pods whose fresh sample reports a hung engine.

    Pods that are not ready count, too: a hung engine fails its readiness probe long before it reports
    that it is hung. A sample that is missing, old, impossible or reports otherwise ends the run.
    """
    present = {pod.name for pod in pods if not pod.deleting}
    runs = {}
    for sample in samples:
        if sample.pod in present and sample.gauges.hung == HUNG and _is_usable(sample, now):
            run = before.get(sample.pod)
            continues = run is not None and sample.time >= run.newest
            runs[sample.pod] = Run(run.since if run and continues else sample.time, sample.time)
    return runs


def open_runs(
    inputs: ControlInputs, before: Mapping[str, Run], now: float, *, were_open: bool
) -> dict[str, Run]:
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
        runs[sample.pod] = Run(first if run is None else run.since, sample.time)
    return runs

"""Pods that report a hung engine, and for how long they have reported it.

Only the engine knows how long its current step may take, so it decides itself whether it is hung
(`fleetkeeper_hung`). The loop does not infer that from counters: a long step, requests that wait for
the memory cap, and a grammar that compiles all look the same. An engine that is too old to export the
metric is never called hung; its liveness probe decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from fleetkeeper.autoscale.constants import FRESH_S, FUTURE_S, HANG_S
from fleetkeeper.autoscale.signals.samples import PodSample, why_impossible
from fleetkeeper.autoscale.types import PodView

HUNG: Final = 1.0


class HangRun(NamedTuple):
    """A run of samples that report a hung engine: times of the first and the last."""

    since: float
    newest: float

    @property
    def is_long(self) -> bool:
        """Return whether the pod's supervisor and its liveness probe have had time to act."""
        return self.newest - self.since >= HANG_S


def hang_runs(
    samples: Sequence[PodSample],
    pods: Sequence[PodView],
    before: Mapping[str, HangRun],
    now: float,
) -> dict[str, HangRun]:
    """Return the runs of all pods whose fresh sample reports a hung engine.

    Pods that are not ready count, too: a hung engine fails its readiness probe long before it reports
    that it is hung. A sample that is missing, old, impossible or reports otherwise ends the run.
    """
    present = {pod.name for pod in pods if not pod.deleting}
    runs = {}
    for sample in samples:
        if sample.pod in present and _reports_hung(sample, now):
            run = before.get(sample.pod)
            continues = run is not None and sample.time >= run.newest
            since = run.since if run is not None and continues else sample.time
            runs[sample.pod] = HangRun(since, sample.time)
    return runs


def _reports_hung(sample: PodSample, now: float) -> bool:
    fresh = -FUTURE_S <= now - sample.time <= FRESH_S
    return sample.gauges.hung == HUNG and fresh and not why_impossible(sample, math.inf, None)

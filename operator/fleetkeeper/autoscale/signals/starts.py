"""The stage of each engine that starts, from its own measurements, and the medians of past starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from fleetkeeper.api.status_enums import ReplicaStage
from fleetkeeper.autoscale.signals.samples import PodSample
from fleetkeeper.autoscale.types import PodView
from fleetkeeper.common.values import StartProgress

MAX_STAGE_S = 7 * 86_400.0
"""The longest plausible stage. A start has a day at most."""
_STAGES = (ReplicaStage.WEIGHTS, ReplicaStage.LOAD, ReplicaStage.WARM_UP)


def starts_of(samples: Sequence[PodSample]) -> dict[str, StartProgress]:
    """Return the stage of each pod that reports one: the last that has begun."""
    found = {}
    for sample in samples:
        if sample.start is None or not all(0.0 <= s <= MAX_STAGE_S for s in sample.start):
            continue
        begun = [(stage, s) for stage, s in zip(_STAGES, sample.start, strict=True) if s > 0.0]
        if begun and math.isfinite(sample.time):
            stage, seconds = begun[-1]
            found[sample.pod] = StartProgress(stage, sample.time - seconds)
    return found


def median_seconds(pods: Sequence[PodView]) -> Mapping[str, float]:
    """Return the medians of the stages before the engine: until a node was found, until it started.

    Only ready pods count whose engine's container has not been restarted.
    """
    scheduling, image = [], []
    for pod in pods:
        if pod.ready and pod.scheduled_since is not None:
            scheduling.append(max(0.0, pod.scheduled_since - pod.created))
            if pod.engine_since is not None:
                image.append(max(0.0, pod.engine_since - pod.scheduled_since))
    stages = {"scheduling": scheduling, "image": image}
    return {name: median(seconds) for name, seconds in stages.items() if seconds}

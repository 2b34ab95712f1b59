"""The Deployment of the engines."""

from __future__ import annotations

from fleetkeeper.api.names import Component, engine_name, selector
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.types import RolloutStrategy
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.manifests.common import desired_metadata
from fleetkeeper.reconcile.manifests.rollout import desired_strategy, progress_deadline_s

MIN_READY_S = 5
"""A pod counts as available after it was ready for this time. By then routers have discovered it,
so the removal of an old pod leaves no request without an engine."""
REVISION_HISTORY = 5
"""The number of old ReplicaSets to keep. At least three: a rollback needs the last good one."""


def desired_engine_deployment(
    service: InferenceService,
    template: Manifest,
    *,
    replicas: int,
    strategy: RolloutStrategy = RolloutStrategy.SURGE,
) -> Manifest:
    """Return the Deployment with `replicas` pods of `template`.

    `replicas` is always written, because a field that an apply omits returns to its default of 1.
    """
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": desired_metadata(service, engine_name(service.name), Component.ENGINE),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": selector(service.name, Component.ENGINE)},
            "strategy": desired_strategy(service.spec.rollout, strategy),
            "minReadySeconds": MIN_READY_S,
            "progressDeadlineSeconds": progress_deadline_s(service.spec.rollout),
            "revisionHistoryLimit": REVISION_HISTORY,
            "template": template,
        },
    }

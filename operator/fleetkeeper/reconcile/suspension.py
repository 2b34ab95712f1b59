"""The number of replicas to which a suspended service returns.

`spec.replicas` has this number if it is set. Otherwise only the live Deployment has it, and spec.suspend
scales that to 0. So the number is written to `status.suspendedReplicas` one reconcile before, and stays
there until the service runs again: a crash between any two writes loses nothing.

    running ──spec.suspend──► number in the status ──► no replicas ──not spec.suspend──► number applied
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetkeeper.api.types import InferenceServiceSpec, ScalingMode


def parse_suspended(status: Mapping[str, Any]) -> int | None:
    """Parse `status.suspendedReplicas`, None if it is absent or no number of replicas."""
    value = status.get("suspendedReplicas")
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if value > 0 else None


def decide_suspended(
    spec: InferenceServiceSpec, status: Mapping[str, Any], live: int | None
) -> int | None:
    """Return the number of replicas to keep in the status, None if none needs to be kept.

    While the service is paused, nothing changes.
    """
    known = parse_suspended(status)
    if spec.paused:
        return known
    if spec.suspend:
        return known or live or None
    return None if live or spec.replicas is not None else known


def resumed_replicas(spec: InferenceServiceSpec, number: int) -> int:
    """Return the number with which a service starts again: within the bounds where these apply."""
    if spec.scaling.mode is not ScalingMode.AUTO:
        return number
    return min(max(number, spec.scaling.min_replicas), spec.scaling.max_replicas)

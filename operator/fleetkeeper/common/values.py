"""The values that reconcile and autoscale exchange, or that both produce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Manifest = dict[str, Any]
"""A complete Kubernetes object as a plain dict: deterministic and ready for server-side apply."""


@dataclass(frozen=True, slots=True)
class ReplicaAllocation:
    """The replicas that the arbitration over all services allocated to this one.

    `reason` is CamelCase from a closed set. `message` explains it with figures, for example "queue
    wait p95 1.9 s against 0.5 s, batch at its limit". Without an allocation the replicas stay
    unchanged.
    """

    replicas: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes Event for the InferenceService."""

    type: str
    reason: str
    message: str

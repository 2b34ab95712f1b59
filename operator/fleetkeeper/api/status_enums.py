"""The enums of the status: words that the CRD checks.

Only sets that are closed for good are enums in the CRD: the states of a circuit breaker, the subjects
of a decision, and the stages of a replica. A program may branch on each of their words, so a new word
would be a change of the API anyway. The reasons are no enums in the CRD, although their sets are
closed within a release: a newer operator adds reasons, and a CRD that is older would refuse its whole
status. Never remove a word here: an older operator may still write it.
"""

from __future__ import annotations

from enum import StrEnum

from fleetkeeper.api.conditions import DocumentedEnum


class BreakerState(StrEnum):
    """The state of a circuit breaker. Closed: normal. Open: safe state. HalfOpen: on trial."""

    CLOSED = "Closed"
    OPEN = "Open"
    HALF_OPEN = "HalfOpen"


class Subject(StrEnum):
    """The subject of a decision."""

    REPLICAS = "replicas"
    LIMITS = "limits"
    BREAKER = "breaker"
    RESTART = "restart"


class ReplicaStage(DocumentedEnum):
    """The stage of a replica, in the order of a start. `.text` explains it."""

    SCHEDULING = "Scheduling", "The pod waits for a node."
    IMAGE = (
        "Image",
        "The node mounts the volumes, pulls the images and runs the init containers.",
    )
    STARTING = "Starting", "The engine starts, and its own stage is not known (yet)."
    WEIGHTS = "Weights", "The engine starts its processes, fetches the model and loads its weights."
    LOAD = "Load", "The engine initializes: compilation, KV cache, API server."
    WARM_UP = "WarmUp", "The engine answers and generates its first tokens."
    READY = "Ready", "The replica receives requests."
    FAILING = "Failing", "The engine failed, is hung, or stopped being ready."
    DRAINING = "Draining", "The pod finishes its requests before it ends."

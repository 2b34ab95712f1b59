"""Values that decisions read and return: settings, pods, limits, decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from fleetkeeper.api.types import BatchingMode, ScalingMode
from fleetkeeper.autoscale.signals.backlog import Backlog
from fleetkeeper.autoscale.signals.samples import PodSample
from fleetkeeper.common.activation import SCALED, Activation
from fleetkeeper.common.nodes import ANY_NODE, NodeNeeds
from fleetkeeper_contract.tiers import TIER_LABELS, Tier

V = TypeVar("V")


class Grade(StrEnum):
    """The reliability of signals, by the age of their samples."""

    FRESH = "Fresh"
    AGEING = "Ageing"
    STALE = "Stale"


@dataclass(frozen=True, slots=True)
class Decision(Generic[V]):
    """A decision and its reason. Not `valid`: unchanged, because nothing known justifies a change.

    The `value` of an unchanged decision is what is already in force, never a zero. `detail` has the
    figures that decided.
    """

    valid: bool
    value: V
    reason: str
    detail: str


def no_change(value: V, reason: str, detail: str) -> Decision[V]:
    """Return an unchanged decision: `value` stays in force."""
    return Decision(False, value, reason, detail)


def decide(value: V, reason: str, detail: str) -> Decision[V]:
    """Return a valid decision."""
    return Decision(True, value, reason, detail)


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """The spec's settings for the control loop, in seconds and ratios."""

    min_replicas: int = 1
    max_replicas: int = 8
    activation: Activation = SCALED
    scaling_mode: ScalingMode = ScalingMode.AUTO
    scale_down_delay_s: float = 600.0
    """The stabilization window of a scale-down."""
    queue_wait_objective_s: float = 0.5
    batch_time_objective_s: float = 0.05
    attainment_ratio: float = 0.95
    batching_mode: BatchingMode = BatchingMode.AUTO
    min_sequences: int = 4
    max_sequences: int = 256
    min_tokens: int = 256
    max_tokens: int = 8192
    batch_share_ratio: float = 0.3
    """The batch tier's share of the sequences."""
    batch_floor_ratio: float = 0.05
    """The batch tier's share of the sequences, and its admitted share, while batch is shed."""
    breakers_act: bool = True
    fallback_replicas: int | None = None
    cap_percent: int = 80
    restart_fragmented: bool = False
    paused: bool = False
    sleep_after_s: float | None = None
    """Time without a request after which the service may go to sleep. None: it never sleeps."""
    goes_to_sleep: bool = False
    """True while the gateway holds requests and the pods still run."""
    waking_tier: Tier | None = None
    """While the service wakes: the most urgent tier that waits."""
    waking_since: float | None = None
    """Time since when it wakes."""
    wake_has_failed: bool = False
    """True if it wakes and its last start failed."""
    awake_since: float | None = None
    """Time since when it is awake, as the status says; 0 if it never slept. None while it is not."""
    min_awake_s: float = 0.0
    """Time that it stays awake at least."""
    demands_grants: bool = False
    """True if the engines accept only requests of the gateway."""
    generation: int = 1

    @property
    def tunes_replicas(self) -> bool:
        """Return whether the recommendation is applied to the Deployment."""
        return (
            self.activation.is_scaled and self.scaling_mode is ScalingMode.AUTO and not self.paused
        )

    @property
    def gates(self) -> bool:
        """Return whether the load breaker's decisions are sent to the engines."""
        advised = self.batching_mode is BatchingMode.ADVISORY
        return self.breakers_act and not advised and not self.paused

    @property
    def tunes_limits(self) -> bool:
        """Return whether batch limits are sent to the engines."""
        return self.batching_mode is BatchingMode.AUTO and not self.paused

    @property
    def restarts(self) -> bool:
        """Return whether chosen replicas are restarted; with an Advisory mode they are only reported."""
        advised = (
            self.scaling_mode is ScalingMode.ADVISORY or self.batching_mode is BatchingMode.ADVISORY
        )
        return not advised and not self.paused


@dataclass(frozen=True, slots=True)
class PodView:
    """The fields of an engine pod that the control loop reads, from the watch cache."""

    name: str
    uid: str
    created: float
    ready: bool = False
    ready_since: float | None = None
    node: str = ""
    deleting: bool = False
    ip: str = ""
    scheduled_since: float | None = None
    engine_since: float | None = None
    """Time of the first start of the engine's container; None if it has been restarted since."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The batch limits of one engine: sequences per batch, tokens per step."""

    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Admission:
    """The admission of an engine."""

    admit: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Admitted share by tier (realtime, standard, batch), 0 to 1."""
    batch_share: float = 0.3
    """The batch tier's share of the sequences."""

    def admit_by_tier(self) -> dict[str, float]:
        """Return the admitted share by tier name, as PUT /v1/limits expects it."""
        return dict(zip(TIER_LABELS, self.admit, strict=True))

    def shares_by_tier(self) -> dict[str, float]:
        """Return the share of sequences by tier name, as PUT /v1/limits expects it."""
        return {Tier.BATCH.label: self.batch_share}


@dataclass(frozen=True, slots=True)
class LimitsRequest:
    """A limits request (PUT /v1/limits) that is due now."""

    pod: str
    uid: str
    ip: str
    limits: Limits
    admission: Admission
    lease_s: float
    generation: int


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """The result of a PUT of the last tick."""

    pod: str
    generation: int
    succeeded: bool
    newest_generation: int = 0
    """The generation in a 409 response, else 0."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ControlInputs:
    """All inputs of one tick of one service, except its memory and the time."""

    namespace: str
    name: str
    settings: ControlSettings
    replicas: int
    """Replicas of the live Deployment."""
    started: float
    """Time at which this process became the leader."""
    pods: tuple[PodView, ...] = ()
    samples: tuple[PodSample, ...] = ()
    allocated_replicas: int | None = None
    """The last allocation (None: not yet)."""
    put_outcomes: tuple[PutOutcome, ...] = ()
    failed_writes: int = 0
    """Failed writes of replicas in the last tick."""
    prometheus_lost: bool = False
    """True if Prometheus is configured but has no fresh samples of this service."""
    checks_directly: bool = False
    """True if samples come from Prometheus, and pods can be read directly before replicas or
    admission are reduced."""
    prometheus_disputed: bool = False
    """True if Prometheus has several series where a pod exports one."""
    scale_up_blocked: str = ""
    """Reason why more pods would not help (a bad revision), else empty."""
    out_of_memory_pods: tuple[str, ...] = field(default=())
    rolling_out: bool = False
    """True if the Deployment's template is not yet the spec's, or not yet that of every pod."""
    gpus_per_replica: int = 0
    """Accelerators that a pod of the live template requests."""
    node_needs: NodeNeeds = ANY_NODE
    """What a pod of the live template needs of a node."""
    backlog: Backlog | None = None
    """The batch process's backlog for this service."""

"""The values that decisions take and give: settings, pods, limits, decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from fleetkeeper.api.types import BatchingMode, ScalingMode
from fleetkeeper.plan.control.samples import TIERS, PodSample, Tier

V = TypeVar("V")


class Grade(StrEnum):
    """How far signals may be trusted."""

    FRESH = "Fresh"
    AGEING = "Ageing"
    STALE = "Stale"


class BreakerState(StrEnum):
    """Closed: all is well. Open: the safe state. HalfOpen: being tried."""

    CLOSED = "Closed"
    OPEN = "Open"
    HALF_OPEN = "HalfOpen"


@dataclass(frozen=True, slots=True)
class Decision(Generic[V]):
    """What was decided and why. Not `valid` = HOLD: nothing is known that would justify a change.

    `value` of a hold is what is in force already; a hold is never a zero. `inputs` holds the
    numbers that decided, for `fleetkeeper explain`.
    """

    valid: bool
    value: V
    reason: str
    detail: str
    inputs: tuple[tuple[str, float], ...] = ()


def hold(value: V, reason: str, detail: str, **inputs: float) -> Decision[V]:
    """The decision not to act: `value` stays in force."""
    return Decision(False, value, reason, detail, tuple(inputs.items()))


def act(value: V, reason: str, detail: str, **inputs: float) -> Decision[V]:
    """A decision with its numbers."""
    return Decision(True, value, reason, detail, tuple(inputs.items()))


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """What the resource asks of the loop, in seconds and ratios."""

    min_replicas: int = 1
    max_replicas: int = 8
    pinned_replicas: int | None = None
    scaling_mode: ScalingMode = ScalingMode.AUTO
    scale_down_delay_s: float = 600.0
    queue_wait_objective_s: float = 0.5
    batch_time_objective_s: float = 0.05
    attainment_ratio: float = 0.95
    batching_mode: BatchingMode = BatchingMode.AUTO
    min_sequences: int = 4
    max_sequences: int = 256
    min_tokens: int = 256
    max_tokens: int = 8192
    batch_share_ratio: float = 0.3
    batch_floor_ratio: float = 0.05
    breakers_act: bool = True
    fallback_replicas: int | None = None
    cap_percent: int = 80
    restart_fragmented: bool = False
    paused: bool = False
    generation: int = 1

    @property
    def tunes_replicas(self) -> bool:
        """Whether our want becomes an order."""
        return (
            self.pinned_replicas is None
            and self.scaling_mode is ScalingMode.AUTO
            and not self.paused
        )

    @property
    def gates(self) -> bool:
        """Whether what the load breaker decides is sent to the engines."""
        advised = self.batching_mode is BatchingMode.ADVISORY
        return self.breakers_act and not advised and not self.paused

    @property
    def tunes_limits(self) -> bool:
        """Whether our limits are sent to the engines."""
        return self.batching_mode is BatchingMode.AUTO and not self.paused

    @property
    def restarts(self) -> bool:
        """Whether a replica chosen for a restart really goes; in Advisory of either kind it is told only."""
        advised = (
            self.scaling_mode is ScalingMode.ADVISORY or self.batching_mode is BatchingMode.ADVISORY
        )
        return not advised and not self.paused


@dataclass(frozen=True, slots=True)
class PodView:
    """What the loop needs to know of an engine pod, from the watch cache."""

    name: str
    uid: str
    created: float
    ready: bool = False
    ready_since: float | None = None
    deleting: bool = False
    ip: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one engine: sequences in a batch, tokens of a step."""

    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Admission:
    """What is let in. `admit` and `shares`: by tier (realtime, standard, batch), ratios of one."""

    admit: tuple[float, float, float] = (1.0, 1.0, 1.0)
    batch_share: float = 0.3

    def admit_by_tier(self) -> dict[str, float]:
        """The admitted share by tier name, as PUT /v1/limits takes it."""
        return {str(tier): value for tier, value in zip(TIERS, self.admit, strict=True)}

    def shares_by_tier(self) -> dict[str, float]:
        """The share of sequences by tier name, as PUT /v1/limits takes it."""
        return {str(Tier.BATCH): self.batch_share}


@dataclass(frozen=True, slots=True)
class PodOrder:
    """One PUT /v1/limits that is due now."""

    pod: str
    uid: str
    ip: str
    limits: Limits
    admission: Admission
    lease_s: float
    generation: int


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """How a PUT of the last tick ended. `newest_generation` is what a 409 named, else 0."""

    pod: str
    generation: int
    succeeded: bool
    newest_generation: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ControlInputs:
    """All that one decision about one service may know, besides its memory and the time.

    `replicas` is the live Deployment's number, `ordered_replicas` what was ordered last (None: not
    yet), `failed_writes` the writes of replicas that failed in the last tick, `started` when this
    process began to lead. `scale_up_blocked` says why more pods would not help (a bad revision).
    `prometheus_lost`: a Prometheus is set up and has nothing fresh of this service. `rolling_out`: the
    Deployment's template is not yet the spec's, or not yet every pod's. `gpus_per_replica` are the
    accelerators that a pod of the live template asks for. `checks_directly`: samples come from
    Prometheus, and the pods can be read before anything is taken away on its word.
    `prometheus_disputed`: Prometheus has several series where a pod gives one.
    """

    namespace: str
    name: str
    settings: ControlSettings
    replicas: int
    started: float
    pods: tuple[PodView, ...] = ()
    samples: tuple[PodSample, ...] = ()
    ordered_replicas: int | None = None
    put_outcomes: tuple[PutOutcome, ...] = ()
    failed_writes: int = 0
    prometheus_lost: bool = False
    checks_directly: bool = False
    prometheus_disputed: bool = False
    scale_up_blocked: str = ""
    out_of_memory_pods: tuple[str, ...] = field(default=())
    rolling_out: bool = False
    gpus_per_replica: int = 0

"""The parts of the spec that say how the fleet behaves: scaling, batching, tiers, roll-out."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleetkeeper.api.base import Section
from fleetkeeper.api.enums import (
    AccessFrom,
    BatchingMode,
    BreakerMode,
    EngineUpdates,
    OnFailure,
    RolloutStrategy,
    RoutingPolicy,
    ScalingMode,
)
from fleetkeeper.api.scheduling import LabelSelector


class Scaling(Section):
    """How many replicas."""

    mode: ScalingMode = Field(
        ScalingMode.AUTO,
        description="Auto: Fleetkeeper decides. Advisory: it computes and reports, and does not act. External: spec.replicas is the order (a person, HPA, KEDA).",
    )
    min_replicas: int = Field(
        1, ge=1, le=1000, description="The fewest replicas that Fleetkeeper orders."
    )
    max_replicas: int = Field(
        8, ge=1, le=1000, description="The most replicas that Fleetkeeper orders."
    )
    scale_down_delay_seconds: int = Field(
        600,
        ge=30,
        le=86_400,
        description="Seconds that fewer replicas must have been enough before one goes.",
    )


class Objectives(Section):
    """What the fleet is held to."""

    queue_wait_milliseconds: int = Field(
        500,
        ge=10,
        le=600_000,
        description="The time from a request's arrival to its first scheduling, in milliseconds.",
    )
    batch_time_milliseconds: int = Field(
        50,
        ge=2,
        le=60_000,
        description="The time of one engine step, which a user feels between two tokens, in milliseconds.",
    )
    attainment_percent: int = Field(
        95,
        ge=50,
        le=99,
        description="The share of requests and of steps that must be within, in percent.",
    )


class Batching(Section):
    """The limits of a batch, and who moves them."""

    mode: BatchingMode = Field(
        BatchingMode.AUTO,
        description="Auto: Fleetkeeper moves the limits of the running engines. Advisory: it computes and reports. Fixed: the start-up values stay.",
    )
    min_sequences: int = Field(
        4, ge=1, le=8192, description="The fewest sequences that a batch is limited to."
    )
    max_sequences: int = Field(
        256,
        ge=1,
        le=8192,
        description="The most sequences in a batch; also the engine's start-up value. A change restarts the engines.",
    )
    min_tokens: int = Field(
        256, ge=64, le=1_048_576, description="The fewest tokens that a step is limited to."
    )
    max_tokens: int = Field(
        8192,
        ge=64,
        le=1_048_576,
        description="The most tokens in a step; also the engine's start-up value. A change restarts the engines.",
    )


class Tier(Section):
    """A class of requests."""

    queue_limit: int = Field(
        256,
        ge=0,
        le=100_000,
        description="Requests of this tier that may wait in one replica; beyond it they are refused with 429.",
    )


class RealtimeTier(Tier):
    """Requests of the tier realtime."""

    queue_limit: int = Field(
        64,
        ge=0,
        le=100_000,
        description="Requests of this tier that may wait in one replica; beyond it they are refused with 429.",
    )


class BatchTier(Tier):
    """Requests of the tier batch."""

    queue_limit: int = Field(
        1024,
        ge=0,
        le=100_000,
        description="Requests of this tier that may wait in one replica; beyond it they are refused with 429.",
    )
    share_percent: int = Field(
        30,
        ge=1,
        le=100,
        description="The most of the sequences that batch requests take while others wait, in percent.",
    )
    floor_percent: int = Field(
        5,
        ge=0,
        le=100,
        description="The share of the sequences that batch requests always keep, in percent.",
    )


class Tiers(Section):
    """The classes of requests, chosen by the request header X-Inference-Tier; without it standard."""

    realtime: RealtimeTier = Field(
        default_factory=RealtimeTier, description="Requests that somebody waits for."
    )
    standard: Tier = Field(default_factory=Tier, description="Requests without a tier.")
    batch: BatchTier = Field(
        default_factory=BatchTier, description="Requests that may wait for long."
    )


class Breaker(Section):
    """The circuit breakers."""

    mode: BreakerMode = Field(
        BreakerMode.AUTO,
        description="Auto: they act. Disabled: they report only.",
    )
    fallback_replicas: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        None,
        description="The fewest replicas while the control breaker is open. Absent means those that run.",
    )


class Routing(Section):
    """The router in front of the engines."""

    policy: RoutingPolicy = Field(
        RoutingPolicy.LEAST_LOADED,
        description="LeastLoaded: the less loaded of two replicas. SessionAffinity: by the header X-Session-ID. RoundRobin: in turn. None: no router, a plain Service.",
    )
    replicas: int = Field(1, ge=1, le=16, description="Router pods. Not used with policy None.")


class Access(Section):
    """Who may reach the address."""

    from_: AccessFrom = Field(
        AccessFrom.CLUSTER,
        alias="from",
        description="SameNamespace: pods of the service's namespace. Cluster: every pod. Namespaces: those that namespaceSelector selects.",
    )
    namespace_selector: LabelSelector | None = Field(
        None, description="The namespaces, with from: Namespaces."
    )


class Rollout(Section):
    """How a change reaches the replicas."""

    strategy: RolloutStrategy = Field(
        RolloutStrategy.AUTO,
        description="Surge: a new pod comes first. Replace: an old pod goes first. Auto: Surge, and Replace when the extra pod found no accelerator for 120 seconds and more than one replica is ready.",
    )
    max_surge: int = Field(
        1, ge=0, le=100, description="Pods above the ordered number during a roll-out."
    )
    max_unavailable: int = Field(
        0, ge=0, le=100, description="Pods below the ordered number during a roll-out."
    )
    on_failure: OnFailure = Field(
        OnFailure.ROLLBACK,
        description="Rollback: return to the last revision whose pods were ready for a minute. Hold: stop and say so.",
    )
    engine_updates: EngineUpdates = Field(
        EngineUpdates.ON_SPEC_CHANGE,
        description="When a newer profile behind an alias is taken: with the next change of the spec, or automatically, one service at a time.",
    )
    drain_seconds: int = Field(
        120,
        ge=0,
        le=3600,
        description="Seconds that a pod which goes may take to finish its requests.",
    )
    startup_seconds: int = Field(
        3600,
        ge=60,
        le=86_400,
        description="Seconds that an engine may take to load its model before its start counts as failed.",
    )


class Disruption(Section):
    """The PodDisruptionBudget of the engines."""

    max_unavailable: int = Field(
        1,
        ge=0,
        le=1000,
        description="Replicas that evictions (node drains) may take at a time. 0 blocks node drains for as long as the service lives.",
    )

"""The parts of the spec about the whole fleet: scaling, batching, tiers, routing, and rollout."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BeforeValidator, Field

from fleetkeeper.api.base import LabelValue, ObjectName, Quantity, Section, StringMap, frozen_map
from fleetkeeper.api.enums import (
    BatchingMode,
    BreakerMode,
    EngineUpdates,
    OnFailure,
    RolloutStrategy,
    RoutingPolicy,
    ScalingMode,
    WakeForBatch,
)
from fleetkeeper.api.scheduling import Affinity, Toleration
from fleetkeeper.api.values.int_or_percent import IntOrPercent


class Sleep(Section):
    """When a service without requests releases all its replicas. Requests wake it."""

    after_idle_seconds: int = Field(
        900,
        ge=30,
        le=604_800,
        description="Time in seconds without a request after which the service goes to sleep.",
    )
    min_awake_seconds: int = Field(
        300,
        ge=0,
        le=86_400,
        description="Minimum time in seconds from the start of the replicas to the next sleep.",
    )
    wake_for_batch: WakeForBatch = Field(
        WakeForBatch.DEADLINE,
        description="Deadline: lines of a batch wake the service once half of the time to the batch's deadline has passed. Always: they wake it at once.",
    )


MIN_REPLICAS_ZERO: Final = "must be at least 1; for no replicas without requests set scaling.sleep"


def _not_zero(value: object) -> object:
    """Refuse 0, which users of other autoscalers write, with what to write instead."""
    if value == 0 and value is not False:
        raise ValueError(MIN_REPLICAS_ZERO)
    return value


class Scaling(Section):
    """The bounds and the mode of scaling."""

    mode: ScalingMode = Field(
        ScalingMode.AUTO,
        description="Auto: Fleetkeeper sets the number of replicas. Advisory: Fleetkeeper reports a recommendation and does not apply it. External: spec.replicas sets the number (a person, HPA, or KEDA).",
    )
    min_replicas: Annotated[int, BeforeValidator(_not_zero)] = Field(
        1,
        ge=1,
        le=1000,
        description="Minimum number of replicas that Fleetkeeper sets while the service is awake. For 0 replicas without requests, set scaling.sleep.",
    )
    max_replicas: int = Field(
        8, ge=1, le=1000, description="Maximum number of replicas that Fleetkeeper sets."
    )
    scale_down_delay_seconds: int = Field(
        600,
        ge=30,
        le=86_400,
        description="Time in seconds for which fewer replicas must have been enough before Fleetkeeper removes one.",
    )
    sleep: Sleep | None = Field(
        None,
        description="When a service without requests releases all its replicas. The gateway holds the next requests until it is awake. Requires access Gateway and mode Auto. Without it the service never sleeps.",
    )


class Objectives(Section):
    """The service level objectives of the fleet."""

    queue_wait_milliseconds: int = Field(
        500,
        ge=10,
        le=600_000,
        description="Maximum time from a request's arrival until the engine first schedules it, in milliseconds.",
    )
    batch_time_milliseconds: int = Field(
        50,
        ge=2,
        le=60_000,
        description="Maximum duration of one engine step in milliseconds. Users see it as the time between two tokens.",
    )
    attainment_percent: int = Field(
        95,
        ge=50,
        le=99,
        description="Share of requests and of engine steps that must meet their objective, in percent.",
    )


class Batching(Section):
    """The bounds of the batch limits, and the mode in which they change."""

    mode: BatchingMode = Field(
        BatchingMode.AUTO,
        description="Auto: Fleetkeeper changes the batch limits of running engines. Advisory: Fleetkeeper reports recommended limits and does not apply them. Fixed: the engines keep their startup values.",
    )
    min_sequences: int = Field(
        4, ge=1, le=8192, description="Lower bound for the limit of sequences in a batch."
    )
    max_sequences: int = Field(
        256,
        ge=1,
        le=8192,
        description="Upper bound for the limit of sequences in a batch, and the startup value of the engines. A change restarts the engines.",
    )
    min_tokens: int = Field(
        256,
        ge=64,
        le=1_048_576,
        description="Lower bound for the limit of tokens in an engine step.",
    )
    max_tokens: int = Field(
        8192,
        ge=64,
        le=1_048_576,
        description="Upper bound for the limit of tokens in an engine step, and the startup value of the engines. A change restarts the engines.",
    )


class Tier(Section):
    """A class of requests."""

    queue_limit: int = Field(
        256,
        ge=0,
        le=100_000,
        description="Maximum number of requests of this tier that wait in one replica. Further requests receive status 429.",
    )


class RealtimeTier(Tier):
    """The tier realtime."""

    queue_limit: int = Field(
        64,
        ge=0,
        le=100_000,
        description="Maximum number of requests of this tier that wait in one replica. Further requests receive status 429.",
    )


class BatchTier(Tier):
    """The tier batch."""

    queue_limit: int = Field(
        1024,
        ge=0,
        le=100_000,
        description="Maximum number of requests of this tier that wait in one replica. Further requests receive status 429.",
    )
    share_percent: int = Field(
        30,
        ge=1,
        le=100,
        description="Maximum share of the sequences that batch requests use while requests of other tiers wait, in percent.",
    )
    floor_percent: int = Field(
        5,
        ge=0,
        le=100,
        description="Share of the sequences that is always available to batch requests, in percent.",
    )


class Tiers(Section):
    """The classes of requests. The request header X-Inference-Tier selects one; the default is standard."""

    realtime: RealtimeTier = Field(
        default_factory=RealtimeTier,
        description="Requests of interactive users. They have priority.",
    )
    standard: Tier = Field(
        default_factory=Tier, description="Requests without the header X-Inference-Tier."
    )
    batch: BatchTier = Field(
        default_factory=BatchTier,
        description="Requests that can wait for minutes. They are shed first.",
    )


class Breaker(Section):
    """The circuit breakers."""

    mode: BreakerMode = Field(
        BreakerMode.AUTO,
        description="Auto: the breakers act when they open. Disabled: the breakers only report their state.",
    )
    fallback_replicas: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        None,
        description="Minimum number of replicas while the control breaker is open. Absent means the current number.",
    )


class RouterPlacement(Section):
    """The scheduling of the router pods."""

    node_selector: StringMap[LabelValue] = Field(
        default_factory=frozen_map,
        max_length=32,
        description="Labels that a node must have to run router pods.",
    )
    tolerations: tuple[Toleration, ...] = Field(
        (), max_length=32, description="Taints that the router pods tolerate."
    )
    affinity: Affinity = Field(
        default_factory=Affinity,
        description="Affinity rules as in a Kubernetes pod. Pod affinity applies to the service's namespace only.",
    )
    priority_class_name: ObjectName | None = Field(
        None,
        description="PriorityClass of the router pods. Absent means the cluster's default. System classes (system-...) are allowed only if the operator's settings allow them.",
    )


class RouterResources(Section):
    """The resources of each router pod."""

    cpu: Quantity | None = Field(
        None,
        description="CPU request of each router pod, for example 500m. There is no limit, because a throttled router delays every request. Absent means the operator's setting.",
    )
    memory: Quantity | None = Field(
        None,
        description="Memory request and limit of each router pod, for example 2Gi. Absent means the operator's setting.",
    )


class Routing(Section):
    """The router in front of the engines."""

    policy: RoutingPolicy = Field(
        RoutingPolicy.LEAST_LOADED,
        description="LeastLoaded: the least loaded of three replicas, by requests under way. SessionAffinity: the same replica for the same X-Session-ID header, on every router pod, unless it has 1.5 times the mean load. PrefixAware: likewise for bodies with the same first 1024 bytes, or the same X-Fleetkeeper-Prefix header. RoundRobin: each replica in turn. None: no router, only a Kubernetes Service.",
    )
    replicas: int = Field(
        2,
        ge=1,
        le=16,
        description="Number of router pods. The scheduler spreads them over nodes where possible. Ignored with policy None.",
    )
    placement: RouterPlacement = Field(
        default_factory=RouterPlacement, description="Scheduling of the router pods."
    )
    resources: RouterResources = Field(
        default_factory=RouterResources, description="Resources of each router pod."
    )


class Rollout(Section):
    """The rollout of a change to the replicas."""

    strategy: RolloutStrategy = Field(
        RolloutStrategy.AUTO,
        description="Surge: create a new pod before an old one is removed. Replace: remove an old pod first. Swap: like Replace, and the gateway holds requests while it replaces an only replica; requires access Gateway. Auto: Surge, but if the extra pod found no accelerator for 120 seconds: Replace if more than one replica is ready; Swap for an only replica with access Gateway whose measured start, twice, fits into the time that the gateway holds requests.",
    )
    max_surge: Annotated[int | str, IntOrPercent(100)] = Field(
        1,
        description="Maximum number of pods above the desired number during a rollout, as a number or as a percentage of the desired number, for example 25%. A percentage rounds up.",
    )
    max_unavailable: Annotated[int | str, IntOrPercent(100)] = Field(
        0,
        description="Maximum number of pods below the desired number during a rollout, as a number or as a percentage of the desired number, for example 25%. A percentage rounds down. If maxSurge and maxUnavailable both come to 0 pods, one pod may be unavailable.",
    )
    on_failure: OnFailure = Field(
        OnFailure.ROLLBACK,
        description="Rollback: return to the last revision whose pods were ready for one minute. Hold: stop the rollout and report it in the conditions.",
    )
    engine_updates: EngineUpdates = Field(
        EngineUpdates.ON_SPEC_CHANGE,
        description="When the service adopts a newer profile behind its alias, and a newer router image. OnSpecChange: with the next change of the spec that replaces the pods concerned. Automatic: without a change of the spec; engines one service at a time.",
    )
    drain_seconds: int = Field(
        120,
        ge=0,
        le=3600,
        description="Time in seconds that a pod has to finish its requests before it stops.",
    )
    startup_seconds: int = Field(
        3600,
        ge=60,
        le=86_400,
        description="Time in seconds that an engine has to load its model before the start counts as failed.",
    )


class Disruption(Section):
    """The PodDisruptionBudget of the engines."""

    max_unavailable: Annotated[int | str, IntOrPercent(1000)] = Field(
        1,
        description="Maximum number of replicas that evictions, such as node drains, may remove at the same time, as a number or as a percentage of the desired number, for example 25%. Kubernetes rounds this percentage up. 0 blocks node drains for as long as the service exists.",
    )

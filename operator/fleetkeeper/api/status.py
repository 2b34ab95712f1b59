"""The status of an InferenceService, as published in the CRD.

No field has a default and every field may be absent. Numbers that change constantly are metrics, not
status. A time in the status is the time of a change, never the time of a reconcile.
`fleetkeeper.api.status_enums` says which words are enums in the CRD, and why reasons are not.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleetkeeper.api.base import Section
from fleetkeeper.api.conditions import MESSAGE_MAX_LENGTH, ConditionType, Status
from fleetkeeper.api.status_enums import BreakerState, ReplicaStage, Subject
from fleetkeeper_contract.sleep import KEPT_STARTS, SleepState

Generation = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]
Percent = Annotated[int, Field(ge=0, le=100_000)]
Word = Annotated[str, Field(max_length=128)]
Text = Annotated[str, Field(max_length=1024)]
Hash = Annotated[str, Field(max_length=64)]


MAX_REPLICA_STATES = 20
"""The bound of the list of replicas: 1,000 of them would fill the object."""


class TimeMark:
    """A marker for strings that are times (RFC 3339), for the schema generator."""


Time = Annotated[str, Field(max_length=64), TimeMark()]


class Summary(Section):
    """The values of columns of `kubectl get`."""

    ready: Word | None = Field(None, description="Ready and desired replicas, for example 3/3.")
    breaker: Word | None = Field(
        None,
        description="Circuit breakers that are not closed, for example batch open. Otherwise closed.",
    )


class EngineStatus(Section):
    """The engine profile in use."""

    profile: Word | None = Field(None, description="Exact name of the profile.")
    requested: Word | None = Field(
        None, description="Name or alias in the spec that was resolved to this profile."
    )
    version: Word | None = Field(None, description="Version of vLLM.")
    update_available: Word | None = Field(
        None, description="Newer profile behind the alias, if there is one."
    )
    simulated: bool | None = Field(
        None, description="True if the engines simulate vLLM: no model answers. Otherwise absent."
    )


class Effective(Section):
    """The values that depend on both the spec and the profile."""

    accelerators: Count | None = Field(None, description="Number of accelerators of each replica.")
    fallback_replicas: Count | None = Field(
        None, description="Minimum number of replicas while the control breaker is open."
    )


class LastGood(Section):
    """The newest revision whose pods were ready for one minute."""

    generation: Generation | None = Field(None, description="Generation of the revision.")
    template_hash: Hash | None = Field(None, description="Hash of its pod template.")


class Rollback(Section):
    """A rollout that was rolled back."""

    generation: Generation | None = Field(None, description="Generation whose rollout failed.")
    template_hash: Hash | None = Field(None, description="Hash of the failed pod template.")
    reason: Word | None = Field(None, description="Reason for the failure.")
    message: Text | None = Field(None, description="Details of the failure.")


class ScalingStatus(Section):
    """The desired number of replicas and the reason for it."""

    desired: Count | None = Field(None, description="Desired number of replicas.")
    wanted: Count | None = Field(
        None,
        description="Recommended number of replicas. Present only with scaling.mode Advisory.",
    )
    reason: Word | None = Field(None, description="Reason for the number.")
    message: Text | None = Field(None, description="Details of the reason, with figures.")
    since: Time | None = Field(None, description="Time of the last change.")


class SleepStatus(Section):
    """The sleep of a service, and the replacement of its only replica: both are held requests."""

    number: Count | None = Field(
        None, description="Number of the last sleep or swap. A wake mark counts for this one only."
    )
    state: SleepState | None = Field(
        None,
        description="GoingToSleep: the replicas still run, and the gateway holds new requests. Asleep: no replica runs. Waking: the first replica starts. Swapping: the only replica is replaced, and the gateway holds requests meanwhile. Absent while the service is awake.",
    )
    since: Time | None = Field(None, description="Time of the last change of the state.")
    tier: Word | None = Field(
        None, description="Most urgent tier of the requests that woke the service."
    )
    failures: Count | None = Field(
        None, description="Number of failed starts in a row. Absent if it is 0."
    )
    message: Text | None = Field(
        None,
        description="Why the last start failed, why the service never started, for which service it sleeps, or why it stays awake.",
    )
    never_started: bool | None = Field(
        None,
        description="True if there was no room for the first start of the service. Absent once a start succeeded.",
    )
    start_seconds: tuple[Count, ...] | None = Field(
        None, max_length=KEPT_STARTS, description="Durations of the last starts in seconds."
    )


class BatchingStatus(Section):
    """The batch limits and the reason for them."""

    sequences: Count | None = Field(None, description="Limit of sequences in a batch.")
    tokens: Annotated[int, Field(ge=0, le=100_000_000)] | None = Field(
        None, description="Limit of tokens in an engine step."
    )
    applied_replicas: Count | None = Field(
        None, description="Number of replicas that have confirmed these limits."
    )
    reason: Word | None = Field(None, description="Reason for the limits.")
    message: Text | None = Field(None, description="Details of the reason, with figures.")
    since: Time | None = Field(None, description="Time of the last change.")


class LoadBreakers(Section):
    """The state of each tier's load breaker: Closed, Open, or HalfOpen."""

    realtime: BreakerState | None = Field(
        None, description="State of the breaker of the tier realtime."
    )
    standard: BreakerState | None = Field(
        None, description="State of the breaker of the tier standard."
    )
    batch: BreakerState | None = Field(None, description="State of the breaker of the tier batch.")


class BreakerStatus(Section):
    """The states of the circuit breakers and the reason for the last change."""

    control: BreakerState | None = Field(
        None, description="State of the control breaker: Closed, Open, or HalfOpen."
    )
    source: BreakerState | None = Field(
        None,
        description="Open while Prometheus provides no fresh samples. Otherwise Closed.",
    )
    load: LoadBreakers | None = Field(None, description="States of the load breakers of all tiers.")
    reason: Word | None = Field(None, description="Reason for the last change.")
    message: Text | None = Field(None, description="Details of the last change, with figures.")
    since: Time | None = Field(None, description="Time of the last change of a breaker.")


class MemoryStatus(Section):
    """The memory cap and the measured memory of the replicas."""

    cap_percent: Percent | None = Field(None, description="Memory cap in percent.")
    peak_percent: Percent | None = Field(
        None, description="Highest measured memory peak of a replica in percent."
    )


class Remedy(Section):
    """The smaller limits that apply after engines ran out of memory."""

    reason: Word | None = Field(None, description="Problem that the remedy addresses.")
    max_sequences: Count | None = Field(
        None, description="Value that applies instead of batching.maxSequences."
    )
    cap_percent: Percent | None = Field(
        None, description="Value that applies instead of memory.capPercent."
    )
    attempts: Count | None = Field(None, description="Number of steps taken.")
    generation: Generation | None = Field(
        None, description="Generation of the spec to which the remedy applies."
    )
    since: Time | None = Field(None, description="Time of the last step.")


class Decision(Section):
    """A decision that changed the service."""

    time: Time = Field(description="Time of the decision.")
    what: Subject = Field(
        description="Subject of the change: replicas, limits, breaker, or restart."
    )
    from_: Word | None = Field(None, alias="from", description="Value before the change.")
    to: Word | None = Field(None, description="Value after the change.")
    reason: Word | None = Field(None, description="Reason for the decision.")


class Condition(Section):
    """A condition in the form of Kubernetes."""

    type: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description=f"Type of the condition, one of {', '.join(ConditionType)}."
    )
    status: Status = Field(description="Status of the condition: True, False, or Unknown.")
    reason: Annotated[
        str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z]([A-Za-z0-9]*[A-Za-z0-9])?$")
    ] = Field(description="Reason for the status. The reference lists all reasons.")
    message: Annotated[str, Field(max_length=MESSAGE_MAX_LENGTH)] = Field(
        description="Details of the reason and the action to take."
    )
    observed_generation: Generation | None = Field(
        None, description="Generation of the spec to which the condition applies."
    )
    last_transition_time: Time = Field(description="Time of the last change of the status.")


class ReplicaState(Section):
    """The state of one replica."""

    name: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        description="Name of the pod."
    )
    node: Annotated[str, Field(max_length=253)] | None = Field(
        None, description="Name of its node. Absent until the pod is scheduled."
    )
    template_hash: Hash | None = Field(
        None, description="Hash of its pod template, as in lastGood and rollback."
    )
    stage: ReplicaStage = Field(
        description="Stage of its start, or Ready, Failing, or Draining. The reference explains each."
    )
    reason: Word | None = Field(
        None,
        description="Reason why it makes no progress, one of the reasons of conditions. Absent if none is known.",
    )
    since: Time = Field(description="Time of the last change of the stage or the reason.")


class InferenceServiceStatus(Section):
    """The observed state of an InferenceService."""

    observed_generation: Generation | None = Field(
        None, description="Generation of the spec that Fleetkeeper last reconciled."
    )
    url: Annotated[str, Field(max_length=512)] | None = Field(
        None,
        description="URL of the OpenAI-compatible API inside the cluster. Absent while the Kubernetes Service of that name is not the service's own: the gateway sends nothing there.",
    )
    router: Word | None = Field(
        None,
        description="Kind of the router: Envoy. Absent while a pod of vllm-router, of an earlier release, is left, and if there is no router.",
    )
    replicas: Count | None = Field(None, description="Number of replicas that exist.")
    ready_replicas: Count | None = Field(None, description="Number of ready replicas.")
    updated_replicas: Count | None = Field(
        None, description="Number of replicas of the current revision."
    )
    available_replicas: Count | None = Field(
        None,
        description="Number of replicas that have been ready for 5 seconds, so that a rollout counts them.",
    )
    replica_states: tuple[ReplicaState, ...] | None = Field(
        None,
        max_length=MAX_REPLICA_STATES,
        description="States of up to 20 replicas: first those with a reason, then others that are not ready, then by name.",
    )
    unlisted_replicas: Count | None = Field(
        None, description="Number of replicas that replicaStates leaves out. Absent if it is 0."
    )
    selector: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="Label selector of the replicas, for the scale subresource."
    )
    summary: Summary | None = Field(None, description="Values of columns of kubectl get.")
    engine: EngineStatus | None = Field(None, description="Engine profile in use.")
    effective: Effective | None = Field(
        None, description="Values that depend on both the spec and the profile."
    )
    last_good: LastGood | None = Field(
        None, description="Newest revision whose pods were ready for one minute."
    )
    rollback: Rollback | None = Field(
        None, description="Rollout that was rolled back. Absent if there was none."
    )
    suspended_replicas: Count | None = Field(
        None,
        description="Number of replicas to which the service returns when spec.suspend is false. Absent if the service is not suspended.",
    )
    scaling: ScalingStatus | None = Field(
        None, description="Desired number of replicas and the reason for it."
    )
    sleep: SleepStatus | None = Field(
        None, description="Sleep or swap of the service. Absent if it had neither."
    )
    batching: BatchingStatus | None = Field(
        None, description="Batch limits and the reason for them."
    )
    breaker: BreakerStatus | None = Field(
        None, description="States of the circuit breakers and the reason for the last change."
    )
    memory: MemoryStatus | None = Field(
        None, description="Memory cap and measured memory of the replicas."
    )
    remedy: Remedy | None = Field(
        None,
        description="Smaller limits that apply after engines ran out of memory. Absent if none apply.",
    )
    decisions: tuple[Decision, ...] | None = Field(
        None, max_length=10, description="Last ten decisions that changed the service."
    )
    conditions: tuple[Condition, ...] | None = Field(
        None, max_length=16, description="Conditions of the service. The reference explains each."
    )

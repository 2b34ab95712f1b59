"""The status of an InferenceService: the shape that the CRD publishes.

Nothing here has a default and everything may be absent. Numbers that change all the time are
metrics, not status; a time in a status is the time of a change, never of a look.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleetkeeper.api.base import Section
from fleetkeeper.api.conditions import MESSAGE_MAX_LENGTH, ConditionType, Status

Generation = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]
Percent = Annotated[int, Field(ge=0, le=100_000)]
Word = Annotated[str, Field(max_length=128)]
Text = Annotated[str, Field(max_length=1024)]
Hash = Annotated[str, Field(max_length=64)]


class TimeMark:
    """Tells the schema generator that a string is a time (RFC 3339)."""


Time = Annotated[str, Field(max_length=64), TimeMark()]


class Summary(Section):
    """For the columns of `kubectl get`."""

    ready: Word | None = Field(
        None, description="Ready replicas and ordered ones, for example 3/3."
    )
    breaker: Word | None = Field(
        None, description="Which breaker is not closed, for example batch open; else closed."
    )


class EngineStatus(Section):
    """The engine profile in force."""

    profile: Word | None = Field(None, description="The exact name of the profile.")
    requested: Word | None = Field(
        None, description="The name or alias in the spec from which it was resolved."
    )
    version: Word | None = Field(None, description="The vLLM version.")
    update_available: Word | None = Field(
        None, description="The newer profile behind the alias, where there is one."
    )


class Effective(Section):
    """Values that follow from the spec and the profile together."""

    accelerators: Count | None = Field(None, description="Accelerators of each replica.")
    fallback_replicas: Count | None = Field(
        None, description="The fewest replicas while the control breaker is open."
    )


class LastGood(Section):
    """The newest revision whose pods were ready for a minute."""

    generation: Generation | None = Field(None, description="The generation that it came from.")
    template_hash: Hash | None = Field(None, description="The hash of its pod template.")


class Rollback(Section):
    """A roll-out that was taken back."""

    generation: Generation | None = Field(None, description="The generation that failed.")
    template_hash: Hash | None = Field(None, description="The hash of the failed pod template.")
    reason: Word | None = Field(None, description="Why it failed.")
    message: Text | None = Field(None, description="Why it failed, in words.")


class ScalingStatus(Section):
    """The number of replicas in force."""

    desired: Count | None = Field(None, description="Replicas that are ordered.")
    wanted: Count | None = Field(
        None, description="Replicas that the measurements ask for, before any bound."
    )
    reason: Word | None = Field(None, description="Why, in one word.")
    message: Text | None = Field(None, description="Why, in words and figures.")
    since: Time | None = Field(None, description="When the number last changed.")


class BatchingStatus(Section):
    """The batch limits in force."""

    sequences: Count | None = Field(None, description="The limit of sequences in a batch.")
    tokens: Annotated[int, Field(ge=0, le=100_000_000)] | None = Field(
        None, description="The limit of tokens in a step."
    )
    applied_replicas: Count | None = Field(
        None, description="Replicas in which these limits are in force."
    )
    reason: Word | None = Field(None, description="Why, in one word.")
    message: Text | None = Field(None, description="Why, in words and figures.")
    since: Time | None = Field(None, description="When the limits last changed.")


class LoadBreakers(Section):
    """The load breaker of each tier: Closed, Open or HalfOpen."""

    realtime: Word | None = Field(None, description="The breaker of the tier realtime.")
    standard: Word | None = Field(None, description="The breaker of the tier standard.")
    batch: Word | None = Field(None, description="The breaker of the tier batch.")


class BreakerStatus(Section):
    """The circuit breakers."""

    control: Word | None = Field(None, description="The control breaker: Closed, Open or HalfOpen.")
    source: Word | None = Field(
        None,
        description="Open while Prometheus is silent and replicas are read directly, else Closed.",
    )
    load: LoadBreakers | None = Field(None, description="The load breaker of each tier.")
    reason: Word | None = Field(None, description="Why the last change, in one word.")
    message: Text | None = Field(None, description="Why the last change, in words and figures.")
    since: Time | None = Field(None, description="When one of them last changed.")


class MemoryStatus(Section):
    """The memory of the replicas."""

    cap_percent: Percent | None = Field(None, description="The cap, in percent.")
    peak_percent: Percent | None = Field(
        None, description="The highest measured peak of a replica, in percent."
    )


class Remedy(Section):
    """Smaller limits after engines ran out of memory."""

    reason: Word | None = Field(None, description="What they are a remedy for.")
    message: Text | None = Field(None, description="What was changed, in words and figures.")
    max_sequences: Count | None = Field(None, description="batching.maxSequences in force.")
    max_tokens: Annotated[int, Field(ge=0, le=100_000_000)] | None = Field(
        None, description="batching.maxTokens in force."
    )
    cap_percent: Percent | None = Field(None, description="memory.capPercent in force.")
    attempts: Count | None = Field(None, description="Steps taken so far.")
    generation: Generation | None = Field(None, description="The generation that it belongs to.")
    since: Time | None = Field(None, description="When the last step was taken.")


class Decision(Section):
    """A decision that changed something."""

    time: Time = Field(description="When.")
    what: Word = Field(description="What: replicas, limits, breaker, restart.")
    from_: Word | None = Field(None, alias="from", description="The value before.")
    to: Word | None = Field(None, description="The value after.")
    reason: Word | None = Field(None, description="Why, in one word.")
    message: Text | None = Field(None, description="Why, in words and figures.")


class Condition(Section):
    """One condition, in Kubernetes' own shape."""

    type: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description=f"One of {', '.join(ConditionType)}."
    )
    status: Status = Field(description="True, False or Unknown.")
    reason: Annotated[
        str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z]([A-Za-z0-9]*[A-Za-z0-9])?$")
    ] = Field(description="Why, in one word of a closed set.")
    message: Annotated[str, Field(max_length=MESSAGE_MAX_LENGTH)] = Field(
        description="Why, in words that say what to do."
    )
    observed_generation: Generation | None = Field(
        None, description="The generation that it speaks of."
    )
    last_transition_time: Time = Field(description="When the status last flipped.")


class InferenceServiceStatus(Section):
    """What is."""

    observed_generation: Generation | None = Field(
        None, description="The generation of the spec that was last looked at."
    )
    url: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="The address of the OpenAI-compatible API inside the cluster."
    )
    replicas: Count | None = Field(None, description="Replicas that exist.")
    ready_replicas: Count | None = Field(None, description="Replicas that are ready.")
    updated_replicas: Count | None = Field(None, description="Replicas of the current revision.")
    selector: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="The label selector of the replicas, for the scale subresource."
    )
    summary: Summary | None = Field(None, description="For the columns of kubectl get.")
    engine: EngineStatus | None = Field(None, description="The engine profile in force.")
    effective: Effective | None = Field(
        None, description="Values that follow from the spec and the profile together."
    )
    last_good: LastGood | None = Field(
        None, description="The newest revision whose pods were ready for a minute."
    )
    rollback: Rollback | None = Field(
        None, description="The roll-out that was taken back; absent when none was."
    )
    scaling: ScalingStatus | None = Field(None, description="The number of replicas in force.")
    batching: BatchingStatus | None = Field(None, description="The batch limits in force.")
    breaker: BreakerStatus | None = Field(None, description="The circuit breakers.")
    memory: MemoryStatus | None = Field(None, description="The memory of the replicas.")
    remedy: Remedy | None = Field(
        None,
        description="Smaller limits after engines ran out of memory; absent when none are in force.",
    )
    decisions: tuple[Decision, ...] | None = Field(
        None, max_length=10, description="The last ten decisions that changed something."
    )
    conditions: tuple[Condition, ...] | None = Field(
        None, max_length=16, description="What is true of the service; see the reference."
    )

"""Where pods may run, in Kubernetes' own words: tolerations, affinity, label selectors.

Kubernetes' types less the fields that name other namespaces: a service stays within its own.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from fleetkeeper.api.base import LabelKey, LabelValue, Section, StringMap, frozen_map


class SelectorOperator(StrEnum):
    """How a label is compared."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class NodeSelectorOperator(StrEnum):
    """How a node's label or field is compared."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GT = "Gt"
    LT = "Lt"


class TolerationOperator(StrEnum):
    """How a taint is compared."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    """What a taint does to pods that do not tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(Section):
    """A taint that the engine pods tolerate."""

    key: LabelKey | None = Field(
        None, description="The taint's key. Absent with operator Exists: every taint."
    )
    operator: TolerationOperator | None = Field(
        None, description="Exists or Equal. Absent means Equal."
    )
    value: LabelValue | None = Field(None, description="The taint's value, with operator Equal.")
    effect: TaintEffect | None = Field(
        None, description="The effect to tolerate. Absent means every effect."
    )
    toleration_seconds: int | None = Field(
        None,
        ge=0,
        le=86400 * 365,
        description="Seconds that a NoExecute taint is tolerated. Absent means for ever.",
    )


class LabelRequirement(Section):
    """One comparison of a label."""

    key: LabelKey = Field(description="The label's key.")
    operator: SelectorOperator = Field(description="How the label is compared with `values`.")
    values: tuple[LabelValue, ...] = Field(
        (),
        max_length=32,
        description="What it is compared with; empty with Exists and DoesNotExist.",
    )


class LabelSelector(Section):
    """Selects by labels. All parts must hold."""

    match_labels: StringMap[LabelValue] = Field(
        default_factory=frozen_map,
        max_length=32,
        description="Labels that must have exactly these values.",
    )
    match_expressions: tuple[LabelRequirement, ...] = Field(
        (), max_length=32, description="Further comparisons of labels."
    )


class NodeRequirement(Section):
    """One comparison of a node's label or field."""

    key: LabelKey = Field(description="The node's label key, or the field's name.")
    operator: NodeSelectorOperator = Field(description="How it is compared with `values`.")
    values: tuple[LabelValue, ...] = Field(
        (), max_length=32, description="What it is compared with; one number with Gt and Lt."
    )


class NodeTerm(Section):
    """Nodes for which every comparison holds."""

    match_expressions: tuple[NodeRequirement, ...] = Field(
        (), max_length=16, description="Comparisons of labels."
    )
    match_fields: tuple[NodeRequirement, ...] = Field(
        (), max_length=16, description="Comparisons of fields."
    )


Weight = Annotated[int, Field(ge=1, le=100)]


class PreferredNodeTerm(Section):
    """A preference for nodes."""

    weight: Weight = Field(description="How much it counts, 1 to 100.")
    preference: NodeTerm = Field(description="The nodes that are preferred.")


class NodeSelector(Section):
    """Nodes for which at least one of the terms holds."""

    node_selector_terms: tuple[NodeTerm, ...] = Field(
        min_length=1, max_length=16, description="The terms; one must hold."
    )


class NodeAffinity(Section):
    """Which nodes."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = Field(
        None, description="Nodes that the pods must run on."
    )
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredNodeTerm, ...] = Field(
        (), max_length=16, description="Nodes that the pods should run on."
    )


class PodTerm(Section):
    """Pods of this namespace, and how near is near."""

    label_selector: LabelSelector = Field(description="The pods, in the service's own namespace.")
    topology_key: LabelKey = Field(description="The node label that says what is one place.")


class PreferredPodTerm(Section):
    """A preference about other pods."""

    weight: Weight = Field(description="How much it counts, 1 to 100.")
    pod_affinity_term: PodTerm = Field(description="The pods it is about.")


class PodAffinity(Section):
    """Near which pods, or far from which."""

    required_during_scheduling_ignored_during_execution: tuple[PodTerm, ...] = Field(
        (), max_length=16, description="What must hold."
    )
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredPodTerm, ...] = Field(
        (), max_length=16, description="What should hold."
    )


class Affinity(Section):
    """Kubernetes' affinity, within the service's namespace."""

    node_affinity: NodeAffinity | None = Field(None, description="Which nodes.")
    pod_affinity: PodAffinity | None = Field(None, description="Near which pods.")
    pod_anti_affinity: PodAffinity | None = Field(None, description="Far from which pods.")

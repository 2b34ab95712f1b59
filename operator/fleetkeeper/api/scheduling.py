"""Kubernetes types for scheduling: tolerations, affinity, topology spread, and label selectors.

Fields that name other namespaces are left out, because a service is limited to its own namespace.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from fleetkeeper.api.base import LabelKey, LabelValue, Section, StringMap, frozen_map


class SelectorOperator(StrEnum):
    """The operators of label selectors."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class NodeSelectorOperator(StrEnum):
    """The operators of node selectors."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GT = "Gt"
    LT = "Lt"


class TolerationOperator(StrEnum):
    """The operators of tolerations."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    """The effects of a taint on pods that do not tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class WhenUnsatisfiable(StrEnum):
    """The treatment of a pod that no node accepts without breaking a topology spread constraint."""

    DO_NOT_SCHEDULE = "DoNotSchedule"
    SCHEDULE_ANYWAY = "ScheduleAnyway"


class NodeInclusionPolicy(StrEnum):
    """The policy by which a property of nodes decides which nodes count as topology domains."""

    HONOR = "Honor"
    IGNORE = "Ignore"


class Toleration(Section):
    """A taint that the engine pods tolerate."""

    key: LabelKey | None = Field(
        None,
        description="Key of the taint. Absent means every taint and requires operator Exists.",
    )
    operator: TolerationOperator | None = Field(
        None, description="Exists or Equal. Absent means Equal."
    )
    value: LabelValue | None = Field(
        None, description="Value of the taint. Requires operator Equal."
    )
    effect: TaintEffect | None = Field(
        None, description="Effect to tolerate. Absent means every effect."
    )
    toleration_seconds: int | None = Field(
        None,
        ge=0,
        le=86400 * 365,
        description="Time in seconds for which a NoExecute taint is tolerated. Absent means forever.",
    )


class LabelRequirement(Section):
    """A requirement for a label."""

    key: LabelKey = Field(description="Key of the label.")
    operator: SelectorOperator = Field(description="Relation of the label to `values`.")
    values: tuple[LabelValue, ...] = Field(
        (),
        max_length=32,
        description="Values for In and NotIn. Must be empty for Exists and DoesNotExist.",
    )


class LabelSelector(Section):
    """A selector of objects by their labels. An object must meet all requirements."""

    match_labels: StringMap[LabelValue] = Field(
        default_factory=frozen_map,
        max_length=32,
        description="Labels with their required values.",
    )
    match_expressions: tuple[LabelRequirement, ...] = Field(
        (), max_length=32, description="Further requirements for labels."
    )


class NodeRequirement(Section):
    """A requirement for a node label or node field."""

    key: LabelKey = Field(description="Key of the node label, or name of the node field.")
    operator: NodeSelectorOperator = Field(
        description="Relation of the label or field to `values`."
    )
    values: tuple[LabelValue, ...] = Field(
        (),
        max_length=32,
        description="Values for In and NotIn, or one integer for Gt and Lt. Must be empty for Exists and DoesNotExist.",
    )


class NodeTerm(Section):
    """The nodes that meet every requirement of the term."""

    match_expressions: tuple[NodeRequirement, ...] = Field(
        (), max_length=16, description="Requirements for node labels."
    )
    match_fields: tuple[NodeRequirement, ...] = Field(
        (), max_length=16, description="Requirements for node fields."
    )


Weight = Annotated[int, Field(ge=1, le=100)]


class PreferredNodeTerm(Section):
    """A weighted preference for nodes."""

    weight: Weight = Field(description="Weight of the preference, 1 to 100.")
    preference: NodeTerm = Field(description="Preferred nodes.")


class NodeSelector(Section):
    """The nodes that match at least one term."""

    node_selector_terms: tuple[NodeTerm, ...] = Field(
        min_length=1, max_length=16, description="Node terms. A node must match at least one."
    )


class NodeAffinity(Section):
    """The node affinity rules of the engine pods."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = Field(
        None, description="Nodes on which the pods must run."
    )
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredNodeTerm, ...] = Field(
        (), max_length=16, description="Nodes on which the pods should run."
    )


class PodTerm(Section):
    """A set of pods in the service's namespace, and the topology in which they count."""

    label_selector: LabelSelector = Field(
        description="Selector of pods in the service's namespace."
    )
    topology_key: LabelKey = Field(
        description="Node label that defines the topology domain, for example kubernetes.io/hostname."
    )


class PreferredPodTerm(Section):
    """A weighted preference for a pod affinity term."""

    weight: Weight = Field(description="Weight of the preference, 1 to 100.")
    pod_affinity_term: PodTerm = Field(description="Pods and topology domain of the preference.")


class PodAffinity(Section):
    """The pod affinity or pod anti-affinity rules of the engine pods."""

    required_during_scheduling_ignored_during_execution: tuple[PodTerm, ...] = Field(
        (), max_length=16, description="Rules that the scheduler must meet."
    )
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredPodTerm, ...] = Field(
        (), max_length=16, description="Rules that the scheduler should meet."
    )


class Affinity(Section):
    """The affinity rules of Kubernetes, limited to the service's namespace."""

    node_affinity: NodeAffinity | None = Field(None, description="Node affinity rules.")
    pod_affinity: PodAffinity | None = Field(None, description="Pod affinity rules.")
    pod_anti_affinity: PodAffinity | None = Field(None, description="Pod anti-affinity rules.")


class TopologySpreadConstraint(Section):
    """A bound for how unevenly the engine pods of one revision are spread over topology domains."""

    max_skew: int = Field(
        ge=1,
        le=1000,
        description="Maximum difference between the numbers of engine pods in two domains.",
    )
    topology_key: LabelKey = Field(
        description="Node label that defines the topology domain, for example kubernetes.io/hostname."
    )
    when_unsatisfiable: WhenUnsatisfiable = Field(
        description="DoNotSchedule: the pod stays pending. ScheduleAnyway: the scheduler only prefers the nodes that lower the difference."
    )
    min_domains: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description="Number of domains below which the minimum counts as 0, so that pods wait for further domains. Requires DoNotSchedule.",
    )
    node_affinity_policy: NodeInclusionPolicy | None = Field(
        None,
        description="Honor: only nodes that match the node selector and the node affinity count. Ignore: all nodes count. Absent means Honor.",
    )
    node_taints_policy: NodeInclusionPolicy | None = Field(
        None,
        description="Honor: tainted nodes count only if the engine pods tolerate their taints. Ignore: all nodes count. Absent means Ignore.",
    )


DEFAULT_SPREAD = tuple(
    TopologySpreadConstraint(
        max_skew=1, topology_key=key, when_unsatisfiable=WhenUnsatisfiable.SCHEDULE_ANYWAY
    )
    for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
)
"""A preference for different zones and nodes, which never delays a pod."""

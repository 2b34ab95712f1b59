"""The rules of the Kubernetes types for scheduling, each as CEL and as Python."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel

from fleetkeeper.api import scheduling as s
from fleetkeeper.api.schema.rule import Rule, label_keys_rule


def _node_values_fit(of: s.NodeRequirement) -> bool:
    if of.operator in {s.NodeSelectorOperator.IN, s.NodeSelectorOperator.NOT_IN}:
        return bool(of.values)
    if of.operator in {s.NodeSelectorOperator.GT, s.NodeSelectorOperator.LT}:
        return len(of.values) == 1 and re.fullmatch(r"[0-9]{1,18}", of.values[0]) is not None
    return not of.values


def _names_one_node(of: s.NodeTerm) -> bool:
    """Return True if all node fields are metadata.name with one value, as Kubernetes requires."""
    return all(
        field.key == "metadata.name"
        and field.operator in {s.NodeSelectorOperator.IN, s.NodeSelectorOperator.NOT_IN}
        and len(field.values) == 1
        for field in of.match_fields
    )


SCHEDULING_RULES: dict[type[BaseModel], tuple[Rule[Any], ...]] = {
    s.Toleration: (
        Rule[s.Toleration](
            "key",
            "has(self.key) || (has(self.operator) && self.operator == 'Exists')",
            lambda of: of.key is not None or of.operator is s.TolerationOperator.EXISTS,
            "without a key, the operator must be Exists, which tolerates every taint",
        ),
        Rule[s.Toleration](
            "value",
            "!has(self.value) || !has(self.operator) || self.operator != 'Exists'",
            lambda of: of.value is None or of.operator is not s.TolerationOperator.EXISTS,
            "the operator Exists does not allow a value; remove it or use the operator Equal",
        ),
        Rule[s.Toleration](
            "tolerationSeconds",
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            lambda of: of.toleration_seconds is None or of.effect is s.TaintEffect.NO_EXECUTE,
            "tolerationSeconds requires the effect NoExecute",
        ),
    ),
    s.LabelRequirement: (
        Rule[s.LabelRequirement](
            "values",
            "self.operator in ['In', 'NotIn'] ? size(self.values) > 0 : size(self.values) == 0",
            lambda of: (
                bool(of.values)
                == (of.operator in {s.SelectorOperator.IN, s.SelectorOperator.NOT_IN})
            ),
            "In and NotIn require values; Exists and DoesNotExist do not allow them",
        ),
    ),
    s.NodeRequirement: (
        Rule[s.NodeRequirement](
            "values",
            "self.operator in ['In', 'NotIn'] ? size(self.values) > 0 : "
            "(self.operator in ['Gt', 'Lt'] ? size(self.values) == 1 && self.values[0].matches('^[0-9]{1,18}$') : size(self.values) == 0)",
            _node_values_fit,
            "In and NotIn require values, Gt and Lt require one integer; Exists and DoesNotExist do not allow values",
        ),
    ),
    s.NodeTerm: (
        Rule[s.NodeTerm](
            "matchFields",
            "self.matchFields.all(f, f.key == 'metadata.name' && f.operator in ['In', 'NotIn'] && size(f.values) == 1)",
            _names_one_node,
            "only the field metadata.name is supported, with In or NotIn and one value; use matchExpressions for labels",
        ),
    ),
    s.TopologySpreadConstraint: (
        Rule[s.TopologySpreadConstraint](
            "minDomains",
            "!has(self.minDomains) || self.whenUnsatisfiable == 'DoNotSchedule'",
            lambda of: (
                of.min_domains is None
                or of.when_unsatisfiable is s.WhenUnsatisfiable.DO_NOT_SCHEDULE
            ),
            "minDomains requires whenUnsatisfiable: DoNotSchedule; set it or remove minDomains",
        ),
    ),
    s.LabelSelector: (label_keys_rule("matchLabels", "match_labels"),),
}

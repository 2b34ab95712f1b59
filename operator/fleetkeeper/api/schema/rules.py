"""The rules between fields, each as CEL for the API server and as Python for the operator.

The operator checks the rules again because the CRD in the cluster may be older than the operator.
A test runs every case through both and compares the messages.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel

from fleetkeeper.api import scheduling as s
from fleetkeeper.api import types as t
from fleetkeeper.api.environment import ADMINISTRATORS, is_administrators
from fleetkeeper.api.int_or_percent import ZERO, is_zero
from fleetkeeper.api.names import CHILD_INFIX, NAME_MAX_LENGTH, NAME_PATTERN
from fleetkeeper.api.quantity import parse_quantity
from fleetkeeper.api.schema.network_rules import NETWORK_RULES
from fleetkeeper.api.schema.rule import (
    Rule,
    cel_keys,
    cel_quantity,
    keys_match,
    label_keys_rule,
    quantity_rule,
    unreserved_keys_rule,
)

_ENVIRONMENT_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")


def is_hub_source(source: str) -> bool:
    """Return True if the source is on Hugging Face."""
    return source.startswith("hf://")


def _hub_only(field: str, attribute: str, message: str) -> Rule[t.Model]:
    """Return a rule that `field` requires the model or an adapter to be on Hugging Face."""
    return Rule(
        field,
        f"!has(self.{field}) || self.source.startsWith('hf://') || self.adapters.exists(a, a.source.startsWith('hf://'))",
        lambda of: (
            getattr(of, attribute) is None
            or any(is_hub_source(one) for one in (of.source, *(a.source for a in of.adapters)))
        ),
        message,
    )


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


def _nonzero(field: str) -> str:
    """Return CEL that an integer or a percentage is not 0."""
    return f"!(string(self.{field}) in {list(ZERO)})"


_MAX_CPU = "10k"
_MAX_BYTES = "1Pi"
"""The maximum for one pod: far above any machine, far below the limit of 64-bit byte counts."""
_ONE_SOURCE: tuple[Rule[Any], ...] = (
    Rule(
        "revision",
        "!self.source.startsWith('hf://') || has(self.revision)",
        lambda of: not is_hub_source(of.source) or of.revision is not None,
        "an hf:// source requires a revision; set it to a commit of 40 hexadecimal digits from the model's page",
    ),
    Rule(
        "revision",
        "self.source.startsWith('hf://') || !has(self.revision)",
        lambda of: is_hub_source(of.source) or of.revision is None,
        "only an hf:// source has a revision; remove it and select the version in the pvc:// path",
    ),
)

RULES: dict[type[BaseModel], tuple[Rule[Any], ...]] = {
    **NETWORK_RULES,
    t.ModelCache: (
        Rule[t.ModelCache](
            "",
            "has(self.claimName) != has(self.ephemeralSize)",
            lambda of: (of.claim_name is None) != (of.ephemeral_size is None),
            "set exactly one of claimName and ephemeralSize",
        ),
        quantity_rule("ephemeralSize", "ephemeral_size", _MAX_BYTES),
    ),
    t.Adapter: _ONE_SOURCE,
    t.Model: (
        *_ONE_SOURCE,
        Rule[t.Model](
            "adapters",
            "",
            lambda of: len({adapter.name for adapter in of.adapters}) == len(of.adapters),
            "two adapters have the same name; use unique names",
        ),
        Rule[t.Model](
            "adapters",
            "!has(self.servedName) || self.adapters.all(a, a.name != self.servedName)",
            lambda of: all(adapter.name != of.served_name for adapter in of.adapters),
            "an adapter has the same name as the model (servedName); choose another name",
        ),
        _hub_only(
            "cache",
            "cache",
            "only hf:// sources use a cache; remove it (pvc:// models are read in place)",
        ),
        _hub_only(
            "tokenSecret", "token_secret", "only hf:// sources use a token; remove tokenSecret"
        ),
    ),
    t.Engine: (
        Rule[t.Engine](
            "env",
            cel_keys("env", _ENVIRONMENT_NAME.pattern, 128),
            lambda of: keys_match(_ENVIRONMENT_NAME, of.env, 128),
            "invalid environment variable name; use letters, digits, and _, such as NCCL_DEBUG",
        ),
        Rule[t.Engine](
            "env",
            f"self.env.all(k, !k.matches('{ADMINISTRATORS}'))",
            lambda of: not any(map(is_administrators, of.env)),
            "variables for plugins, files, and endpoints, such as NCCL_NET_PLUGIN and HF_ENDPOINT, can only be set by the administrator, in the engine profile's variables",
        ),
    ),
    t.Resources: (
        quantity_rule("cpu", "cpu", _MAX_CPU),
        quantity_rule("memory", "memory", _MAX_BYTES),
        quantity_rule("sharedMemory", "shared_memory", _MAX_BYTES),
        Rule[t.Resources](
            "sharedMemory",
            "!has(self.memory) || !has(self.sharedMemory) || "
            f"!({cel_quantity('memory')}) || !({cel_quantity('sharedMemory')}) || "
            "quantity(self.sharedMemory).isLessThan(quantity(self.memory))",
            lambda of: (
                of.memory is None
                or of.shared_memory is None
                or parse_quantity(of.shared_memory) < parse_quantity(of.memory)
            ),
            "must be less than memory, because it is part of memory",
        ),
    ),
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
    t.Accelerator: (
        Rule[t.Accelerator](
            "resource",
            "!self.resource.contains('kubernetes.io/') && !self.resource.startsWith('requests.')",
            lambda of: (
                "kubernetes.io/" not in of.resource and not of.resource.startswith("requests.")
            ),
            "is not an extended resource; use the resource of a device plugin, such as nvidia.com/gpu",
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
    t.Placement: (label_keys_rule("nodeSelector", "node_selector"),),
    t.RouterPlacement: (label_keys_rule("nodeSelector", "node_selector"),),
    t.RouterResources: (
        quantity_rule("cpu", "cpu", _MAX_CPU),
        quantity_rule("memory", "memory", _MAX_BYTES),
    ),
    s.LabelSelector: (label_keys_rule("matchLabels", "match_labels"),),
    t.PodMetadata: (
        label_keys_rule("labels", "labels"),
        unreserved_keys_rule("labels"),
        label_keys_rule("annotations", "annotations"),
        unreserved_keys_rule("annotations"),
    ),
    t.Scaling: (
        Rule[t.Scaling](
            "maxReplicas",
            "self.minReplicas <= self.maxReplicas",
            lambda of: of.min_replicas <= of.max_replicas,
            "must be at least minReplicas; raise maxReplicas or lower minReplicas",
        ),
    ),
    t.Batching: (
        Rule[t.Batching](
            "maxSequences",
            "self.minSequences <= self.maxSequences",
            lambda of: of.min_sequences <= of.max_sequences,
            "must be at least minSequences; raise maxSequences or lower minSequences",
        ),
        Rule[t.Batching](
            "maxTokens",
            "self.minTokens <= self.maxTokens",
            lambda of: of.min_tokens <= of.max_tokens,
            "must be at least minTokens; raise maxTokens or lower minTokens",
        ),
        Rule[t.Batching](
            "maxTokens",
            "self.maxSequences <= self.maxTokens",
            lambda of: of.max_sequences <= of.max_tokens,
            "must be at least maxSequences, because every sequence needs one token in each step; raise maxTokens or lower maxSequences",
        ),
    ),
    t.BatchTier: (
        Rule[t.BatchTier](
            "floorPercent",
            "self.floorPercent <= self.sharePercent",
            lambda of: of.floor_percent <= of.share_percent,
            "must be at most sharePercent; lower floorPercent or raise sharePercent",
        ),
    ),
    t.Rollout: (
        Rule[t.Rollout](
            "maxSurge",
            f"{_nonzero('maxSurge')} || {_nonzero('maxUnavailable')}",
            lambda of: not (is_zero(of.max_surge) and is_zero(of.max_unavailable)),
            "maxSurge and maxUnavailable are both 0, so no pod can be replaced; set one of them above 0",
        ),
        Rule[t.Rollout](
            "maxSurge",
            f"self.strategy != 'Surge' || {_nonzero('maxSurge')}",
            lambda of: of.strategy is not t.RolloutStrategy.SURGE or not is_zero(of.max_surge),
            "the strategy Surge requires a maxSurge above 0",
        ),
    ),
    t.InferenceServiceSpec: (
        Rule[t.InferenceServiceSpec](
            "replicas",
            "self.scaling.mode != 'External' || has(self.replicas)",
            lambda of: of.scaling.mode is not t.ScalingMode.EXTERNAL or of.replicas is not None,
            "scaling.mode External requires replicas; set it (HPA and KEDA then change it through the scale subresource)",
        ),
        Rule[t.InferenceServiceSpec](
            "resources",
            "!has(self.resources.accelerator) || self.resources.accelerator.count == self.engine.tensorParallelSize",
            lambda of: (
                of.resources.accelerator is None
                or of.resources.accelerator.count == of.engine.tensor_parallel_size
            ),
            "accelerator.count must equal engine.tensorParallelSize, because each accelerator of a replica holds one part of the model",
        ),
        Rule[t.InferenceServiceSpec](
            "breaker",
            "!has(self.breaker.fallbackReplicas) || self.breaker.fallbackReplicas <= self.scaling.maxReplicas",
            lambda of: (
                of.breaker.fallback_replicas is None
                or of.breaker.fallback_replicas <= of.scaling.max_replicas
            ),
            "fallbackReplicas must be at most scaling.maxReplicas; lower it or raise maxReplicas",
        ),
    ),
}

NAME_RULES: tuple[Rule[str], ...] = (
    Rule(
        "",
        f"self.metadata.name.matches('{NAME_PATTERN}') && size(self.metadata.name) <= {NAME_MAX_LENGTH}",
        lambda name: len(name) <= NAME_MAX_LENGTH and re.search(NAME_PATTERN, name) is not None,
        f"metadata.name must consist of at most {NAME_MAX_LENGTH} lowercase letters, digits, and hyphens, start with a letter, and not end with a hyphen",
    ),
    Rule(
        "",
        f"!self.metadata.name.contains('{CHILD_INFIX}')",
        lambda name: CHILD_INFIX not in name,
        f"metadata.name must not contain {CHILD_INFIX}, which is reserved for the names of child objects",
    ),
)
"""The rules for the name of the resource, at the root of the schema."""

"""The rules between fields, each as CEL for the API server and as Python for the operator.

The operator checks the rules again because the CRD in the cluster may be older than the operator.
A test runs every case through both and compares the messages.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel

from fleetkeeper.api import types as t
from fleetkeeper.api.fleet_types import MIN_REPLICAS_ZERO
from fleetkeeper.api.names import CHILD_INFIX, NAME_MAX_LENGTH, NAME_PATTERN
from fleetkeeper.api.profiles.environment import ADMINISTRATORS, is_administrators
from fleetkeeper.api.schema.network_rules import NETWORK_RULES
from fleetkeeper.api.schema.object_storage_rules import OBJECT_STORAGE_RULES
from fleetkeeper.api.schema.option_rules import COMBINATIONS
from fleetkeeper.api.schema.rule import (
    Rule,
    Schemes,
    cel_is_quantity,
    cel_quantity,
    kubernetes_keys_rule,
    label_keys_rule,
    quantity_rule,
    unique_items_rule,
    unreserved_keys_rule,
)
from fleetkeeper.api.schema.scheduling_rules import SCHEDULING_RULES
from fleetkeeper.api.values.int_or_percent import ZERO, is_zero
from fleetkeeper.api.values.quantity import parse_quantity

OTHER_THAN_HUB = Schemes("pvc", "s3", "oci")


def is_hub_source(source: str) -> bool:
    """Return True if the source is on Hugging Face."""
    return source.startswith("hf://")


def _hub_only(field: str, attribute: str, message: str) -> Rule[t.Model]:
    """Return a rule that `field` requires the model or an adapter to be on Hugging Face."""
    return Rule(
        field,
        f"!has(self.{field}) || !{OTHER_THAN_HUB.cel} || self.adapters.exists(a, a.source.startsWith('hf://'))",
        lambda of: (
            getattr(of, attribute) is None
            or not OTHER_THAN_HUB.has(of.source)
            or any(is_hub_source(a.source) for a in of.adapters)
        ),
        message,
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
        f"!has(self.revision) || !{OTHER_THAN_HUB.cel}",
        lambda of: of.revision is None or not OTHER_THAN_HUB.has(of.source),
        "only an hf:// source has a revision; remove it and select the version in the path of the source",
    ),
)

RULES: dict[type[BaseModel], tuple[Rule[Any], ...]] = {
    **SCHEDULING_RULES,
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
    t.Adapter: (*_ONE_SOURCE, *OBJECT_STORAGE_RULES[t.Adapter]),
    t.Model: (
        *_ONE_SOURCE,
        *OBJECT_STORAGE_RULES[t.Model],
        unique_items_rule(
            "adapters",
            "adapters",
            lambda adapter: adapter.name,
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
            "only hf:// sources use a cache; remove it (other models are read in place)",
        ),
        _hub_only(
            "tokenSecret", "token_secret", "only hf:// sources use a token; remove tokenSecret"
        ),
    ),
    t.Engine: (
        unique_items_rule(
            "env",
            "env",
            lambda variable: variable.name,
            "two variables have the same name; remove one",
        ),
    ),
    t.EnvironmentVariable: (
        Rule[t.EnvironmentVariable](
            "",
            "has(self.value) != has(self.valueFrom)",
            lambda of: (of.value is None) != (of.value_from is None),
            "set exactly one of value and valueFrom",
        ),
        Rule[t.EnvironmentVariable](
            "name",
            f"!self.name.matches('{ADMINISTRATORS}')",
            lambda of: not is_administrators(of.name),
            "variables for plugins, files, and endpoints, such as NCCL_NET_PLUGIN and HF_ENDPOINT, can only be set by the administrator, in the engine profile's variables",
        ),
    ),
    t.DeviceClaim: (
        Rule[t.DeviceClaim](
            "",
            "has(self.resourceClaimTemplateName) != has(self.resourceClaimName)",
            lambda of: (
                (of.resource_claim_template_name is None) != (of.resource_claim_name is None)
            ),
            "set exactly one of resourceClaimTemplateName and resourceClaimName",
        ),
    ),
    t.Resources: (
        unique_items_rule(
            "claims",
            "claims",
            lambda claim: claim.name,
            "two claims have the same name; use unique names",
        ),
        quantity_rule("cpu", "cpu", _MAX_CPU),
        quantity_rule("memory", "memory", _MAX_BYTES),
        quantity_rule("sharedMemory", "shared_memory", _MAX_BYTES),
        quantity_rule("ephemeralStorage", "ephemeral_storage", _MAX_BYTES),
        Rule[t.Resources](
            "sharedMemory",
            "!has(self.memory) || !has(self.sharedMemory) || "
            f"!({cel_is_quantity('memory')}) || !({cel_is_quantity('sharedMemory')}) || "
            f"{cel_quantity('sharedMemory')}.isLessThan({cel_quantity('memory')})",
            lambda of: (
                of.memory is None
                or of.shared_memory is None
                or parse_quantity(of.shared_memory) < parse_quantity(of.memory)
            ),
            "must be less than memory, because it is part of memory",
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
    t.Placement: (
        label_keys_rule("nodeSelector", "node_selector"),
        unique_items_rule(
            "topologySpreadConstraints",
            "topology_spread_constraints",
            lambda item: (item.topology_key, item.when_unsatisfiable),
            "two constraints have the same topologyKey and whenUnsatisfiable; remove one",
        ),
    ),
    t.RouterPlacement: (label_keys_rule("nodeSelector", "node_selector"),),
    t.RouterResources: (
        quantity_rule("cpu", "cpu", _MAX_CPU),
        quantity_rule("memory", "memory", _MAX_BYTES),
    ),
    t.PodMetadata: (
        label_keys_rule("labels", "labels"),
        unreserved_keys_rule("labels"),
        kubernetes_keys_rule("labels"),
        label_keys_rule("annotations", "annotations"),
        unreserved_keys_rule("annotations"),
        kubernetes_keys_rule("annotations"),
    ),
    t.Scaling: (
        Rule[t.Scaling](
            "minReplicas",
            "self.minReplicas >= 1",
            lambda of: of.min_replicas >= 1,
            MIN_REPLICAS_ZERO,
        ),
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
            "resources.ephemeralStorage",
            "!has(self.resources.ephemeralStorage) || !has(self.model.cache) || !has(self.model.cache.ephemeralSize) || "
            f"!({cel_is_quantity('resources.ephemeralStorage')}) || !({cel_is_quantity('model.cache.ephemeralSize')}) || "
            f"!{cel_quantity('model.cache.ephemeralSize')}.isGreaterThan({cel_quantity('resources.ephemeralStorage')})",
            lambda of: (
                of.resources.ephemeral_storage is None
                or of.model.cache is None
                or of.model.cache.ephemeral_size is None
                or parse_quantity(of.model.cache.ephemeral_size)
                <= parse_quantity(of.resources.ephemeral_storage)
            ),
            "must be at least model.cache.ephemeralSize, because the kubelet evicts a pod whose cache outgrows it; raise it or lower ephemeralSize",
        ),
        *OBJECT_STORAGE_RULES[t.InferenceServiceSpec],
        *(combination.rule() for combination in COMBINATIONS),
        Rule[t.InferenceServiceSpec](
            "routing.policy",
            "self.routing.policy != 'PrefixAware' || self.engine.prefixCaching",
            lambda of: (
                of.routing.policy is not t.RoutingPolicy.PREFIX_AWARE or of.engine.prefix_caching
            ),
            "PrefixAware needs engine.prefixCaching; enable it or choose another policy",
        ),
        Rule[t.InferenceServiceSpec](
            "rollout.strategy",
            "self.rollout.strategy != 'Swap' || self.access == 'Gateway'",
            lambda of: (
                of.rollout.strategy is not t.RolloutStrategy.SWAP
                or of.access is t.AccessMode.GATEWAY
            ),
            "Swap needs access: Gateway, because only the gateway holds requests; set it, or choose another strategy",
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

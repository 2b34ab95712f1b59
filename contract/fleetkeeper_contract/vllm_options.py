"""The options of vLLM that are reserved: a table of their names, reasons, and who may set them.

Three views derive from it. They differ on purpose.

- Services set `engine.options` from the typed list in `operator/fleetkeeper/api/options.py`, and
  options with a typed field by that field. The table explains refusals.
- Engine profiles set every option that the table does not refuse to them, in `extraArguments`.
- An engine checks both again in its document. This is the second line of defense.

A pod keeps its engine image and its document: both are in the pod template, which no upgrade of the
operator changes. A service gets a newer image only with a document that the operator renders for it,
and the operator and `fleetkeeper check` first refuse what that engine would refuse. The operator does
not start with a refused profile, so never reserve an option that profiles can set today.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag, auto
from types import MappingProxyType


class Setter(Flag):
    """The party that may set an option. The supervisor of an engine may set all options."""

    SUPERVISOR = 0
    FIELD = auto()
    """A typed field of a service."""
    SERVICE = auto()
    """`engine.options` of a service."""
    PROFILE = auto()
    """`extraArguments` of an engine profile."""


@dataclass(frozen=True, slots=True)
class ReservedOption:
    """An option that not every setter may set."""

    name: str
    """Without leading dashes. `ssl-` stands for all options that begin so."""
    setters: Setter
    reason: str
    field: str = ""
    """The path of the field that sets it."""


def _group(setters: Setter, reason: str, *names: str) -> list[ReservedOption]:
    return [ReservedOption(name, setters, reason) for name in names]


def _by_field(field: str, *names: str) -> list[ReservedOption]:
    reason = f"is set by {field} of services"
    return [ReservedOption(name, Setter.FIELD, reason, field) for name in names]


_ROWS = (
    *_by_field("batching.maxSequences", "max-num-active-seqs", "max-num-seqs"),
    *_by_field("batching.maxTokens", "max-num-batched-tokens", "max-num-scheduled-tokens"),
    *_by_field("engine.dtype", "dtype"),
    *_by_field("engine.maxModelLength", "max-model-len"),
    # Draft tokens count against the tokens of a step, so the document must contain them.
    *_by_field("engine.options.spec-method", "spec-", "speculative-config"),
    *_by_field("engine.prefixCaching", "enable-prefix-caching"),
    *_by_field("engine.quantization", "quantization"),
    *_by_field("engine.tensorParallelSize", "tensor-parallel-size"),
    *_by_field("memory.capPercent",
        "device-memory-utilization", "gpu-memory-utilization", "kv-cache-memory-bytes"),
    *_by_field("model.adapters", "enable-lora", "lora-modules"),
    *_by_field("model.cache", "download-dir"),
    *_by_field("model.revision", "revision"),
    *_by_field("model.servedName", "served-model-name"),
    *_by_field("model.source", "model"),
    *_by_field("model.tokenSecret", "hf-token"),
    *_by_field("tiers", "max-num-queued-reqs", "max-num-queued-tokens"),
    *_group(Setter.SUPERVISOR, "is set by Fleetkeeper",
        "api-server-count", "disable-access-log-for-endpoints", "disable-log-stats", "host",
        "long-prefill-token-threshold", "long-prefill-token-threshold-adaptive", "middleware",
        "port", "scheduler-cls", "scheduling-policy", "shutdown-timeout"),
    *_group(Setter.SUPERVISOR, "would bypass the memory cap",
        "enable-cumem-allocator", "enable-sleep-mode", "num-gpu-blocks-override", "worker-cls",
        "worker-extension-cls"),
    *_group(Setter.SUPERVISOR, "changes processes, devices or addresses that Fleetkeeper manages",
        "api-key", "data-parallel-", "data-parallel-size", "device-ids",
        "distributed-executor-backend", "enable-elastic-ep", "enable-ssl-refresh", "grpc",
        "grpc-port", "headless", "master-addr", "master-port", "nnodes", "node-rank",
        "pipeline-parallel-size", "prefill-context-parallel-size", "root-path", "ssl-", "uds"),
    *_group(Setter.SUPERVISOR, "reads options from a file that nothing checks", "config"),
    *_group(Setter.SUPERVISOR, "starts no engine", "help"),
    *_group(Setter.SUPERVISOR, "runs the code of any model that a service names",
        "trust-remote-code"),
    *_group(Setter.SERVICE, "is set by model.adapters or engine.options of services",
        "max-lora-rank", "max-loras"),
    *_group(Setter.SERVICE, "is set by engine.options of services", "spec-method", "spec-tokens"),
    # An administrator has uses for these. A tenant must not have them.
    *_group(Setter.PROFILE, "loads code from the engine image",
        "logits-processors", "reasoning-parser-plugin", "tool-parser-plugin"),
    *_group(Setter.PROFILE, "connects the KV cache to other programs, such as LMCache",
        "kv-events-config", "kv-transfer-config"),
    *_group(Setter.PROFILE, "changes the model's configuration, such as its RoPE scaling",
        "hf-overrides"),
    *_group(Setter.PROFILE, "runs another implementation of the model", "model-impl"),
    *_group(Setter.PROFILE, "reads files beside the model", "chat-template", "tokenizer"),
    *_group(Setter.PROFILE, "lets requests name files of the pod", "allowed-local-media-path"),
    *_group(Setter.PROFILE, "lets requests name hosts to fetch from", "allowed-media-domains"),
    *_group(Setter.PROFILE, "sends spans to an address", "otlp-traces-endpoint"),
    # Without this row, it would be an abbreviation of reasoning-parser-plugin.
    *_group(Setter.SERVICE | Setter.PROFILE, "is not reserved", "reasoning-parser"),
)  # fmt: skip

RESERVED: Mapping[str, ReservedOption] = MappingProxyType(
    {row.name: row for row in sorted(_ROWS, key=lambda row: row.name)}
)
"""The table, sorted by name. All names are those of vLLM 0.31 and 0.32."""


def refused(option: str, setter: Setter) -> ReservedOption | None:
    """Return the reserved option that `option` can mean and `setter` must not set.

    vLLM's parser accepts any unambiguous beginning of a name, and of `no-NAME`.
    """
    name = option.removeprefix("no-")
    if name in RESERVED:
        return None if setter in RESERVED[name].setters else RESERVED[name]
    for row in RESERVED.values():
        in_family = row.name.endswith("-") and name.startswith(row.name)
        abbreviates = row.name.startswith(name) or f"no-{row.name}".startswith(option)
        if setter not in row.setters and (in_family or abbreviates):
            return row
    return None

"""Options that an engine document never carries. Pure.

They are the supervisor's own, and those that must not be settable. The allow-list is the operator's.
This list is the second line of defense.
"""

from __future__ import annotations

RESERVED_OPTIONS = frozenset(
    {
        # set by the supervisor
        "adapters",
        "api-server-count",
        "data-parallel-size",
        "disable-access-log-for-endpoints",
        "dtype",
        "enable-lora",
        "enable-prefix-caching",
        "gpu-memory-utilization",
        "kv-cache-memory-bytes",
        "long-prefill-token-threshold",
        "lora-modules",
        "max-model-len",
        "max-num-batched-tokens",
        "max-num-seqs",
        "middleware",
        "model",
        "no-enable-prefix-caching",
        "port",
        "quantization",
        "revision",
        "scheduler-cls",
        "scheduling-policy",
        "served-model-name",
        "shutdown-timeout",
        "tensor-parallel-size",
        # loads code, opens files, binds or calls addresses, or would disable the memory cap
        "allowed-local-media-path",
        "allowed-media-domains",
        "api-key",
        "chat-template",
        "collective-rpc",
        "config",
        "data-parallel-address",
        "download-dir",
        "enable-cumem-allocator",
        "enable-sleep-mode",
        "host",
        "hf-overrides",
        "hf-token",
        "kv-events-config",
        "kv-transfer-config",
        "logits-processors",
        "model-impl",
        "otlp-traces-endpoint",
        "reasoning-parser-plugin",
        "root-path",
        "ssl-ca-certs",
        "ssl-certfile",
        "ssl-keyfile",
        "tokenizer",
        "tool-parser-plugin",
        "trust-remote-code",
        "uds",
        "worker-cls",
        "worker-extension-cls",
    }
)

WHOLE_NAMES = frozenset({"reasoning-parser"})
"""Options of vLLM's that begin like a reserved one but are not abbreviations of it."""


def reserved_option(name: str) -> str | None:
    """Return the reserved option that `name` means, or None.

    An abbreviation means it too, because vLLM's parser accepts abbreviations.
    """
    if name in WHOLE_NAMES:
        return None
    return min((option for option in RESERVED_OPTIONS if option.startswith(name)), default=None)

"""vLLM arguments that an engine profile adds: their form, and the options that they must not set.

The operator checks them when it loads its profiles, the engine again when it reads its document.
vLLM's parser accepts `_` for `-`, sub-fields (`--name.field=value`), `--no-NAME`, and any unambiguous
beginning of a name, so the checks compare normalized names and their beginnings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

MAX_ARGUMENTS = 32
MAX_LENGTH = 2048
"""Characters of an argument. All of them fit into one environment variable (128 KiB)."""

_FORM = re.compile(
    r"--(?P<name>[a-z][a-z0-9_-]*)(?P<field>(\.[A-Za-z0-9_-]+)+\+?)?(=(?P<value>.*))?"
)


def _of_field(field: str) -> str:
    return f"is set by {field} of services"


_OWN = "is set by Fleetkeeper"
_UNCAPPED = "would bypass the memory cap"
_UNMANAGED = "changes processes, devices or addresses that Fleetkeeper manages"

RESERVED: Mapping[str, str] = MappingProxyType(
    {
        "dtype": _of_field("engine.dtype"),
        "download-dir": _of_field("model.cache"),
        "enable-lora": _of_field("model.adapters"),
        "enable-prefix-caching": _of_field("engine.prefixCaching"),
        "device-memory-utilization": _of_field("memory.capPercent"),
        "gpu-memory-utilization": _of_field("memory.capPercent"),
        "hf-token": _of_field("model.tokenSecret"),
        "kv-cache-memory-bytes": _of_field("memory.capPercent"),
        "lora-modules": _of_field("model.adapters"),
        "max-lora-rank": _of_field("model.adapters or engine.options"),
        "max-loras": _of_field("model.adapters or engine.options"),
        "max-model-len": _of_field("engine.maxModelLength"),
        "max-num-active-seqs": _of_field("batching.maxSequences"),
        "max-num-batched-tokens": _of_field("batching.maxTokens"),
        "max-num-queued-reqs": _of_field("tiers"),
        "max-num-queued-tokens": _of_field("tiers"),
        "max-num-scheduled-tokens": _of_field("batching.maxTokens"),
        "max-num-seqs": _of_field("batching.maxSequences"),
        "model": _of_field("model.source"),
        "quantization": _of_field("engine.quantization"),
        "revision": _of_field("model.revision"),
        "served-model-name": _of_field("model.servedName"),
        # Draft tokens count against the tokens of a step, so the document must contain them.
        "spec-": _of_field("engine.options"),
        "speculative-config": _of_field("engine.options"),
        "tensor-parallel-size": _of_field("engine.tensorParallelSize"),
        "api-server-count": _OWN,
        "disable-access-log-for-endpoints": _OWN,
        "disable-log-stats": _OWN,
        "host": _OWN,
        "long-prefill-token-threshold": _OWN,
        "long-prefill-token-threshold-adaptive": _OWN,
        "middleware": _OWN,
        "port": _OWN,
        "scheduler-cls": _OWN,
        "scheduling-policy": _OWN,
        "shutdown-timeout": _OWN,
        "enable-cumem-allocator": _UNCAPPED,
        "enable-sleep-mode": _UNCAPPED,
        "num-gpu-blocks-override": _UNCAPPED,
        "worker-cls": _UNCAPPED,
        "worker-extension-cls": _UNCAPPED,
        "api-key": _UNMANAGED,
        "data-parallel-": _UNMANAGED,
        "device-ids": _UNMANAGED,
        "distributed-executor-backend": _UNMANAGED,
        "enable-elastic-ep": _UNMANAGED,
        "enable-ssl-refresh": _UNMANAGED,
        "grpc": _UNMANAGED,
        "grpc-port": _UNMANAGED,
        "headless": _UNMANAGED,
        "master-addr": _UNMANAGED,
        "master-port": _UNMANAGED,
        "nnodes": _UNMANAGED,
        "node-rank": _UNMANAGED,
        "pipeline-parallel-size": _UNMANAGED,
        "prefill-context-parallel-size": _UNMANAGED,
        "root-path": _UNMANAGED,
        "ssl-": _UNMANAGED,
        "uds": _UNMANAGED,
        "config": "reads options from a file that nothing checks",
        "help": "starts no engine",
        "trust-remote-code": "runs the code of any model that a service names",
    }
)
"""The options that a profile must not set, with the reason. `ssl-` stands for all that begin so."""


def option_of(argument: str) -> str | None:
    """Return the option that an argument sets, normalized; None if the argument is malformed.

    Worked example: `--no-compilation_config.mode=3` sets `compilation-config`.
    """
    found = _FORM.fullmatch(argument)
    return found["name"].replace("_", "-").removeprefix("no-") if found else None


def argument_errors(arguments: Iterable[str]) -> list[str]:
    """Return why arguments cannot be added to vLLM's command line, one line for each error."""
    errors: list[str] = []
    fields: dict[str, set[str]] = {}
    for argument in arguments:
        error = _malformed(argument) or _reserved(option_of(argument) or "")
        if error is None:
            seen = fields.setdefault(option_of(argument) or "", set())
            field = _field_of(argument)
            # vLLM's parser drops a whole option if fields of it are set too.
            if seen and (not field or "" in seen or field in seen):
                error = "is set twice; set it once, or each of its fields once"
            seen.add(field)
        if error:
            errors.append(f"{_shown(argument)} {error}")
    return errors


def _field_of(argument: str) -> str:
    found = _FORM.fullmatch(argument)
    return (found["field"] or "") if found else ""


def _malformed(argument: str) -> str | None:
    found = _FORM.fullmatch(argument)
    if found is None or not argument.isprintable():
        return "is malformed; write --name or --name=value as one string of printable characters"
    if len(argument) > MAX_LENGTH:
        return f"is longer than {MAX_LENGTH} characters"
    if found["field"] and found["value"] is None:
        # vLLM's parser would take the next argument as the value.
        return "needs a value; write --name.field=value"
    if re.search(r"\$[$(]", argument):
        return "contains $( or $$, which Kubernetes would replace"
    return None


def _reserved(option: str) -> str | None:
    """Return the error of an option that is reserved, or a beginning of one that is."""
    whole = RESERVED.get(option)
    if whole:
        return f"{whole}; remove it"
    for name, reason in RESERVED.items():
        if name.endswith("-") and option.startswith(name):
            return f"{reason}; remove it"
        if name.startswith(option) or f"no-{name}".startswith(option):
            return f"can mean --{name}, which {reason}; write the option's whole name or remove it"
    return None


def _shown(argument: str) -> str:
    """Return the argument without its value, which may be long."""
    text = argument.partition("=")[0]
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable if len(printable) <= 64 else f"{printable[:61]}..."

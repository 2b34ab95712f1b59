"""The module that starts vLLM's server, its arguments and its environment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fleetkeeper_contract.grants import GRANTS_FILE
from fleetkeeper_contract.traces_endpoint import TracesProtocol, signal_endpoint
from fleetkeeper_engine.devices.interface import Accelerator
from fleetkeeper_engine.in_vllm.vllm_settings import (
    ENVIRONMENT as VLLM_SETTINGS_ENVIRONMENT,
)
from fleetkeeper_engine.in_vllm.vllm_settings import (
    FORKING_SERVER,
    MIDDLEWARE,
    SCHEDULER_FACTORY,
    TRACED_MIDDLEWARE,
    VllmSettings,
)
from fleetkeeper_engine.limits import PREFILL_QUANTUM_TOKENS
from fleetkeeper_engine.shm.region import ENVIRONMENT as REGION_ENVIRONMENT
from fleetkeeper_engine.spec import (
    ENVIRONMENT as DOCUMENT_ENVIRONMENT,
)
from fleetkeeper_engine.spec import (
    DType,
    EngineDocument,
    Tracing,
)
from fleetkeeper_engine.supervisor.launch.features import Features
from fleetkeeper_engine.supervisor.launch.memory_plan import MemoryPlan
from fleetkeeper_engine.supervisor.launch.object_storage import BUFFER_VARIABLE, is_object_storage

FORKED_VERSIONS = ("0.32.0",)
"""The versions of vLLM for CPU whose starts, ends and answers were tested with forked processes."""
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
KEEP_ALIVE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
"""Seconds after which an idle connection is closed; vLLM's default is 5, ours `KEEP_ALIVE_S`."""
KEEP_ALIVE_S = 75
"""Longer than proxies keep theirs (nginx 60 s): a request that meets the end of a connection fails."""
EXPORT_TIMEOUT_S = 3
"""A batch of spans is dropped if its collector does not take it in this time. A stop waits for it.

The Python SDK reads its variable in seconds, unlike the specification.
"""

NO_MEDIA_DOMAIN = "none.invalid"
"""A host that cannot exist (RFC 6761). vLLM takes an empty list of hosts as all of them."""
MEDIA_OPTION = "allowed-media-domains"


def decided_entry(
    document: EngineDocument, features: Features, environment: Mapping[str, str]
) -> tuple[str, str]:
    """Return the module, and why vLLM's processes are spawned; "" if they are forked or vLLM decides."""
    if document.accelerator is not Accelerator.CPU:
        return features.entry, ""
    reason = _why_spawned(document, features, environment)
    return (features.entry if reason else FORKING_SERVER), reason


def _why_spawned(
    document: EngineDocument, features: Features, environment: Mapping[str, str]
) -> str:
    engine, version = document.engine, features.vllm_version
    method, binding = environment.get(METHOD, "fork"), environment.get(BINDING, "nobind")
    options = {*engine.options, *(engine.profile.options if engine.profile else ())}
    reasons = {
        f"vLLM {version} was not tested with forked ones": version not in FORKED_VERSIONS,
        f"{METHOD} is {method}": method != "fork",
        # The threads of a forked worker exist before it could bind them.
        f"{BINDING} is {binding}": binding != "nobind",
        "numa-bind starts them by another program": "numa-bind" in options,
        # The API server exports spans from threads before it starts EngineCore.
        "tracing is on": document.tracing is not None,
        "threads read the model from object storage": is_object_storage(document.model.source),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


@dataclass(frozen=True, slots=True)
class Launch:
    """The properties of this machine and model that the command line depends on."""

    python: str
    entry: str
    """The module of vLLM's server."""
    model: str
    """The model's directory, or its address in object storage."""
    adapters: Mapping[str, str]
    """Name -> directory."""
    dtype: DType
    """After the CPU probe."""
    lora_rank: int
    max_length: int
    """The longest sequence in tokens: the document's, else the model's own."""
    region: str
    package_path: str
    """The directory that holds fleetkeeper_engine and its entry points."""
    internal_token: str
    eager: bool = False
    """Compilation is not possible: vLLM on CPU needs a C++ compiler for it."""
    load_format: str | None = None
    """vLLM's load format for the weights; None means its default."""
    threads: int | None = None
    """CPUs that the pod may use at once; None means all of them."""


def desired_argv(document: EngineDocument, plan: MemoryPlan, launch: Launch) -> list[str]:
    """Return the arguments: one `--flag=value` token for each option; no shell parses them."""
    engine, batching, tracing = document.engine, document.batching, document.tracing
    options: list[tuple[str, str | int | float | None]] = [
        ("model", launch.model),
        ("load-format", launch.load_format),
        ("served-model-name", document.model.served_name),
        ("host", document.ports.host),
        ("port", document.ports.serving),
        ("dtype", launch.dtype.value),
        ("quantization", engine.quantization),
        ("max-model-len", engine.max_model_length),
        ("tensor-parallel-size", engine.tensor_parallel_size),
        ("max-num-seqs", batching.max_sequences),
        ("max-num-batched-tokens", batching.max_tokens),
        (
            "long-prefill-token-threshold",
            desired_prefill_threshold(batching.max_tokens, launch.max_length),
        ),
        ("scheduling-policy", "priority"),
        ("scheduler-cls", SCHEDULER_FACTORY),
        ("middleware", TRACED_MIDDLEWARE if tracing else MIDDLEWARE),
        ("otlp-traces-endpoint", _traces_endpoint(tracing) if tracing else None),
        ("api-server-count", 1),
        ("shutdown-timeout", 0),
        # The supervisor requests these continuously.
        ("disable-access-log-for-endpoints", "/health,/metrics"),
        ("kv-cache-memory-bytes", _per_rank(plan.kv_cache_bytes, engine.tensor_parallel_size)),
        ("gpu-memory-utilization", _share(plan.gpu_memory_utilization)),
    ]
    arguments = [launch.python, "-m", launch.entry]
    # Before Fleetkeeper's own arguments, because the last value of an option is the one that holds.
    arguments += engine.profile.extra_arguments if engine.profile else ()
    arguments += [f"--{name}={value}" for name, value in options if value is not None]
    arguments.append(f"--{'' if engine.prefix_caching else 'no-'}enable-prefix-caching")
    set_elsewhere = {*engine.options, *(engine.profile.options if engine.profile else ())}
    if launch.eager and "enforce-eager" not in set_elsewhere:
        arguments.append("--enforce-eager")
    if MEDIA_OPTION not in set_elsewhere:
        arguments += _media_arguments(engine.media_domains)
    arguments += _adapter_arguments(launch.adapters, launch.lora_rank)
    arguments += [_option_argument(name, value) for name, value in sorted(engine.options.items())]
    return arguments


def desired_prefill_threshold(max_tokens: int, max_length: int) -> int:
    """Return the most tokens of one prompt in a step: a quantum less than the step, so another fits.

    vLLM refuses more than the longest sequence.
    """
    others = max(max_tokens - PREFILL_QUANTUM_TOKENS, min(max_tokens, PREFILL_QUANTUM_TOKENS))
    return min(others, max_length)


def desired_environment(
    document: EngineDocument, plan: MemoryPlan, launch: Launch, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return vLLM's environment: the pod's, without what would undo the plan, plus our variables."""
    # VLLM_CPU_KVCACHE_SPACE overrides --kv-cache-memory-bytes and accepts whole GiB only.
    hidden = {"VLLM_CPU_KVCACHE_SPACE", DOCUMENT_ENVIRONMENT}
    child = {name: value for name, value in environment.items() if name not in hidden}
    child[REGION_ENVIRONMENT] = launch.region
    child[VLLM_SETTINGS_ENVIRONMENT] = desired_vllm_settings(
        document, launch.internal_token
    ).to_json()
    child["PYTHONPATH"] = ":".join(filter(None, [launch.package_path, child.get("PYTHONPATH")]))
    # The output of a killed process must not be lost in its buffer, because it decides the exit
    # code.
    child["PYTHONUNBUFFERED"] = "1"
    child.setdefault("VLLM_NO_USAGE_STATS", "1")
    child.setdefault(KEEP_ALIVE, str(KEEP_ALIVE_S))
    # vLLM compares the first address with the allowed hosts, not the one that it is redirected to.
    child.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    # Everything was fetched before; no request to the hub is needed from here on.
    child["HF_HUB_OFFLINE"] = "1"
    if plan.stream_buffer_bytes is not None:
        child[BUFFER_VARIABLE] = str(plan.stream_buffer_bytes)
    if document.accelerator is Accelerator.CPU:
        # vLLM binds threads by the node's cores and keeps one for itself; a pod's share is a quota.
        child.setdefault(BINDING, "nobind")
        if launch.threads is not None:
            child.setdefault("OMP_NUM_THREADS", str(launch.threads))
        if launch.eager:
            # --enforce-eager leaves functions that vLLM compiles on their first use. Without a
            # compiler the first request for logprobs would end EngineCore.
            child["TORCHDYNAMO_DISABLE"] = "1"
    if document.tracing is not None:
        child.update(_tracing_environment(document.tracing, document, environment))
    return child


def desired_vllm_settings(document: EngineDocument, internal_token: str) -> VllmSettings:
    """Return the start-up values for our code inside vLLM's processes."""
    batching, tiers = document.batching, document.tiers
    return VllmSettings(
        max_sequences=batching.max_sequences,
        min_sequences=batching.min_sequences,
        max_tokens=batching.max_tokens,
        min_tokens=batching.min_tokens,
        realtime_queue_limit=tiers.realtime.queue_limit,
        standard_queue_limit=tiers.standard.queue_limit,
        batch_queue_limit=tiers.batch.queue_limit,
        batch_share_percent=tiers.batch.share_percent,
        batch_floor_percent=tiers.batch.floor_percent,
        queue_wait_objective_s=document.objectives.queue_wait_milliseconds / 1000,
        cap_percent=document.memory.cap_percent,
        internal_token=internal_token,
        grants_file=f"{document.control.keys_directory.rstrip('/')}/{GRANTS_FILE}",
    )


def _traces_endpoint(tracing: Tracing) -> str:
    return signal_endpoint(tracing.endpoint, tracing.protocol)


def _tracing_environment(
    tracing: Tracing, document: EngineDocument, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that configure the middleware's tracer and vLLM's alike."""
    known = {
        "service.namespace": tracing.namespace,
        "service.instance.id": environment.get("POD_UID"),
        "k8s.namespace.name": tracing.namespace,
        "k8s.pod.name": environment.get("HOSTNAME"),
        "k8s.pod.uid": environment.get("POD_UID"),
    }
    over_http = tracing.protocol is TracesProtocol.HTTP
    return {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": _traces_endpoint(tracing),
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf" if over_http else "grpc",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": str(EXPORT_TIMEOUT_S),
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(tracing.sample_ratio),
        "OTEL_SERVICE_NAME": tracing.service or document.model.served_name,
        "OTEL_RESOURCE_ATTRIBUTES": ",".join(
            f"{name}={value}" for name, value in known.items() if value
        ),
    }


def _per_rank(amount_bytes: int | None, ranks: int) -> int | None:
    return None if amount_bytes is None else amount_bytes // ranks


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


def _media_arguments(domains: tuple[str, ...]) -> list[str]:
    if not domains:
        return [f"--{MEDIA_OPTION}={NO_MEDIA_DOMAIN}"]
    return [f"--{MEDIA_OPTION}", *domains]


def _adapter_arguments(adapters: Mapping[str, str], rank: int) -> list[str]:
    if not adapters:
        return []
    return [
        "--enable-lora",
        f"--max-loras={len(adapters)}",
        f"--max-lora-rank={rank}",
        # Takes several arguments. Names and directories never start with a dash.
        "--lora-modules",
        *(f"{name}={path}" for name, path in adapters.items()),
    ]


def _option_argument(name: str, value: str) -> str:
    if value == "true":
        return f"--{name}"
    if value == "false":
        return f"--no-{name}"
    return f"--{name}={value}"

"""The engine options that a service may set: a typed allow-list for vLLM 0.31 and 0.32.

A deny-list cannot work: vLLM's parser accepts abbreviations, `_` for `-`, JSON sub-fields
(`--compilation-config.x`), and `--config FILE`. An option is accepted only if its exact name is in
this list and its value has the listed type. The list excludes options that load code, open files,
bind or call addresses, or bypass the memory cap, and options that Fleetkeeper sets.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from fleetkeeper.api import option_values as values
from fleetkeeper.api.schema.error_messages import FieldError
from fleetkeeper_contract.vllm_options import RESERVED, Setter

VLLM_VERSIONS = ("0.31.0", "0.32.0")
"""The vLLM versions against which all names and values of this list were checked."""
NEWEST_ONLY: Mapping[str, frozenset[str]] = MappingProxyType(
    {"moe-backend": frozenset({"aiter_mega_moe", "flashinfer_moe_ep_cutedsl"})}
)
"""The values that only the newest of these versions accepts. In an older one, vLLM's parser refuses
them, so `newer_value_errors` does first."""


class ValueKind(Protocol):
    """The type of an option's value."""

    @property
    def text(self) -> str:
        """Describe the type, for example `true or false` or `an integer from 1 to 32`."""

    def problem(self, value: str) -> str | None:
        """Return how to correct an invalid value, or None if the value is valid."""

    def examples(self) -> tuple[str, ...]:
        """Return valid values: all values of an enum, or both ends of a range."""


@dataclass(frozen=True, slots=True)
class Toggle:
    """A boolean: `true` becomes `--NAME`, `false` becomes `--no-NAME`."""

    text: str = "true or false"

    def problem(self, value: str) -> str | None:
        """Return how to correct an invalid value, or None if the value is valid."""
        return None if value in {"true", "false"} else 'must be "true" or "false"'

    def examples(self) -> tuple[str, ...]:
        """Return both values."""
        return ("true", "false")


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer within bounds, and a multiple of `step`."""

    least: int
    most: int
    unit: str = ""
    step: int = 1

    @property
    def text(self) -> str:
        """Describe the type."""
        return f"an integer from {self.least} to {self.most}" + (
            f", a multiple of {self.step}" * (self.step > 1) + f" ({self.unit})" * bool(self.unit)
        )

    def problem(self, value: str) -> str | None:
        """Return how to correct an invalid value, or None if the value is valid."""
        is_number = re.fullmatch(r"0|[1-9][0-9]{0,11}", value, re.ASCII)
        good = is_number and self.least <= int(value) <= self.most and int(value) % self.step == 0
        return None if good else f"must be {self.text}"

    def examples(self) -> tuple[str, ...]:
        """Return both ends of the range."""
        return (str(self.least), str(self.most))


@dataclass(frozen=True, slots=True)
class Fraction:
    """A decimal number within bounds."""

    least: float
    most: float
    unit: str = ""

    @property
    def text(self) -> str:
        """Describe the type."""
        return f"a number from {self.least:g} to {self.most:g}" + (
            f" ({self.unit})" * bool(self.unit)
        )

    def problem(self, value: str) -> str | None:
        """Return how to correct an invalid value, or None if the value is valid."""
        good = re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", value, re.ASCII)
        return None if good and self.least <= float(value) <= self.most else f"must be {self.text}"

    def examples(self) -> tuple[str, ...]:
        """Return both ends of the range."""
        return (f"{self.least:g}", f"{self.most:g}")


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a fixed set of values."""

    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """Describe the type."""
        return f"one of {', '.join(self.words)}"

    def problem(self, value: str) -> str | None:
        """Return how to correct an invalid value, or None if the value is valid."""
        return None if value in self.words else f"must be {self.text}"

    def examples(self) -> tuple[str, ...]:
        """Return all values."""
        return self.words


@dataclass(frozen=True, slots=True)
class EngineOption:
    """An option: its name without leading dashes, the type of its value, and its meaning."""

    name: str
    takes: ValueKind
    meaning: str


def _words(*words: str) -> OneOf:
    return OneOf(words)


_TOGGLE = Toggle()


def _table(*rows: tuple[str, ValueKind, str]) -> Mapping[str, EngineOption]:
    return MappingProxyType(
        {row[0]: EngineOption(*row) for row in sorted(rows, key=lambda r: r[0])}
    )


ALLOWED: Mapping[str, EngineOption] = _table(
    # model and loading
    ("runner", _words("auto", "generate", "pooling"), "Selects text generation or pooling (embedding, classification). auto follows the model."),
    ("convert", _words("auto", "none", "embed", "classify"), "Converts a generative model into an embedding or classification model."),
    ("tokenizer-mode", _words("auto", "hf", "mistral", "deepseek_v32", "deepseek_v4", "inkling", "kimi_k3", "cohere"), "The tokenizer implementation."),
    ("config-format", _words("auto", "hf", "mistral"), "The format of the model's configuration."),
    ("generation-config", _words("auto", "vllm"), "The sampling defaults: those of the model (auto) or of vLLM (vllm)."),
    ("load-format", _words("auto", "safetensors", "fastsafetensors", "mistral", "dummy"), "The format of the weights. dummy uses random weights, for performance tests."),
    ("safetensors-load-strategy", _words("lazy", "eager", "prefetch"), "How safetensors files are read: memory-mapped (lazy), completely (eager), or in advance (prefetch)."),
    ("max-parallel-loading-workers", Whole(1, 16), "The number of workers that load weights at the same time. It bounds memory during the load."),
    ("use-tqdm-on-load", _TOGGLE, "Shows a progress bar while weights load."),
    ("seed", Whole(0, 2**31 - 1), "The seed for random numbers."),
    ("renderer-num-workers", Whole(1, 16, "threads"), "The number of threads that tokenize prompts."),
    # compute
    ("enforce-eager", _TOGGLE, "Disables CUDA graphs. The engine starts faster and uses less memory, but steps take longer."),
    ("optimization-level", _words("0", "1", "2", "3"), "The level of compilation: 0 starts fastest, 3 runs fastest."),
    ("performance-mode", _words("balanced", "interactivity", "throughput"), "The goal for which compilation and kernels are tuned."),
    ("max-cudagraph-capture-size", Whole(1, 8192, "tokens"), "The maximum step size for which a CUDA graph is captured."),
    ("attention-backend", OneOf(values.ATTENTION_BACKENDS), "The attention backend."),
    ("moe-backend", OneOf(values.MOE_BACKENDS), "The backend of mixture-of-experts layers."),
    ("linear-backend", OneOf(values.LINEAR_BACKENDS), "The backend of linear layers."),
    ("enable-flashinfer-autotune", _TOGGLE, "Tunes the FlashInfer kernels at startup."),
    ("disable-custom-all-reduce", _TOGGLE, "Uses NCCL for all-reduce instead of vLLM's kernel."),
    ("disable-sliding-window", _TOGGLE, "Disables sliding-window attention. The context is then limited to the window size."),
    ("use-fp64-gumbel", _TOGGLE, "Uses 64-bit floating point for the sampling noise."),
    ("numa-bind", _TOGGLE, "Binds each worker to the NUMA node of its accelerator."),
    ("distributed-timeout-seconds", Whole(30, 7200, "seconds"), "The time that workers wait for each other."),
    # parallelism within a replica
    ("enable-expert-parallel", _TOGGLE, "Distributes whole experts over the accelerators of a replica instead of splitting each expert."),
    ("enable-ep-weight-filter", _TOGGLE, "Loads only the local experts in each worker."),
    ("expert-placement-strategy", _words("linear", "round_robin"), "How experts are distributed over the accelerators."),
    ("decode-context-parallel-size", _words("1", "2", "4", "8", "16"), "The number of accelerators that share the KV cache of one sequence during decode. Must divide tensorParallelSize."),
    # KV cache
    ("kv-cache-dtype", _words("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"), "The data type of the KV cache. fp8 holds twice as many tokens."),
    ("block-size", _words("8", "16", "32", "64", "128"), "The number of tokens in a KV cache block."),
    ("prefix-caching-hash-algo", _words("sha256", "sha256_cbor"), "The hash algorithm for prefix caching."),
    ("kv-sharing-fast-prefill", _TOGGLE, "Skips prefill work in layers that share a KV cache."),
    ("disable-hybrid-kv-cache-manager", _TOGGLE, "Uses the same KV block size for all layers."),
    ("mamba-cache-dtype", _words("auto", "float32", "float16", "bfloat16"), "The data type of the state of Mamba layers."),
    ("mamba-ssm-cache-dtype", _words("auto", "float32", "float16", "bfloat16"), "The data type of the SSM state of Mamba layers."),
    ("mamba-cache-mode", _words("none", "align"), "How the state of Mamba layers is cached for prefixes."),
    ("mamba-block-size", Whole(8, 65536, "tokens", 8), "The number of tokens in a cache block of Mamba layers. Requires engine.prefixCaching."),
    # scheduling
    ("enable-chunked-prefill", _TOGGLE, "Splits long prompts over several steps. Without it, Fleetkeeper does not change the limit of tokens, and batching.maxTokens must be at least the model length."),
    ("async-scheduling", _TOGGLE, "Prepares the next step while a step runs. Not with the spec-method ngram."),
    ("stream-interval", Whole(1, 1024, "tokens"), "The number of tokens in each chunk of a streamed response."),
    ("scheduler-reserve-full-isl", _TOGGLE, "Admits a request only if the KV cache has room for its whole prompt."),
    ("watermark", Fraction(0, 0.5), "The share of the KV cache that is kept free for running requests."),
    ("prefill-schedule-interval", Whole(1, 64, "steps"), "The number of steps between two steps that may start new prompts."),
    ("disable-chunked-mm-input", _TOGGLE, "Does not split an image or another multimodal item over two steps. Not with mamba-cache-mode align."),
    # speculative decoding without a draft model
    ("spec-method", _words("ngram", "mtp"), "The method of speculative decoding: from n-grams of the prompt (ngram) or with the model's own heads (mtp). Requires spec-tokens."),
    ("spec-tokens", Whole(1, 16, "tokens"), "The number of speculative tokens. Each counts against the limit of tokens in a step. Requires spec-method. With model.adapters, batching.maxTokens must be at least batching.maxSequences x (spec-tokens + 1)."),
    # LoRA
    ("max-loras", Whole(1, 32), "The maximum number of adapters in a batch."),
    ("max-lora-rank", _words("1", "8", "16", "32", "64", "128", "256", "320", "512"), "The maximum rank of an adapter."),
    ("max-cpu-loras", Whole(1, 256), "The maximum number of adapters in CPU memory. Must be at least max-loras, which is by default the number of model.adapters."),
    ("lora-dtype", _words("auto", "float16", "bfloat16"), "The data type of adapters."),
    ("fully-sharded-loras", _TOGGLE, "Shards adapters completely over the accelerators."),
    ("specialize-active-lora", _TOGGLE, "Captures separate CUDA graphs for different numbers of active adapters."),
    # multimodal input
    ("language-model-only", _TOGGLE, "Disables all input other than text."),
    ("mm-processor-cache-gb", Fraction(0, 64, "GiB"), "The size of the cache for processed images and audio. It counts as pod memory."),
    ("mm-processor-cache-type", _words("lru", "shm"), "The cache for processed images and audio: in each process (lru) or in shared memory (shm)."),
    ("mm-hasher-algorithm", _words("blake3", "sha256", "sha512"), "The hash algorithm that identifies repeated images."),
    ("mm-encoder-tp-mode", _words("weights", "data"), "What is split over the accelerators: the encoder's weights or its inputs."),
    ("interleave-mm-strings", _TOGGLE, "Keeps images at their position in the text."),
    ("video-pruning-rate", Fraction(0, 0.99), "The share of a video's tokens that is dropped."),
    # the API
    ("enable-auto-tool-choice", _TOGGLE, "Lets the model decide to call tools. Requires tool-call-parser."),
    ("tool-call-parser", OneOf(values.TOOL_PARSERS), "The parser that extracts tool calls from the model's output."),
    ("exclude-tools-when-tool-choice-none", _TOGGLE, "Omits tools from the prompt if tool_choice is none."),
    ("tool-strict-level", _words("auto", "function", "parameter"), "How strictly tool calls must match their schema."),
    ("reasoning-parser", OneOf(values.REASONING_PARSERS), "The parser that separates reasoning from the answer in the model's output."),
    ("chat-template-content-format", _words("auto", "string", "openai"), "The format in which messages are passed to the chat template."),
    ("max-logprobs", Whole(0, 200), "The maximum number of log probabilities per token that a request may ask for."),
    ("logprobs-mode", _words("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"), "The values that are returned as log probabilities."),
    ("return-tokens-as-token-ids", _TOGGLE, "Represents tokens by their IDs in log probabilities."),
    ("enable-prompt-tokens-details", _TOGGLE, "Reports the number of cached prompt tokens in responses."),
    ("enable-force-include-usage", _TOGGLE, "Reports token usage in every response."),
    ("sse-keep-alive-interval", Whole(0, 3600, "seconds"), "The interval of keep-alive messages in a streamed response. 0 disables them."),
    ("h11-max-incomplete-event-size", Whole(16384, 67108864, "bytes"), "The maximum size of a request's HTTP header section."),
    ("h11-max-header-count", Whole(16, 4096), "The maximum number of HTTP headers of a request."),
    ("disable-fastapi-docs", _TOGGLE, "Disables the API documentation pages."),
    ("uvicorn-log-level", _words("critical", "error", "warning", "info"), "The log level of the HTTP server."),
    ("disable-uvicorn-access-log", _TOGGLE, "Disables the access log of the HTTP server."),
    # observability
    ("kv-cache-metrics", _TOGGLE, "Measures the lifetime of KV blocks."),
    ("kv-cache-metrics-sample", Fraction(0.001, 1), "The share of KV blocks whose lifetime is measured."),
    ("cudagraph-metrics", _TOGGLE, "Measures the use of CUDA graphs."),
    ("enable-mfu-metrics", _TOGGLE, "Measures model FLOPs utilization (MFU)."),
    ("enable-logging-iteration-details", _TOGGLE, "Logs details of each engine step."),
)  # fmt: skip
"""The options that a service may set, sorted by name."""

_TOKEN = re.compile(r"[A-Za-z0-9._/:@-]{1,253}", re.ASCII)


def argument(name: str, value: str) -> str:
    """Return the command-line argument for an option that `option_errors` accepts.

    Raises:
        ValueError: The option or its value is not on the list.
    """
    problem = _problem(name, value, None)
    if problem:
        raise ValueError(f"{_shown(name)}: {problem}")
    if isinstance(ALLOWED[name].takes, Toggle):
        return f"--{name}" if value == "true" else f"--no-{name}"
    return f"--{name}={value}"


def option_errors(
    options: Mapping[str, str],
    allowed_by_profile: Iterable[str] | None = None,
    set_by_profile: Collection[str] = (),
) -> list[FieldError]:
    """Return the errors of `spec.engine.options`.

    Args:
        options: The options of the spec.
        allowed_by_profile: A further restriction of the options; None means all of the list.
        set_by_profile: Options that the engine has from its profile.
    """
    profile = None if allowed_by_profile is None else frozenset(allowed_by_profile)
    errors = []
    for name, value in sorted(options.items()):
        problem = _problem(name, value, profile)
        if problem:
            errors.append(FieldError(f"spec.engine.options.{_shown(name)}", problem))
    return errors + _missing_partners(options, set_by_profile)


def newer_value_errors(options: Mapping[str, str], vllm_version: str) -> list[FieldError]:
    """Return the values that this version of vLLM does not have yet, because it is an older one."""
    newest = VLLM_VERSIONS[-1]
    if version_of(vllm_version) >= version_of(newest):
        return []
    return [
        FieldError(
            f"spec.engine.options.{name}",
            f"only vLLM {newest} has the value {options[name]}, but the engine profile has vLLM {vllm_version}; choose another value or profile",
        )
        for name, values in NEWEST_ONLY.items()
        if options.get(name) in values
    ]


def version_of(version: str) -> tuple[int, ...]:
    """Return a version of vLLM, such as 0.32.0, in a form that can be compared."""
    return tuple(int(part) for part in version.split("."))


def _missing_partners(
    options: Mapping[str, str], set_by_profile: Collection[str]
) -> list[FieldError]:
    """Return an error for each option that has no effect, or fails at startup, without another one."""
    return [
        FieldError(
            f"spec.engine.options.{name}", f"requires the option {partner}; set both or neither"
        )
        for name, partner in values.PARTNERS
        if options.get(name, "false") != "false" and partner not in {*options, *set_by_profile}
    ]


def _problem(name: str, value: str, profile: frozenset[str] | None) -> str | None:
    option = ALLOWED.get(name)
    if option is None:
        return _not_settable(name)
    if profile is not None and name not in profile:
        return "is not allowed by the engine profile; remove it or choose another profile"
    if not _TOKEN.fullmatch(value) or value.startswith("-"):
        advice = "must be a single word of letters, digits, and ._/:@-"
        return f"the value is not allowed; {option.takes.problem(value) or advice}"
    problem = option.takes.problem(value)
    return f"{_shown(value)!r} is not allowed; {problem}" if problem else None


def _shown(text: str) -> str:
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable if len(printable) <= 64 else f"{printable[:61]}..."


def _not_settable(name: str) -> str:
    row = RESERVED.get(name.removeprefix("no-"))
    if row and row.field:
        return f"is set by {row.field}; remove the option and use that field"
    if row and row.setters is Setter.SUPERVISOR:
        return f"{row.reason}; remove the option"
    near = difflib.get_close_matches(
        _shown(name).lstrip("-").replace("_", "-").lower(), ALLOWED, n=1, cutoff=0.8
    )
    hint = f"; did you mean {near[0]}?" if near else "; see the reference of engine options"
    return f"is not an allowed option{hint}"

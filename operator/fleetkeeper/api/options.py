"""The engine options that a service may set: a typed allow-list for vLLM 0.32.

A deny-list cannot work: vLLM's parser takes abbreviations, `_` for `-`, JSON sub-fields
(`--compilation-config.x`) and `--config FILE`. So an option is taken when its name is in this list,
letter by letter, and its value is of the named type. Left out are all that load code, open files,
bind or call addresses, undo the memory cap, and those that Fleetkeeper sets itself.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from fleetkeeper.api import option_values as values
from fleetkeeper.api.plain_words import FieldError

VLLM_VERSIONS = ("0.32.0",)
"""The vLLM versions that this list was checked against, name by name, value by value."""


class ValueKind(Protocol):
    """What an option takes."""

    @property
    def text(self) -> str:
        """The kind in words: `true or false`, `a whole number, 1 to 32`."""

    def problem(self, value: str) -> str | None:
        """What is wrong with a value and what to write; None when it is good."""

    def examples(self) -> tuple[str, ...]:
        """Good values: every word of an enum, both ends of a range."""


@dataclass(frozen=True, slots=True)
class Toggle:
    """`true` or `false`: `--NAME` or `--no-NAME`."""

    text: str = "true or false"

    def problem(self, value: str) -> str | None:
        """See ValueKind."""
        return None if value in {"true", "false"} else 'write "true" or "false"'

    def examples(self) -> tuple[str, ...]:
        """See ValueKind."""
        return ("true", "false")


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number within bounds."""

    least: int
    most: int
    unit: str = ""

    @property
    def text(self) -> str:
        """See ValueKind."""
        return f"a whole number, {self.least} to {self.most}" + (
            f" ({self.unit})" * bool(self.unit)
        )

    def problem(self, value: str) -> str | None:
        """See ValueKind."""
        good = re.fullmatch(r"0|[1-9][0-9]{0,11}", value, re.ASCII)
        return None if good and self.least <= int(value) <= self.most else f"write {self.text}"

    def examples(self) -> tuple[str, ...]:
        """See ValueKind."""
        return (str(self.least), str(self.most))


@dataclass(frozen=True, slots=True)
class Fraction:
    """A decimal number within bounds."""

    least: float
    most: float
    unit: str = ""

    @property
    def text(self) -> str:
        """See ValueKind."""
        return f"a number, {self.least:g} to {self.most:g}" + (f" ({self.unit})" * bool(self.unit))

    def problem(self, value: str) -> str | None:
        """See ValueKind."""
        good = re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", value, re.ASCII)
        return None if good and self.least <= float(value) <= self.most else f"write {self.text}"

    def examples(self) -> tuple[str, ...]:
        """See ValueKind."""
        return (f"{self.least:g}", f"{self.most:g}")


@dataclass(frozen=True, slots=True)
class OneOf:
    """A word of a closed set."""

    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """See ValueKind."""
        return f"one of {', '.join(self.words)}"

    def problem(self, value: str) -> str | None:
        """See ValueKind."""
        return None if value in self.words else f"write {self.text}"

    def examples(self) -> tuple[str, ...]:
        """See ValueKind."""
        return self.words


@dataclass(frozen=True, slots=True)
class EngineOption:
    """One option: its name without the dashes, what it takes, what it does."""

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
    ("runner", _words("auto", "generate", "pooling"), "Whether the model generates text or pools (embeds, classifies). auto follows the model."),
    ("convert", _words("auto", "none", "embed", "classify"), "Turns a generating model into one that embeds or classifies."),
    ("tokenizer-mode", _words("auto", "hf", "mistral", "deepseek_v32", "deepseek_v4", "inkling", "kimi_k3", "cohere"), "Which tokenizer implementation is used."),
    ("config-format", _words("auto", "hf", "mistral"), "The format of the model's configuration."),
    ("generation-config", _words("auto", "vllm"), "Whether the model's own sampling defaults are used (auto) or vLLM's (vllm)."),
    ("load-format", _words("auto", "safetensors", "fastsafetensors", "mistral", "dummy"), "The format of the weights. dummy fills them with random numbers, for tests of speed."),
    ("safetensors-load-strategy", _words("lazy", "eager", "prefetch"), "How safetensors files are read: mapped into memory, wholly, or ahead."),
    ("max-parallel-loading-workers", Whole(1, 16), "How many workers load weights at a time, which bounds memory while loading."),
    ("use-tqdm-on-load", _TOGGLE, "Whether a progress bar is written while weights load."),
    ("seed", Whole(0, 2**31 - 1), "The seed of random numbers."),
    ("renderer-num-workers", Whole(1, 16, "threads"), "Threads that turn prompts into tokens."),
    # computing
    ("enforce-eager", _TOGGLE, "Whether CUDA graphs are switched off: less memory and a quicker start, slower steps."),
    ("optimization-level", _words("0", "1", "2", "3"), "How much is compiled: 0 starts soonest, 3 runs fastest."),
    ("performance-mode", _words("balanced", "interactivity", "throughput"), "What compilation and kernels are tuned for."),
    ("max-cudagraph-capture-size", Whole(1, 8192, "tokens"), "The largest step for which a CUDA graph is captured."),
    ("attention-backend", OneOf(values.ATTENTION_BACKENDS), "The implementation of attention."),
    ("moe-backend", OneOf(values.MOE_BACKENDS), "The implementation of mixture-of-experts layers."),
    ("linear-backend", OneOf(values.LINEAR_BACKENDS), "The implementation of linear layers."),
    ("enable-flashinfer-autotune", _TOGGLE, "Whether FlashInfer's kernels are tuned at start."),
    ("disable-custom-all-reduce", _TOGGLE, "Whether NCCL is used for all-reduce rather than vLLM's own kernel."),
    ("disable-sliding-window", _TOGGLE, "Whether sliding windows of attention are switched off; the context is then cut to the window."),
    ("use-fp64-gumbel", _TOGGLE, "Whether sampling noise has 64 bits."),
    ("numa-bind", _TOGGLE, "Whether workers are bound to the NUMA node of their accelerator."),
    ("distributed-timeout-seconds", Whole(30, 7200, "seconds"), "How long workers wait for one another."),
    # parallelism within a replica
    ("enable-expert-parallel", _TOGGLE, "Whether experts are spread over the accelerators of a replica rather than cut."),
    ("enable-ep-weight-filter", _TOGGLE, "Whether each worker reads its own experts only."),
    ("expert-placement-strategy", _words("linear", "round_robin"), "How experts are spread over the accelerators."),
    ("decode-context-parallel-size", _words("1", "2", "4", "8", "16"), "Accelerators that share the KV cache of one sequence while decoding; must divide tensorParallelSize."),
    # KV cache
    ("kv-cache-dtype", _words("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"), "The number format of the KV cache. fp8 holds twice as many tokens."),
    ("block-size", _words("8", "16", "32", "64", "128"), "Tokens of a block of the KV cache."),
    ("prefix-caching-hash-algo", _words("sha256", "sha256_cbor"), "The hash by which shared prefixes are found."),
    ("kv-sharing-fast-prefill", _TOGGLE, "Whether layers that share a KV cache skip work in prefill."),
    ("disable-hybrid-kv-cache-manager", _TOGGLE, "Whether all layers get KV blocks of one size."),
    ("mamba-cache-dtype", _words("auto", "float32", "float16", "bfloat16"), "The number format of the state of Mamba layers."),
    ("mamba-ssm-cache-dtype", _words("auto", "float32", "float16", "bfloat16"), "The number format of the SSM state of Mamba layers."),
    ("mamba-cache-mode", _words("none", "align"), "Whether states of Mamba layers are cached for prefixes."),
    ("mamba-block-size", Whole(8, 65536, "tokens"), "Tokens of a block of the cache of Mamba layers; a multiple of 8."),
    # scheduling
    ("enable-chunked-prefill", _TOGGLE, "Whether long prompts are cut into pieces. Without it, the limit of tokens does not move."),
    ("async-scheduling", _TOGGLE, "Whether the next step is prepared while one runs."),
    ("stream-interval", Whole(1, 1024, "tokens"), "Tokens between two pieces of a streamed answer."),
    ("scheduler-reserve-full-isl", _TOGGLE, "Whether a request is admitted only when the KV cache has room for its whole prompt."),
    ("watermark", Fraction(0, 0.5), "The share of the KV cache kept free for running requests."),
    ("prefill-schedule-interval", Whole(1, 64, "steps"), "Steps between two that may begin new prompts."),
    ("disable-chunked-mm-input", _TOGGLE, "Whether an image or another item is never cut over two steps."),
    # speculative decoding that needs no second model
    ("spec-method", _words("ngram", "mtp"), "Guesses further tokens: from the prompt itself (ngram) or by the model's own heads (mtp). Needs spec-tokens."),
    ("spec-tokens", Whole(1, 16, "tokens"), "Tokens guessed at a time; each counts against the tokens of a step."),
    # LoRA
    ("max-loras", Whole(1, 32), "Adapters in one batch."),
    ("max-lora-rank", _words("1", "8", "16", "32", "64", "128", "256", "320", "512"), "The largest rank of an adapter."),
    ("max-cpu-loras", Whole(1, 256), "Adapters kept in memory; at least max-loras."),
    ("lora-dtype", _words("auto", "float16", "bfloat16"), "The number format of adapters."),
    ("fully-sharded-loras", _TOGGLE, "Whether adapters are cut over the accelerators wholly."),
    ("specialize-active-lora", _TOGGLE, "Whether CUDA graphs are captured by the number of active adapters."),
    # images, sound, video
    ("language-model-only", _TOGGLE, "Whether everything but text is switched off."),
    ("mm-processor-cache-gb", Fraction(0, 64, "GiB"), "Memory for processed images and sound. Counts as the pod's memory."),
    ("mm-processor-cache-type", _words("lru", "shm"), "Where processed images and sound are kept."),
    ("mm-hasher-algorithm", _words("blake3", "sha256", "sha512"), "The hash by which the same image is known again."),
    ("mm-encoder-tp-mode", _words("weights", "data"), "Whether the encoder's weights or its inputs are cut over the accelerators."),
    ("interleave-mm-strings", _TOGGLE, "Whether images stay at their place in the text."),
    ("video-pruning-rate", Fraction(0, 0.99), "The share of a video's tokens that is left out."),
    # the API
    ("enable-auto-tool-choice", _TOGGLE, "Whether the model may choose to call tools. Needs tool-call-parser."),
    ("tool-call-parser", OneOf(values.TOOL_PARSERS), "How calls of tools are read from the model's answer."),
    ("exclude-tools-when-tool-choice-none", _TOGGLE, "Whether tools are left out of the prompt with tool_choice none."),
    ("tool-strict-level", _words("auto", "function", "parameter"), "How strictly calls of tools must fit their schema."),
    ("reasoning-parser", OneOf(values.REASONING_PARSERS), "How the model's reasoning is told from its answer."),
    ("chat-template-content-format", _words("auto", "string", "openai"), "How messages are given to the chat template."),
    ("max-logprobs", Whole(0, 200), "The most log probabilities that a request may ask for, each token."),
    ("logprobs-mode", _words("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"), "What is returned as log probabilities."),
    ("return-tokens-as-token-ids", _TOGGLE, "Whether tokens are named by their number in log probabilities."),
    ("enable-prompt-tokens-details", _TOGGLE, "Whether answers say how many tokens of the prompt were cached."),
    ("enable-force-include-usage", _TOGGLE, "Whether every answer says how many tokens it used."),
    ("sse-keep-alive-interval", Whole(0, 3600, "seconds"), "Seconds between signs of life in a streamed answer. 0: none."),
    ("h11-max-incomplete-event-size", Whole(16384, 67108864, "bytes"), "The largest head of a request."),
    ("h11-max-header-count", Whole(16, 4096), "The most headers of a request."),
    ("disable-fastapi-docs", _TOGGLE, "Whether the pages that describe the API are switched off."),
    ("uvicorn-log-level", _words("critical", "error", "warning", "info"), "What the HTTP server logs."),
    ("disable-uvicorn-access-log", _TOGGLE, "Whether the HTTP server logs no requests."),
    # what is measured
    ("kv-cache-metrics", _TOGGLE, "Whether the life of KV blocks is measured."),
    ("kv-cache-metrics-sample", Fraction(0.001, 1), "The share of KV blocks that is measured."),
    ("cudagraph-metrics", _TOGGLE, "Whether the use of CUDA graphs is measured."),
    ("enable-mfu-metrics", _TOGGLE, "Whether the share of the accelerator's computing power in use is measured."),
    ("enable-logging-iteration-details", _TOGGLE, "Whether each step is logged."),
)  # fmt: skip
"""Every option that a service may set, by name, sorted."""

VALUE_MAX_LENGTH = 253
_TOKEN = re.compile(r"[A-Za-z0-9._/:@-]{1,253}", re.ASCII)


def argument(name: str, value: str) -> str:
    """The one word of the command line for an option that `option_errors` found nothing against.

    Raises:
        ValueError: the option or its value is not on the list.
    """
    problem = _problem(name, value, None)
    if problem:
        raise ValueError(f"{_shown(name)}: {problem}")
    if isinstance(ALLOWED[name].takes, Toggle):
        return f"--{name}" if value == "true" else f"--no-{name}"
    return f"--{name}={value}"


def option_errors(
    options: Mapping[str, str], allowed_by_profile: Iterable[str] | None = None
) -> list[FieldError]:
    """What is wrong with `spec.engine.options`; `allowed_by_profile` narrows the list further."""
    profile = None if allowed_by_profile is None else frozenset(allowed_by_profile)
    errors = []
    for name, value in sorted(options.items()):
        problem = _problem(name, value, profile)
        if problem:
            errors.append(FieldError(f"spec.engine.options.{_shown(name)}", problem))
    return errors or _missing_partners(options)


def options_as_written(spec: object) -> dict[str, str]:
    """The engine options of an unparsed spec, as far as they are text; what is not, the parser tells."""
    engine = spec.get("engine") if isinstance(spec, Mapping) else None
    options = engine.get("options") if isinstance(engine, Mapping) else None
    if not isinstance(options, Mapping):
        return {}
    return {str(key): value for key, value in options.items() if _is_written(value)}


def _is_written(value: object) -> bool:
    return isinstance(value, str) and len(value) <= VALUE_MAX_LENGTH


def _missing_partners(options: Mapping[str, str]) -> list[FieldError]:
    """Options that mean nothing, or fail at start, without another."""
    return [
        FieldError(f"spec.engine.options.{name}", f"needs the option {partner}; set both or none")
        for name, partner in values.PARTNERS
        if options.get(name, "false") != "false" and partner not in options
    ]


def _problem(name: str, value: str, profile: frozenset[str] | None) -> str | None:
    option = ALLOWED.get(name)
    if option is None:
        return _not_settable(name)
    if profile is not None and name not in profile:
        return "is not allowed by the engine profile; remove it or choose another profile"
    if not _TOKEN.fullmatch(value) or value.startswith("-"):
        return f"the value is not allowed; {option.takes.problem(value) or 'write a single word'}"
    problem = option.takes.problem(value)
    return f"{_shown(value)!r} is not allowed; {problem}" if problem else None


def _shown(text: str) -> str:
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable if len(printable) <= 64 else f"{printable[:61]}..."


def _not_settable(name: str) -> str:
    field = values.SET_BY_FIELD.get(name)
    if field:
        return f"is set by {field}; remove the option and use that field"
    if name in values.OWN:
        return "is set by Fleetkeeper itself; remove the option"
    near = difflib.get_close_matches(
        _shown(name).lstrip("-").replace("_", "-").lower(), ALLOWED, n=1, cutoff=0.8
    )
    hint = f"; did you mean {near[0]}?" if near else "; the reference lists those that may be set"
    return f"is no option that may be set{hint}"

"""vLLM's command line, as far as a simulated engine needs it: every option is known, few have an effect.

`vllm_options.txt` has the options of vLLM 0.32 with the kind of their values; `tests/engine` compares it
with vLLM's own parser.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

logger = logging.getLogger("vllm.fleetkeeper")

DEFAULT_MAX_LENGTH: Final = 131_072
"""Tokens of the longest sequence without --max-model-len."""
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_USED: Final = frozenset(
    {
        "api_key",
        "block_size",
        "convert",
        "enable_auto_tool_choice",
        "enable_chunked_prefill",
        "enable_force_include_usage",
        "enable_prefix_caching",
        "enable_prompt_tokens_details",
        "host",
        "long_prefill_token_threshold",
        "lora_modules",
        "max_logprobs",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "middleware",
        "model",
        "port",
        "runner",
        "scheduler_cls",
        "scheduling_policy",
        "served_model_name",
        "stream_interval",
    }
)


@dataclass(frozen=True, slots=True)
class Options:
    """The options with an effect, by the names of vLLM's."""

    model: str
    served_model_names: tuple[str, ...]
    host: str
    port: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    block_size: int
    by_priority: bool
    scheduler_cls: str | None
    middleware: tuple[str, ...]
    api_keys: tuple[str, ...]
    adapters: dict[str, str]
    """Name -> path."""
    stream_interval: int
    prompt_tokens_details: bool
    force_include_usage: bool
    max_logprobs: int
    pooling: bool
    auto_tool_choice: bool


def parse_options(arguments: Sequence[str]) -> Options:
    """Return the options of a command line. Exit with status 2 and a message if one is wrong, as vLLM does."""
    parser = argparse.ArgumentParser(prog="api_server.py", description=__doc__)
    for name, kind, many in known_options():
        _add(parser, name, kind, many)
    found = parser.parse_args(list(arguments))
    ignored = {
        name: value
        for name, value in vars(found).items()
        if value is not None and name not in _USED
    }
    if ignored:
        logger.info("options without an effect in a simulated engine: %s", ignored)
    options = _options(found)
    if problem := _problem(options):
        parser.error(problem)
    return options


def known_options() -> Iterator[tuple[str, str, str]]:
    """Yield each option of vLLM: its name, the kind of its value, and + or ? for their number."""
    text = resources.files(__package__).joinpath("vllm_options.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        name, kind, *many = line.split(" ")
        yield name, kind, "".join(many)


def _add(parser: argparse.ArgumentParser, name: str, kind: str, many: str) -> None:
    names = [f"--{name}"] if "_" in name else [f"--{name}", f"--{name.replace('-', '_')}"]
    names = list(dict.fromkeys(names))
    if kind == "toggle":
        parser.add_argument(*names, action=argparse.BooleanOptionalAction)
    elif kind == "flag":
        parser.add_argument(*names, action="store_true", default=None)
    elif name == "middleware":
        parser.add_argument(*names, action="append")
    else:
        more: dict[str, Any] = {"nargs": many} if many else {}
        if "|" in kind:
            more["choices"] = kind.split("|")
        parser.add_argument(*names, type=_TYPES.get(kind, str), **more)


def count(text: str) -> int:
    """Return a number as vLLM reads it: 16k is 16,000, 16K is 16,384.

    Raises:
        ValueError: if it is none.
    """
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        return int(text)
    number, unit = found.groups()
    factor = {**_DECIMAL, **_BINARY}.get(unit, 1)
    if factor == 1 or unit in _BINARY:
        return int(number) * factor
    return int(float(number) * factor)


_TYPES: dict[str, Callable[[str], object]] = {"whole": int, "number": float, "count": count}


def _options(found: argparse.Namespace) -> Options:
    model = found.model or "simulated"
    length = found.max_model_len or 0
    sequences = 256 if found.max_num_seqs is None else found.max_num_seqs
    tokens = 8192 if found.max_num_batched_tokens is None else found.max_num_batched_tokens
    return Options(
        model=model,
        served_model_names=tuple(found.served_model_name or (model,)),
        host=found.host or "0.0.0.0",  # noqa: S104 - vLLM's default: a pod serves its network
        port=8000 if found.port is None else found.port,
        max_model_len=length if length > 0 else DEFAULT_MAX_LENGTH,
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        long_prefill_token_threshold=found.long_prefill_token_threshold or 0,
        enable_chunked_prefill=found.enable_chunked_prefill is not False,
        enable_prefix_caching=found.enable_prefix_caching is not False,
        block_size=found.block_size or 16,
        by_priority=found.scheduling_policy == "priority",
        scheduler_cls=found.scheduler_cls,
        middleware=tuple(found.middleware or ()),
        api_keys=tuple(found.api_key or ()),
        adapters=dict(item.partition("=")[::2] for item in found.lora_modules or ()),
        stream_interval=1 if found.stream_interval is None else found.stream_interval,
        prompt_tokens_details=bool(found.enable_prompt_tokens_details),
        force_include_usage=bool(found.enable_force_include_usage),
        max_logprobs=20 if found.max_logprobs is None else found.max_logprobs,
        pooling=found.runner == "pooling" or found.convert in ("embed", "classify"),
        auto_tool_choice=bool(found.enable_auto_tool_choice),
    )


def _problem(options: Options) -> str:
    """Return why vLLM's configuration refuses these options; empty if it does not."""
    least = (
        ("max_num_seqs", options.max_num_seqs),
        ("max_num_batched_tokens", options.max_num_batched_tokens),
        ("stream_interval", options.stream_interval),
    )
    for name, value in least:
        if value < 1:
            return f"argument --{name.replace('_', '-')}: {name} must be at least 1, not {value}"
    if options.max_num_batched_tokens < options.max_num_seqs:
        return (
            f"max_num_batched_tokens ({options.max_num_batched_tokens}) must be greater than or "
            f"equal to max_num_seqs ({options.max_num_seqs})."
        )
    if options.long_prefill_token_threshold > options.max_model_len:
        return (
            f"long_prefill_token_threshold ({options.long_prefill_token_threshold}) cannot be "
            f"greater than the max_model_len ({options.max_model_len})."
        )
    return ""

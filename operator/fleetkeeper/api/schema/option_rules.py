"""The rules between engine options and other fields: what ends vLLM when it starts.

The CRD has them for the options of a service. `combination_errors` checks them again with the
options that the engine profile adds. `tests/engine/test_option_rules_in_vllm.py` tries each on vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fleetkeeper.api import types as t
from fleetkeeper.api.schema.error_messages import FieldError
from fleetkeeper.api.schema.rule import Rule

Options = Mapping[str, str]
_NUMBER = "[1-9][0-9]{0,8}"
_OF = "self.engine.options"


@dataclass(frozen=True)
class Combination:
    """A rule of engine options with other options or fields. `cel` reads `self`, the whole spec."""

    cel: str
    holds: Callable[[t.InferenceServiceSpec, Options], bool]
    message: str

    def rule(self) -> Rule[t.InferenceServiceSpec]:
        """Return the rule for the options of the service alone."""
        return Rule(
            "engine.options",
            self.cel,
            lambda spec: self.holds(spec, spec.engine.options),
            self.message,
        )


def _is(name: str, value: str) -> str:
    """Return CEL that an option has this value."""
    return f"('{name}' in {_OF} && {_OF}['{name}'] == '{value}')"


def _number(name: str, default: str) -> str:
    """Return CEL of an option's value, or of `default` if it is absent or no number."""
    return f"('{name}' in {_OF} && {_OF}['{name}'].matches('^{_NUMBER}$') ? int({_OF}['{name}']) : {default})"


def _value(options: Options, name: str, default: int) -> int:
    """Return what the CEL of `_number` returns."""
    text = options.get(name, "")
    return int(text) if re.fullmatch(_NUMBER, text, re.ASCII) else default


COMBINATIONS = (
    Combination(
        f"!{_is('enable-chunked-prefill', 'false')} || !has(self.engine.maxModelLength) || "
        "self.batching.maxTokens >= self.engine.maxModelLength",
        lambda spec, options: (
            options.get("enable-chunked-prefill") != "false"
            or spec.engine.max_model_length is None
            or spec.batching.max_tokens >= spec.engine.max_model_length
        ),
        "without enable-chunked-prefill, batching.maxTokens must be at least engine.maxModelLength; raise it or lower engine.maxModelLength",
    ),
    Combination(
        f"{_number('max-cpu-loras', '256')} >= {_number('max-loras', 'size(self.model.adapters)')}",
        lambda spec, options: (
            _value(options, "max-cpu-loras", 256)
            >= _value(options, "max-loras", len(spec.model.adapters))
        ),
        "max-cpu-loras must be at least max-loras, which is the number of model.adapters if it is not set; raise max-cpu-loras",
    ),
    Combination(
        f"self.engine.tensorParallelSize % {_number('decode-context-parallel-size', '1')} == 0",
        lambda spec, options: (
            spec.engine.tensor_parallel_size % _value(options, "decode-context-parallel-size", 1)
            == 0
        ),
        "decode-context-parallel-size must divide engine.tensorParallelSize; lower it or raise engine.tensorParallelSize",
    ),
    Combination(
        f"!('mamba-block-size' in {_OF}) || self.engine.prefixCaching || "
        f"(has(self.engine.maxModelLength) && self.engine.maxModelLength == {_number('mamba-block-size', '0')})",
        lambda spec, options: (
            "mamba-block-size" not in options
            or spec.engine.prefix_caching
            or spec.engine.max_model_length == _value(options, "mamba-block-size", 0)
        ),
        "mamba-block-size requires engine.prefixCaching; enable it or remove the option",
    ),
    Combination(
        f"!{_is('mamba-cache-mode', 'align')} || !{_is('disable-chunked-mm-input', 'true')}",
        lambda _, options: (
            options.get("mamba-cache-mode") != "align"
            or options.get("disable-chunked-mm-input") != "true"
        ),
        "mamba-cache-mode align does not work with disable-chunked-mm-input; remove one of them",
    ),
    Combination(
        f"!{_is('async-scheduling', 'true')} || !{_is('spec-method', 'ngram')}",
        lambda _, options: (
            options.get("async-scheduling") != "true" or options.get("spec-method") != "ngram"
        ),
        "async-scheduling does not work with the spec-method ngram; remove it or choose the spec-method mtp",
    ),
    Combination(
        f"size(self.model.adapters) == 0 || !('spec-tokens' in {_OF}) || "
        f"self.batching.maxTokens >= self.batching.maxSequences * ({_number('spec-tokens', '0')} + 1)",
        lambda spec, options: (
            not spec.model.adapters
            or "spec-tokens" not in options
            or spec.batching.max_tokens
            >= spec.batching.max_sequences * (_value(options, "spec-tokens", 0) + 1)
        ),
        "with model.adapters, batching.maxTokens must be at least batching.maxSequences x (spec-tokens + 1); raise it or lower the others",
    ),
)
"""The combinations that vLLM refuses for every model."""


def combination_errors(spec: t.InferenceServiceSpec, options: Options) -> list[FieldError]:
    """Return the combinations that an engine with these options refuses."""
    return [
        FieldError(
            "spec.engine.options",
            combination.message,
            tuple(f"spec.{p}" for p in combination.rule().reads),
        )
        for combination in COMBINATIONS
        if not combination.holds(spec, options)
    ]

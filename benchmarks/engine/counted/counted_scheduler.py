"""Schedulers of measured engines whose token count another process can read at any time.

One is vLLM's own, the other ours on top of it; `--scheduler-cls` names them. Both count in the same
way, so that both bear the cost of counting.
"""

# ruff: noqa: ANN401 - vLLM's own types pass through
from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

from fleetkeeper_engine.in_vllm.scheduler import chosen_class, mixed_into


def stock(*args: Any, **kwargs: Any) -> Any:
    """Return the scheduler that vLLM would have created."""
    return _counting(chosen_class(_config(args, kwargs)))(*args, **kwargs)


def ours(*args: Any, **kwargs: Any) -> Any:
    """Return the same scheduler with live limits."""
    return _counting(mixed_into(chosen_class(_config(args, kwargs))))(*args, **kwargs)


def _config(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]


def _counting(base: type[Any]) -> type[Any]:
    with Path(os.environ["FLEETKEEPER_BENCHMARK_TOKENS"]).open("r+b") as file:
        words = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")

    class Counting(base):  # type: ignore[misc] # the class vLLM chose
        def update_from_output(self, step: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
            words[0] += sum(map(len, output.sampled_token_ids or ()))
            return super().update_from_output(step, output, *args, **kwargs)

    return Counting

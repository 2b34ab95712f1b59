"""Sampling on CPU that leaves the generators of seeded requests alone until their prompts are computed.

vLLM samples a token for each sequence of a step, also for those whose prompt is not yet complete,
and discards it. It then sets the generator of a request with a seed back by an offset. CPU
generators have no offset, so this raises, and the error ends the engine. Here such a step samples
without these generators. What is discarded comes from the common generator, vLLM finds nothing to
set back, and the answer does not depend on the number of steps.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any, Final

logger = logging.getLogger("vllm.fleetkeeper")

_NEEDED: Final = {
    "sample_tokens": ("_sample", "_bookkeeping_sync"),
    "_bookkeeping_sync": ("discard_request_mask", "generators", "set_offset"),
}
"""Methods of vLLM's model runner, and the names in their code that the change relies on."""


def keep_generators(worker: Any) -> None:  # noqa: ANN401 - a vLLM worker
    """Let a CPU worker sample discarded tokens without the generators of their requests.

    A model runner that differs from what this relies on is left as it is, and a log line says so.
    """
    worker = getattr(worker, "worker", None) or worker
    device = getattr(worker, "device", None)
    if device is None or device.type != "cpu":
        return
    runner: Any = getattr(worker, "model_runner", None)
    difference = find_difference(runner)
    if difference:
        logger.warning("requests with a seed are left to vLLM as it is: %s", difference)
        return
    sample_tokens = runner.sample_tokens

    @functools.wraps(sample_tokens)
    def sample(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as vLLM's
        generators, discarded = runner.input_batch.generators, runner.discard_request_mask.np
        kept = {row: generators.pop(row) for row in tuple(generators) if discarded[row]}
        try:
            return sample_tokens(*args, **kwargs)
        finally:
            generators.update(kept)

    runner.sample_tokens = sample


def find_difference(runner: Any) -> str:  # noqa: ANN401 - a vLLM model runner
    """Return how a model runner differs from what the change relies on; empty if it does not."""
    for method, names in _NEEDED.items():
        found = getattr(runner, method, None)
        if found is None:
            return f"{type(runner).__name__} has no method {method}"
        code = getattr(inspect.unwrap(found), "__code__", None)
        absent = [name for name in names if name not in getattr(code, "co_names", ())]
        if absent:
            return f"{type(runner).__name__}.{method} does not use {', '.join(absent)}"
    batch = getattr(runner, "input_batch", None)
    generators = getattr(batch, "generators", None)
    metadata = getattr(batch, "sampling_metadata", None)
    if not isinstance(generators, dict) or getattr(metadata, "generators", None) is not generators:
        return "the sampler does not get the generators of the batch"
    if not hasattr(getattr(runner, "discard_request_mask", None), "np"):
        return "discard_request_mask is no buffer of numpy"
    return ""

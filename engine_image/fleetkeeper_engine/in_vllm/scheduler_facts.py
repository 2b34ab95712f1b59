"""Facts of a vLLM scheduler, whose attributes are not public: an absent one gives a neutral value."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fleetkeeper_engine.limits import PREFILL_QUANTUM_TOKENS


@lru_cache(maxsize=64)
def is_blocked(status: Any) -> bool:  # noqa: ANN401 - vLLM's RequestStatus
    """Return whether a request with this status waits for something other than a step.

    vLLM names such statuses WAITING_FOR_...: a structured output's grammar, KV from another node,
    the next input of a stream. Names are compared because the set differs between releases.
    """
    return str(getattr(status, "name", "")).startswith("WAITING_FOR_")


def waiting_requests(scheduler: Any) -> list[Any]:  # noqa: ANN401 - a vLLM scheduler
    """Return the requests that wait, in no order.

    Since vLLM 0.32 those that hold KV cache have a queue of their own. Iterating over a queue sorts
    it, while its heap is free.
    """
    queues = (getattr(scheduler, name, ()) for name in ("waiting", "kv_holding_waiting"))
    return [request for queue in queues for request in getattr(queue, "_heap", queue)]


def tokens_sent(outputs: Mapping[int, Any]) -> int:
    """Return the tokens in a step's outputs, which vLLM has by the number of their API server.

    The workers return more: with asynchronous scheduling a step is under way when a request ends,
    and vLLM drops what that step generated for it.
    """
    return sum(len(output.new_token_ids) for part in outputs.values() for output in part.outputs)


def whole(value: object) -> int:
    """Return an attribute's value if it is a whole number, else 0."""
    return value if isinstance(value, int) else 0


def quantum_of(scheduler: Any) -> int:  # noqa: ANN401 - a vLLM scheduler
    """Return the spare tokens a step needs for any prefill to continue.

    A hybrid model's prefill advances in whole blocks, and indivisible media in whole items. With
    less than one of them to spare, such a request would never progress.
    """
    quantum = PREFILL_QUANTUM_TOKENS
    if getattr(scheduler, "need_mamba_block_aligned_split", False):
        quantum = max(quantum, whole(getattr(scheduler.cache_config, "block_size", 0)))
    if getattr(scheduler.scheduler_config, "disable_chunked_mm_input", False):
        quantum = max(quantum, whole(getattr(scheduler, "max_num_encoder_input_tokens", 0)))
    return quantum


def kv_capacity_tokens(scheduler: Any) -> int:  # noqa: ANN401 - a vLLM scheduler
    """Return the tokens that the KV cache can hold; 0 if they are not known."""
    known = whole(getattr(scheduler.cache_config, "kv_cache_size_tokens", None))
    blocks = whole(getattr(scheduler.cache_config, "num_gpu_blocks", None))
    return known or blocks * whole(getattr(scheduler, "block_size", 0))

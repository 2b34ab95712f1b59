"""A model runner that makes tokens up: vLLM's executor without workers."""

from __future__ import annotations

import zlib
from concurrent.futures import Future
from typing import Any

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

BLOCK_TOKENS = 16
STOP = 3
"""The token at which requests of these tests stop."""
_PAGE_BYTES = 2 * BLOCK_TOKENS * 8 * 4


def made_up_token(name: str, place: int) -> int:
    """The token at a place of a request's answer; never STOP."""
    return 10 + zlib.crc32(f"{name} {place}".encode()) % 900


class MadeUpModel(Executor):  # type: ignore[misc] # vLLM is not there where types are checked
    """Answers of a GPU worker with model runner V1 or V2. Requests named `...-stop-N` stop at N tokens."""

    blocks = 0
    """Set before vLLM makes an instance."""

    def _init_executor(self) -> None:
        self.prompts: dict[str, int] = {}
        self.prefills: dict[str, int] = {}
        self.steps: list[Any] = []
        self.unsampled: Any = None

    def collective_rpc(self, method: str, *_: Any, **__: Any) -> list[Any]:
        """What vLLM asks of the workers at its start."""
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        answers: dict[str, list[Any]] = {
            "get_kv_cache_spec": [{"layer": spec}],
            "get_supported_kv_cache_layouts": [["LBNHC"]],
            "determine_available_memory": [self.blocks * _PAGE_BYTES],
        }
        return answers.get(method, [])

    def check_health(self) -> None:
        """It has no workers that could fail."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """As those of GPUs."""
        return True

    def execute_model(self, step: Any, non_block: bool = False) -> Any:
        """Take a step. Its tokens are asked for later, as from a GPU."""
        assert non_block
        assert self.unsampled is None, "vLLM sampled every step before it sent the next"
        self.steps.append(step)
        for new in step.scheduled_new_reqs:
            self.prompts[new.req_id] = len(new.prompt_token_ids)
            self.prefills[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids)
        cached = step.scheduled_cached_reqs
        for name in cached.resumed_req_ids:
            self.prefills[name] = len(cached.all_token_ids[name])
        if not step.total_num_scheduled_tokens:
            return _done(EMPTY_MODEL_RUNNER_OUTPUT)
        self.unsampled = step
        return _done(None)

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        """The tokens of the step that was sent last."""
        assert non_block
        step, self.unsampled = self.unsampled, None
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        allowed = _allowed(grammar)
        names = list(step.num_scheduled_tokens)
        tokens: list[list[int]] = []
        for name, scheduled in step.num_scheduled_tokens.items():
            known = computed[name] + scheduled
            place = known - self.prompts[name]
            if known < self.prefills[name]:
                tokens.append([])
            elif name in allowed:
                tokens.append([allowed[name]])
            else:
                stops = "-stop-" in name and place == int(name.rpartition("-")[2])
                tokens.append([STOP if stops else made_up_token(name, place)])
        indices = {name: index for index, name in enumerate(names)}
        return _done(ModelRunnerOutput(names, indices, tokens))


def _allowed(grammar: Any) -> dict[str, int]:
    """The lowest token that its grammar allows each request."""
    if grammar is None:
        return {}
    found = {}
    for name, row in zip(
        grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True
    ):
        bits = ((word * 32 + bit) for word, bits in enumerate(row.tolist()) for bit in _set(bits))
        found[name] = next(bits)
    return found


def _set(word: int) -> list[int]:
    return [bit for bit in range(32) if word >> bit & 1]


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future

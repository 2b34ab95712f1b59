"""The configuration of a simulated engine's scheduler, with the names of vLLM's `VllmConfig`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleetkeeper_steps.costs import StepCosts
from fleetkeeper_steps.running import BLOCK_TOKENS


@dataclass(slots=True)
class SchedulerConfig:
    """Batch limits at start. Tokens are those of one step."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    long_prefill_token_threshold: int = 0
    """Prefill tokens of one sequence in a step while there are others; 0: no bound."""
    enable_chunked_prefill: bool = True
    disable_chunked_mm_input: bool = False
    async_scheduling: bool = False
    scheduler_cls: Any = None
    """A class, or a callable like one."""

    def get_scheduler_cls(self) -> Any:  # noqa: ANN401 - as scheduler_cls
        """Return what makes the scheduler: the configured one, else the class that vLLM chooses."""
        if self.scheduler_cls is not None:
            return self.scheduler_cls
        from fleetkeeper_engine.simulated.scheduler import (  # noqa: PLC0415 - it imports this module
            SimulatedScheduler,
        )

        return SimulatedScheduler


@dataclass(slots=True)
class CacheConfig:
    """The KV cache: `num_gpu_blocks` of `block_size` tokens."""

    num_gpu_blocks: int
    block_size: int = BLOCK_TOKENS
    enable_prefix_caching: bool = True

    @property
    def kv_cache_size_tokens(self) -> int:
        """The tokens that the KV cache holds."""
        return self.num_gpu_blocks * self.block_size


@dataclass(slots=True)
class SimulatedConfig:
    """An engine: its limits, its KV cache, and the time of its steps. `speed` divides that time."""

    scheduler_config: SchedulerConfig
    cache_config: CacheConfig
    costs: StepCosts
    speed: float = 1.0

"""The loop of a simulated engine, in the place of vLLM's EngineCore: steps that end at planned times."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fleetkeeper_engine.simulated.config import SimulatedConfig


@dataclass(frozen=True, slots=True)
class Work:
    """A request for the engine.

    `prompt`: token IDs, or only their count (such a prompt finds nothing in the prefix cache).
    `max_tokens`: 0 for a pooling request, which ends with its prefill. `ends_after`: tokens after which it
    stops by itself. `priority`: lower is first. `arrival_s`: of the core's clock; None: now.
    """

    request_id: str
    prompt: Sequence[int] | int
    max_tokens: int
    ends_after: int | None = None
    priority: int = 0
    arrival_s: float | None = None
    lora_name: str | None = None


class Prefill(NamedTuple):
    """The prompt of a request, known when its prefill ends."""

    num_prompt_tokens: int
    num_cached_tokens: int


class SequenceOutput(NamedTuple):
    """What a step gave a request.

    `finished_reason`: "stop", "length" or "abort" (without a token) in its last output, else None.
    `prefill`: in the output with its first token only.
    """

    request_id: str
    new_token_count: int
    finished_reason: str | None = None
    prefill: Prefill | None = None


class Lateness:
    """How late steps ended: a histogram since the start, in seconds."""

    EDGES_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.EDGES_S) + 1)
        """Steps by the first edge that is not below their lateness; the last is later than all."""
        self.count = 0
        self.sum_s = 0.0

    def record(self, late_s: float) -> None:
        """Count the end of a step."""
        raise NotImplementedError

    def quantile_s(self, ratio: float) -> float:
        """Return the edge that bounds this share of the steps; inf above the last, 0 without a step."""
        raise NotImplementedError


class SimulatedCore:
    """The scheduler, and the loop that runs its steps.

    `on_step` gets the outputs of every step, in the loop's thread, and must not block. The prompt's tokens
    and the KV cache's capacity bound a request; `add` refuses what can never fit.
    """

    def __init__(
        self,
        config: SimulatedConfig,
        on_step: Callable[[list[SequenceOutput]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] | None = None,
    ) -> None:
        self.scheduler: Any = None
        """Made by `config.scheduler_config.scheduler_cls` (a callable like a class), else vLLM's rule."""
        self.lateness = Lateness()
        raise NotImplementedError

    def add(self, work: Work) -> None:
        """Queue a request for the next step.

        Raises:
            ValueError: if it can never fit into the KV cache, or if its ID is in use.
        """
        raise NotImplementedError

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests before the next step; IDs of ended ones are ignored.

        `on_step` then gets an output "abort" for each.
        """
        raise NotImplementedError

    def freeze(self) -> None:
        """Never end a step again, as an engine whose accelerator hangs."""
        raise NotImplementedError

    async def run(self) -> None:
        """Run steps until cancelled. Without requests, wait for one."""
        raise NotImplementedError

"""The loop of a simulated engine, in the place of vLLM's EngineCore: steps that end at planned times.

A step's planned end is its planned start plus its time. A process that wakes late ends the step late, and
starts the next one at the planned time: it catches up, and no lateness adds up. A request that came after
a planned start waits for the next one, so that what runs does not depend on how late the process is.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final, NamedTuple

from fleetkeeper_engine.simulated.config import SimulatedConfig

BLOCKED_POLL_S: Final = 0.01
"""While no request may run: limits change in shared memory, without a signal. vLLM polls each millisecond."""


@dataclass(frozen=True, slots=True)
class Work:
    """A request for the engine."""

    request_id: str
    prompt: Sequence[int] | int
    """Token IDs, or only their count (such a prompt finds nothing in the prefix cache)."""
    max_tokens: int
    """Maximum tokens; 0 for a pooling request, which ends with its prefill."""
    ends_after: int | None = None
    """Number of tokens after which it stops by itself."""
    priority: int = 0
    """Lower is first."""
    arrival_s: float | None = None
    """Time by the core's clock; None: now."""
    lora_name: str | None = None

    @property
    def tokens_to_generate(self) -> int:
        """The tokens after which it ends."""
        return self.max_tokens if self.ends_after is None else min(self.max_tokens, self.ends_after)


class Prefill(NamedTuple):
    """The prompt of a request, known when its prefill ends."""

    num_prompt_tokens: int
    num_cached_tokens: int


class SequenceOutput(NamedTuple):
    """The output of a step for a request."""

    request_id: str
    new_token_count: int
    finished_reason: str | None = None
    """"stop", "length" or "abort" (without a token) in its last output, else None."""
    prefill: Prefill | None = None
    """Set only in the output with its first token."""

    @property
    def new_token_ids(self) -> range:
        """Return as many tokens, under vLLM's name."""
        return range(self.new_token_count)


class StepOutputs(NamedTuple):
    """The outputs of a step for all requests of an API server."""

    outputs: list[SequenceOutput]


class Lateness:
    """Delays of the ends of steps: a histogram since the start, in seconds."""

    EDGES_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.EDGES_S) + 1)
        """Steps by the first edge that is not below their lateness; the last is later than all."""
        self.count = 0
        self.sum_s = 0.0

    def record(self, late_s: float) -> None:
        """Count the end of a step."""
        self.counts[bisect_left(self.EDGES_S, late_s)] += 1
        self.count += 1
        self.sum_s += late_s

    def quantile_s(self, ratio: float) -> float:
        """Return the edge that bounds this share of the steps; inf above the last, 0 without a step."""
        if not self.count:
            return 0.0
        place = bisect_left(list(accumulate(self.counts)), ratio * self.count)
        return (*self.EDGES_S, math.inf)[place]


class SimulatedCore:
    """The scheduler, and the loop that runs its steps.

    `on_step` gets the outputs of every step that has some, in the loop's thread, and must not block. `scheduler` is made
    by vLLM's rule: `scheduler_cls` of the configuration, a callable like a class, else vLLM's choice.
    """

    def __init__(
        self,
        config: SimulatedConfig,
        on_step: Callable[[list[SequenceOutput]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.scheduler: Any = config.scheduler_config.get_scheduler_cls()(vllm_config=config)
        self.lateness = Lateness()
        self._capacity_tokens = config.cache_config.kv_cache_size_tokens
        self._on_step = on_step
        self._clock = clock
        self._sleep = sleep
        self._arrived: deque[tuple[float, Work]] = deque()
        self._aborted: list[str] = []
        self._known: set[str] = set()
        self._wake = asyncio.Event()
        self._is_frozen = False

    def add(self, work: Work) -> None:
        """Queue a request for the next step.

        Raises:
            ValueError: if it can never fit into the KV cache, or if its ID is in use.
        """
        prompt = work.prompt if isinstance(work.prompt, int) else len(work.prompt)
        tokens = prompt + work.tokens_to_generate
        if prompt < 1 or tokens > self._capacity_tokens:
            raise ValueError(
                f"Request {work.request_id} has {prompt} prompt tokens and {tokens} in all. It needs at "
                f"least one, and the KV cache holds {self._capacity_tokens}."
            )
        if work.request_id in self._known:
            raise ValueError(f"Request ID {work.request_id} is in use.")
        now = self._clock()
        if work.arrival_s is None:
            work = replace(work, arrival_s=now)
        self._known.add(work.request_id)
        self._arrived.append((now, work))
        self._wake.set()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests before the next step; IDs of ended ones are ignored.

        `on_step` then gets an output "abort" for each.
        """
        self._aborted += request_ids
        self._wake.set()

    def freeze(self) -> None:
        """Never end a step again, as an engine whose accelerator hangs."""
        self._is_frozen = True

    async def run(self) -> None:
        """Run steps until cancelled. Without requests, wait for one."""
        start = self._clock()
        while True:
            while not (self._arrived or self._aborted or self.scheduler.has_requests()):
                self._wake.clear()
                await self._wake.wait()
            if self._arrived and not self.scheduler.has_unfinished_requests():
                start = max(start, self._arrived[0][0])
            self._take(start)
            if self.scheduler.has_requests():
                start = await self._run_step(start)

    def _take(self, start: float) -> None:
        """Give the scheduler what came until `start`."""
        while self._arrived and self._arrived[0][0] <= start:
            self.scheduler.add_request(self._arrived.popleft()[1])
        if not self._aborted:
            return
        ids, self._aborted = self._aborted, []
        aborted = [
            request.request_id
            for request in self.scheduler.finish_requests(ids, "FINISHED_ABORTED")
        ]
        early = {work.request_id for _, work in self._arrived}.intersection(ids)
        if early:
            self._arrived = deque(row for row in self._arrived if row[1].request_id not in early)
        self._give([SequenceOutput(name, 0, "abort") for name in (*aborted, *sorted(early))])

    async def _run_step(self, start: float) -> float:
        """Run one step, and return its planned end."""
        scheduler = self.scheduler
        step = scheduler.schedule()
        scheduler.get_grammar_bitmask(step)
        end: float = start + step.seconds
        if step.total_num_scheduled_tokens:
            await self._sleep(max(0.0, end - self._clock()))
            if self._is_frozen:
                await asyncio.Event().wait()
            self.lateness.record(max(0.0, self._clock() - end))
        elif scheduler.has_unfinished_requests():
            end += BLOCKED_POLL_S
            await self._sleep(max(0.0, end - self._clock()))
        for part in scheduler.update_from_output(step, None).values():
            self._give(part.outputs)
        return end

    def _give(self, outputs: list[SequenceOutput]) -> None:
        if not outputs:
            return
        self._known.difference_update(
            [output.request_id for output in outputs if output.finished_reason]
        )
        self._on_step(outputs)

"""The running sequences of an engine, step by step: the order of vLLM V1's scheduler and its KV blocks.

The tokens of a step are given first to the decoding sequences, then to prefills in the order of their
start, then to requests that start while tokens and KV blocks are left. Steps with prefill are computed
one by one. Between two starts and ends, decode-only steps differ in nothing but the growing KV cache, so
their times form an arithmetic series, and any number of them costs one evaluation. Blocks and ends are
exact either way; `tests/support/autoscale/naive_engine.py` computes the same one step at a time.

A step is planned, which preempts if it must, and later ended. Between the two nothing starts or leaves.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from fleetkeeper_steps.costs import StepCosts

BLOCK_TOKENS: Final = 16
"""Tokens of a KV block, vLLM's default."""


class Request(Protocol):
    """A request of the caller. A preempted one computes its prompt and what it generated again."""

    to_prefill: int
    to_generate: int


R = TypeVar("R", bound=Request)


@dataclass(slots=True, eq=False)
class RunningSequence(Generic[R]):
    """A request inside the engine."""

    request: R
    left: int
    """Prompt tokens to compute."""
    computed: int
    """Tokens in the KV cache when it began to decode, or so far."""
    blocks: int
    """KV blocks at that time."""
    serial: int
    entered: int = 0
    """The clock at that time."""
    ends: int = 0
    """The clock at its last token."""
    chunk: int = 0
    """Prompt tokens in the last step that had any."""


class PrefillStep(NamedTuple):
    """A step with prefill: its time, prefill tokens, sequences, and KV tokens before it."""

    seconds: float
    tokens: int
    sequences: int
    kv_tokens: int


class DecodeSteps(NamedTuple):
    """Decode-only steps; step i takes `first + i growth` seconds and has `kv + i sequences` KV tokens."""

    steps: int
    first_s: float
    growth_s: float
    sequences: int
    kv_tokens: int

    @property
    def seconds(self) -> float:
        """The time of all of them."""
        return self.steps * self.first_s + self.growth_s * (self.steps * (self.steps - 1) // 2)


@dataclass(slots=True)
class RunningSequences(Generic[R]):
    """The sequences that prefill or decode, and the KV blocks that they hold."""

    costs: StepCosts
    blocks: int
    max_chunk: int = 0
    """Maximum prompt tokens of one sequence in a step; 0: no bound."""
    rank: Callable[[R], Any] | None = None
    """Returns the rank of a request. The highest rank is preempted first; None: the last that
    started."""
    blocks_used: int = 0
    kv_tokens: int = 0
    prefilling: list[RunningSequence[R]] = field(default_factory=list)
    decoding: dict[int, RunningSequence[R]] = field(default_factory=dict)
    preempted: list[R] = field(default_factory=list)
    """Requests that were preempted since the caller emptied the list."""
    _has_preempted: bool = False
    _clock: int = 0
    _serial: int = 0
    _ends: list[tuple[int, int]] = field(default_factory=list)
    _phases: list[int] = field(default_factory=lambda: [0] * BLOCK_TOKENS)

    def __len__(self) -> int:
        """Return how many sequences run."""
        return len(self.prefilling) + len(self.decoding)

    # -- starts and ends ----------------------------------------------------------------------------

    def tokens_left(self, step_tokens: int) -> int:
        """Return the tokens of the next step that are left to requests that start.

        As in vLLM, a step that preempts starts none.
        """
        if self._has_preempted:
            return 0
        wanted = [row.left for row in self.prefilling]
        if self.max_chunk:
            wanted = [min(left, self.max_chunk) for left in wanted]
        return step_tokens - len(self.decoding) - sum(wanted)

    def free_blocks(self) -> int:
        """Return the blocks that the decoding sequences leave free in the next step."""
        return self.blocks - self.blocks_used - self._new_blocks(1)

    def start(self, request: R, cached_tokens: int = 0) -> RunningSequence[R]:
        """Start a request, whose first tokens the prefix cache may hold. The caller checks the room."""
        self._serial += 1
        blocks = blocks_of(request.to_prefill)
        left = request.to_prefill - cached_tokens
        row = RunningSequence(request, left, cached_tokens, blocks, self._serial)
        self.prefilling.append(row)
        self.blocks_used += blocks
        self.kv_tokens += cached_tokens
        return row

    def remove(self, row: RunningSequence[R]) -> None:
        """Free what a sequence holds. Its request can start again, and then computes its tokens again."""
        if self.decoding.pop(row.serial, None) is None:
            self.prefilling.remove(row)
            self._release(row.blocks, row.computed)
        else:
            row.request.to_generate -= self._clock - row.entered
            row.request.to_prefill = self._leave(row) + 1
        self._drop_old_ends()

    # -- steps --------------------------------------------------------------------------------------

    def plan_prefill(
        self, step_tokens: int, began: int, slowness: float = 1.0
    ) -> PrefillStep | None:
        """Plan one step with prefill; None if every prefill was preempted. `began`: new in the step."""
        self._make_room(1)
        if not self.prefilling:
            return None
        decoding, max_chunk = len(self.decoding), self.max_chunk
        budget = step_tokens - decoding
        total, pairs, sequences = 0, 0.0, decoding
        for row in self.prefilling:
            chunk = min(row.left, budget - total)
            if chunk <= 0 and row.left > 0:
                break
            if 0 < max_chunk < chunk:
                chunk = max_chunk
            pairs += chunk * (row.computed + chunk / 2)
            total += chunk
            sequences += 1
            row.chunk = chunk
            row.left -= chunk
            row.computed += chunk
        seconds = slowness * self.costs.step_s(total, decoding, self.kv_tokens, pairs, began)
        return PrefillStep(seconds, total, sequences, self.kv_tokens)

    def plan_decodes(self, room_s: float, slowness: float = 1.0) -> DecodeSteps | None:
        """Plan the steps that begin within `room_s`, until a sequence ends or KV blocks run out.

        None if a sequence was preempted: then others may start first.
        """
        sequences = len(self.decoding)
        first_s = slowness * self.costs.step_s(0, sequences, self.kv_tokens)
        growth_s = slowness * self.costs.c_s * sequences
        steps = min(self._ends[0][0] - self._clock, steps_until(first_s, growth_s, room_s))
        steps = self._make_room(1 if self._has_preempted else steps)
        if len(self.decoding) != sequences:
            return None
        return DecodeSteps(steps, first_s, growth_s, sequences, self.kv_tokens)

    def end_prefill(self, step: PrefillStep) -> tuple[list[R], list[R]]:
        """End a step with prefill; return the requests with their first token, and those that ended."""
        self.kv_tokens += step.tokens
        ended = self._decoded(1)
        return self._end_prefills(ended), ended

    def end_decodes(self, steps: DecodeSteps) -> list[R]:
        """End decode-only steps; return the requests that ended."""
        return self._decoded(steps.steps)

    def _decoded(self, steps: int) -> list[R]:
        """Give every decoding sequence `steps` tokens, and end those that have all."""
        self._has_preempted = False
        ended: list[R] = []
        count = len(self.decoding)
        if not count:
            return ended
        self.blocks_used += self._new_blocks(steps)
        self.kv_tokens += steps * count
        self._clock += steps
        while self._ends and self._ends[0][0] <= self._clock:
            row = self.decoding.pop(heapq.heappop(self._ends)[1], None)
            if row is not None:
                self._leave(row)
                ended.append(row.request)
        self._drop_old_ends()
        return ended

    def _end_prefills(self, ended: list[R]) -> list[R]:
        """Turn finished prefills into decoding sequences; the step gave each a token."""
        finished, unfinished = [], []
        for row in self.prefilling:
            if row.left > 0:
                unfinished.append(row)
                continue
            request = row.request
            finished.append(request)
            request.to_generate -= 1
            if request.to_generate <= 0:
                self._release(row.blocks, row.computed)
                ended.append(request)
                continue
            row.entered, row.ends = self._clock, self._clock + request.to_generate
            self.decoding[row.serial] = row
            heapq.heappush(self._ends, (row.ends, row.serial))
            self._phases[(row.computed - self._clock) % BLOCK_TOKENS] += 1
        self.prefilling = unfinished
        return finished

    def _leave(self, row: RunningSequence[R]) -> int:
        """Free what a decoding sequence holds; return the tokens that it has in the KV cache."""
        tokens = row.computed + self._clock - row.entered
        self._phases[(row.computed - row.entered) % BLOCK_TOKENS] -= 1
        self._release(blocks_of(tokens), tokens)
        return tokens

    def _release(self, blocks: int, tokens: int) -> None:
        self.blocks_used -= blocks
        self.kv_tokens -= tokens

    def _drop_old_ends(self) -> None:
        while self._ends and self._ends[0][1] not in self.decoding:
            heapq.heappop(self._ends)

    # -- KV blocks ----------------------------------------------------------------------------------

    def _new_blocks(self, steps: int) -> int:
        """Return the blocks that the decoding sequences fill in the next steps: one each 16 tokens."""
        cycles, rest = divmod(steps, BLOCK_TOKENS)
        phases, clock = self._phases, self._clock
        blocks = cycles * len(self.decoding)
        for step in range(rest):
            blocks += phases[-(clock + step) % BLOCK_TOKENS]
        return blocks

    def _make_room(self, steps: int) -> int:
        """Return how many of these steps the free blocks allow; preempt while they do not allow one."""
        while True:
            free = self.blocks - self.blocks_used
            if self._new_blocks(steps) <= free:
                return steps
            if self._new_blocks(1) <= free:
                low, high = 1, steps
                while high - low > 1:
                    middle = (low + high) // 2
                    low, high = (
                        (middle, high) if self._new_blocks(middle) <= free else (low, middle)
                    )
                return low
            self._preempt()

    def _preempt(self) -> None:
        """Preempt a sequence, as vLLM does: free its blocks, and compute it again later."""
        self._has_preempted = True
        rank = self.rank
        if rank is not None:
            rows = (*self.decoding.values(), *self.prefilling)
            row = max(rows, key=lambda row: rank(row.request))
        elif self.prefilling:
            row = self.prefilling[-1]
        else:
            row = next(reversed(self.decoding.values()))
        self.remove(row)
        self.preempted.append(row.request)


def blocks_of(tokens: int) -> int:
    """Return the blocks that hold this many tokens."""
    return -(-tokens // BLOCK_TOKENS)


def steps_until(first_s: float, growth_s: float, room_s: float) -> int:
    """Return how many steps begin within `room_s`: the least n with n first + growth n (n-1) / 2 >= room.

    Example: steps of 10 ms that do not grow, and 25 ms: 3 steps, of which the last ends after it.
    """
    if room_s <= 0.0:
        return 1
    # The usual form, (sqrt(...) - half) / growth, cancels where steps hardly grow.
    half = first_s - growth_s / 2
    exact = 2 * room_s / (half + math.sqrt(half * half + 2 * growth_s * room_s))
    return max(1, math.ceil(exact - 1e-9))

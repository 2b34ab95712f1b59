"""One simulated vLLM engine: admission by tier, and its metrics, around the steps of `fleetkeeper_steps`."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from fleetkeeper.autoscale.signals.samples import Counters, Gauges, PodSample, Source
from fleetkeeper.simulate.counts import Counts
from fleetkeeper.simulate.requests import Request
from fleetkeeper_steps.costs import StepCosts
from fleetkeeper_steps.running import BLOCK_TOKENS, RunningSequences, blocks_of

PREFILL_QUANTUM_TOKENS: Final = 256
"""Tokens of a step beyond one per running sequence that the engine keeps for prefills."""
RESERVE_KEPT_S: Final = 10.0
"""The engine keeps sequences for realtime this long after the last realtime request."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The common parameters of the engines of a service."""

    costs: StepCosts
    kv_capacity_tokens: float = 400_000.0
    max_sequences: int = 256
    max_tokens: int = 8192
    queue_wait_objective_s: float = 0.5
    batch_time_objective_s: float = 0.05
    step_noise: float = 0.08
    """Spread of single steps around the model (sigma of a lognormal distribution), for attainment."""
    queue_limits: tuple[int, int, int] | None = (64, 256, 1024)
    """Maximum waiting requests by tier (None: unbounded, as in stock vLLM)."""
    batch_share_ratio: float = 0.3
    batch_ageing_s: float = 60.0
    prefix_hit_ratio: float = 0.0
    """Share of a prompt that the prefix cache holds."""

    @property
    def blocks(self) -> int:
        """The KV blocks of an engine."""
        return int(self.kv_capacity_tokens) // BLOCK_TOKENS


H100_8B: Final = EngineSpec(StepCosts(0.0026, 0.0041, 2.0e-5, 5.3e-6, 4.1e-8))
"""Llama-3.1-8B on one H100, rounded, for tests."""
H100_70B: Final = EngineSpec(
    StepCosts(0.0068, 0.0099, 6.2e-5, 7.9e-6, 2.86e-8), kv_capacity_tokens=420_000.0
)
"""Llama-3.1-70B on four H100, rounded, for tests."""


@dataclass(slots=True)
class Engine:
    """An engine. `arrive` queues a request, `advance` runs steps, `sample` returns a scrape.

    The fields `limit_*`, `admit` and `batch_share` are the current limits.
    """

    spec: EngineSpec
    name: str
    started: float
    time: float = 0.0
    """End of the last step."""
    limit_sequences: int = 0
    limit_tokens: int = 0
    generation: float = 0.0
    admit: tuple[float, float, float] = (1.0, 1.0, 1.0)
    batch_share: float = 0.0
    queues: tuple[deque[Request], deque[Request], deque[Request]] = field(
        default_factory=lambda: (deque(), deque(), deque())
    )
    waiting: int = 0
    counts: Counts = field(init=False)
    slowness: float = 1.0
    """Factor on the time of every step, as on an overcommitted node."""
    hangs: bool = False
    ended: list[Request] = field(default_factory=list)
    """Requests that ended since they were last taken."""
    _sequences: RunningSequences[Request] = field(init=False)
    _running_by_tier: list[int] = field(default_factory=lambda: [0, 0, 0])
    _realtime_seen: float = -math.inf

    def __post_init__(self) -> None:
        """Start with the start-up limits."""
        spec = self.spec
        self._sequences = RunningSequences(spec.costs, spec.blocks)
        self.time = self.time or self.started
        self.limit_sequences = self.limit_sequences or spec.max_sequences
        self.limit_tokens = self.limit_tokens or spec.max_tokens
        self.batch_share = self.batch_share or spec.batch_share_ratio
        self.counts = Counts(
            spec.queue_wait_objective_s, spec.batch_time_objective_s, spec.step_noise
        )

    @property
    def running(self) -> int:
        """The sequences that prefill or decode."""
        return len(self._sequences)

    @property
    def blocks_used(self) -> int:
        """The KV blocks that sequences hold."""
        return self._sequences.blocks_used

    @property
    def kv_tokens(self) -> int:
        """The tokens in the KV cache."""
        return self._sequences.kv_tokens

    @property
    def load(self) -> int:
        """The requests in the engine, running or waiting."""
        return self.running + self.waiting

    @property
    def is_idle(self) -> bool:
        """Return whether the engine has no request."""
        return not (self.waiting or self._sequences)

    # -- requests -----------------------------------------------------------------------------------

    def is_full(self, tier: int) -> bool:
        """Return whether the queue of a tier is full."""
        limits = self.spec.queue_limits
        return limits is not None and len(self.queues[tier]) >= limits[tier]

    def arrive(self, request: Request, draw: float = 0.0) -> bool:
        """Count an arrival and queue it; return False if it is refused.

        Call `advance` to its arrival first. `draw`: a random number in [0, 1), compared with the tier's
        admitted share. A request that cannot fit into the KV cache is refused, as vLLM does.
        """
        tier = request.tier
        self.counts.arrived(tier, request.arrived)
        if tier == 0:
            self._realtime_seen = request.arrived
        tokens = request.prompt + request.generated
        if (
            self.is_full(tier)
            or draw >= self.admit[tier]
            or tokens > self.spec.blocks * BLOCK_TOKENS
        ):
            return False
        if self.is_idle and self.time < request.arrived:
            self.time = request.arrived
        self.queues[tier].append(request)
        self.waiting += 1
        return True

    def take_ended(self) -> list[Request]:
        """Return the requests that ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def abort_all(self) -> list[Request]:
        """Remove every request and return them: the engine's process ended."""
        lost = [request for queue in self.queues for request in queue]
        lost += [
            row.request for row in (*self._sequences.prefilling, *self._sequences.decoding.values())
        ]
        for queue in self.queues:
            queue.clear()
        return lost

    # -- steps --------------------------------------------------------------------------------------

    def advance(self, until: float) -> None:
        """Run the steps that begin before `until`. The last one may end later."""
        if self.hangs:
            return
        sequences = self._sequences
        while self.time < until and not self.is_idle:
            running = len(sequences.prefilling) + len(sequences.decoding)
            step_tokens = self._budget(running)
            began = self._admit(step_tokens, running) if self.waiting else 0
            if sequences.prefilling:
                self._prefill_step(step_tokens, began)
            elif sequences.decoding:
                self._decode_steps(until)
            else:
                raise AssertionError(
                    f"{self.name}: {self.waiting} requests wait and none can start"
                )
            if sequences.preempted:
                self._requeue_preempted()

    def _admit(self, step_tokens: int, running: int) -> int:
        """Start waiting requests while sequences, tokens and KV blocks are left; return how many."""
        began = 0
        budget = self._sequences.tokens_left(step_tokens)
        free = self._sequences.free_blocks()
        while self.waiting and running < self.limit_sequences and budget > 0:
            tier = self._next_tier(running)
            if tier is None:
                break
            request = self.queues[tier][0]
            blocks = blocks_of(request.to_prefill)
            if blocks > free:
                break
            self.queues[tier].popleft()
            self.waiting -= 1
            free -= blocks
            running += 1
            began += 1
            budget -= self._start(request)
        return began

    def _budget(self, running: int) -> int:
        wanted = max(self.limit_tokens, running + PREFILL_QUANTUM_TOKENS)
        return min(self.spec.max_tokens, wanted)

    def _start(self, request: Request) -> int:
        """Start a request; return the prompt tokens that it has to compute."""
        if request.scheduled < 0:
            request.scheduled = self.time
            self.counts.scheduled(request.tier, self.time - request.arrived, request.prompt)
        self._running_by_tier[request.tier] += 1
        hit = int(self.spec.prefix_hit_ratio * request.to_prefill)
        return self._sequences.start(request, hit).left

    def _next_tier(self, running: int) -> int | None:
        """Return the tier whose first request starts next; None if a share or the reserve forbids it.

        Realtime comes first, and keeps a twentieth of the sequences free while its requests arrive.
        Batch takes at most its share while others wait, and counts as having arrived later.
        """
        realtime, standard, batch = self.queues
        if realtime:
            return 0
        if self.time < self._realtime_seen + RESERVE_KEPT_S:
            reserve = max(1, math.ceil(0.05 * self.limit_sequences))
            if running >= self.limit_sequences - reserve and running > 0:
                return None
        if not batch:
            return 1
        if standard:
            share = max(1, math.floor(self.batch_share * self.limit_sequences))
            later = batch[0].arrived + self.spec.batch_ageing_s >= standard[0].arrived
            if later or self._running_by_tier[2] >= share:
                return 1
        return 2

    def _prefill_step(self, step_tokens: int, began: int) -> None:
        """Run one step with prefill."""
        step = self._sequences.plan_prefill(step_tokens, began, self.slowness)
        if step is None:
            return
        self.counts.prefill_step(step.tokens, step.sequences, step.kv_tokens, step.seconds)
        self.time += step.seconds
        self.counts.generated(len(self._sequences.decoding))
        first, ended = self._sequences.end_prefill(step)
        for request in first:
            if request.first_token < 0:
                request.first_token = self.time
        self.counts.generated(len(first))
        self._end(ended)

    def _decode_steps(self, until: float) -> None:
        """Run decode-only steps until one ends after `until`, a sequence ends or KV blocks run out."""
        room_s = self._next_start(until) - self.time
        steps = self._sequences.plan_decodes(room_s, self.slowness)
        if steps is None:
            return
        self.counts.decode_steps(
            steps.steps, steps.sequences, steps.kv_tokens, steps.first_s, steps.growth_s
        )
        self.time += steps.seconds
        self.counts.generated(steps.steps * steps.sequences)
        self._end(self._sequences.end_decodes(steps))

    def _next_start(self, until: float) -> float:
        """Return the earlier of `until` and the time when a reserve ends that may keep requests waiting."""
        reserve_ends = self._realtime_seen + RESERVE_KEPT_S
        return min(until, reserve_ends) if self.waiting and self.time < reserve_ends else until

    def _end(self, requests: list[Request]) -> None:
        for request in requests:
            request.ended = self.time
            self._running_by_tier[request.tier] -= 1
        self.ended += requests

    def _requeue_preempted(self) -> None:
        preempted = self._sequences.preempted
        for request in preempted:
            self.counts.preempted()
            self._running_by_tier[request.tier] -= 1
            self.queues[request.tier].appendleft(request)
            self.waiting += 1
        preempted.clear()

    # -- metrics ------------------------------------------------------------------------------------

    def sample(self, now: float, source: Source = Source.PROMETHEUS) -> PodSample:
        """Return what a scrape at `now` finds. Call `advance` to `now` first."""
        waiting = [float(len(queue)) for queue in self.queues]
        oldest = [max(0.0, now - queue[0].arrived) if queue else 0.0 for queue in self.queues]
        capacity = self.spec.kv_capacity_tokens
        decode, prefill = self.counts.sums()
        return PodSample(
            self.name,
            now,
            Counters._make(self.counts.counters),
            Gauges(
                waiting_realtime=waiting[0],
                waiting_standard=waiting[1],
                waiting_batch=waiting[2],
                running=float(self.running),
                oldest_wait_s_realtime=oldest[0],
                oldest_wait_s_standard=oldest[1],
                oldest_wait_s_batch=oldest[2],
                limit_sequences=float(self.limit_sequences),
                limit_tokens=float(self.limit_tokens),
                limit_generation=self.generation,
                kv_capacity_tokens=capacity,
                kv_resident_tokens=min(float(self.kv_tokens), capacity),
                memory_used_ratio=0.7,
                memory_peak_ratio=0.74,
                hung=float(self.hangs and not self.is_idle),
            ),
            decode,
            prefill,
            source,
        )

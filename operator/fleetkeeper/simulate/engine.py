"""One simulated vLLM engine, step by step: the order of vLLM V1's scheduler, its KV blocks, its metrics.

A step takes `t0 + max(w, g (P + B)) + b B + c KV + q pairs` seconds (`StepCosts`). Its tokens are
given first to the decoding sequences, then to prefills in the order of their start, then to waiting
requests while sequences, tokens and KV blocks are left. Steps with prefill are computed one by one.
Between two arrivals and ends, decode-only steps differ in nothing but the growing KV cache, so their
times form an arithmetic series, and any number of them costs one evaluation. Blocks, counters and ends
are exact either way; `tests/support/naive_engine.py` computes the same one step at a time.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from fleetkeeper.autoscale.signals.samples import Counters, Gauges, PodSample, Source
from fleetkeeper.simulate.counts import Counts
from fleetkeeper.simulate.requests import Request

BLOCK_TOKENS: Final = 16
"""Tokens of a KV block, vLLM's default."""
PREFILL_QUANTUM_TOKENS: Final = 256
"""Tokens of a step beyond one per running sequence that the engine keeps for prefills."""
RESERVE_KEPT_S: Final = 10.0
"""The engine keeps sequences for realtime this long after the last realtime request."""


class StepCosts(NamedTuple):
    """The cost of a step in seconds, overheads included.

    `t0_s` and `w_s` per step, `g_s` per token, `b_s` per decoding sequence, `c_s` per resident KV token,
    `q_s` per pair of a prefill token and a token before it, `request_s` per request that starts.
    """

    t0_s: float
    w_s: float
    g_s: float
    b_s: float
    c_s: float
    q_s: float = 0.0
    request_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What the engines of a service have in common.

    `queue_limits`: most waiting requests by tier (None: unbounded, as in stock vLLM). `step_noise`: spread
    of single steps around the model (sigma of a lognormal distribution), for attainment.
    `prefix_hit_ratio`: share of a prompt that the prefix cache holds.
    """

    costs: StepCosts
    kv_capacity_tokens: float = 400_000.0
    max_sequences: int = 256
    max_tokens: int = 8192
    queue_wait_objective_s: float = 0.5
    batch_time_objective_s: float = 0.05
    step_noise: float = 0.08
    queue_limits: tuple[int, int, int] | None = (64, 256, 1024)
    batch_share_ratio: float = 0.3
    batch_ageing_s: float = 60.0
    prefix_hit_ratio: float = 0.0

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
class _Sequence:
    """A request inside the engine.

    `left`: prompt tokens to compute. `computed`: tokens in the KV cache when it began to decode, or so
    far. `blocks`: at that time. `entered`, `ends`: the clock then, and when its last token comes.
    """

    request: Request
    left: int
    computed: int
    blocks: int
    entered: int = 0
    ends: int = 0
    serial: int = 0


@dataclass(slots=True)
class Engine:
    """One engine. `arrive` queues a request, `advance` runs steps, `sample` returns a scrape.

    `time`: the end of the last step. `limit_*`, `admit`, `batch_share`: the limits in force. `slowness`:
    factor on the time of every step, as on an overcommitted node. `ended`: requests that ended since
    they were last taken.
    """

    spec: EngineSpec
    name: str
    started: float
    time: float = 0.0
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
    hangs: bool = False
    ended: list[Request] = field(default_factory=list)
    blocks_used: int = 0
    kv_tokens: int = 0
    _clock: int = 0
    _serial: int = 0
    _prefilling: list[_Sequence] = field(default_factory=list)
    _decoding: dict[int, _Sequence] = field(default_factory=dict)
    _ends: list[tuple[int, int]] = field(default_factory=list)
    _phases: list[int] = field(default_factory=lambda: [0] * BLOCK_TOKENS)
    _running_by_tier: list[int] = field(default_factory=lambda: [0, 0, 0])
    _realtime_seen: float = -math.inf
    _step_tokens: int = 0
    _has_preempted: bool = False

    def __post_init__(self) -> None:
        """Start with the start-up limits."""
        spec = self.spec
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
        return len(self._prefilling) + len(self._decoding)

    @property
    def load(self) -> int:
        """The requests in the engine, running or waiting: what a router counts."""
        return self.running + self.waiting

    @property
    def is_idle(self) -> bool:
        """Return whether the engine has no request."""
        return not (self.waiting or self._prefilling or self._decoding)

    # -- requests -----------------------------------------------------------------------------------

    def arrive(self, request: Request, draw: float = 0.0) -> bool:
        """Count an arrival and queue it; return False if it is refused.

        Call `advance` to its arrival first. `draw`: a random number in [0, 1), compared with the tier's
        admitted share. A request that cannot fit into the KV cache is refused, as vLLM does.
        """
        tier, limits = request.tier, self.spec.queue_limits
        self.counts.arrived(tier, request.arrived)
        if tier == 0:
            self._realtime_seen = request.arrived
        is_full = limits is not None and len(self.queues[tier]) >= limits[tier]
        tokens = request.prompt + request.generated
        if is_full or draw >= self.admit[tier] or tokens > self.spec.blocks * BLOCK_TOKENS:
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
        lost += [row.request for row in (*self._prefilling, *self._decoding.values())]
        for queue in self.queues:
            queue.clear()
        return lost

    # -- steps --------------------------------------------------------------------------------------

    def advance(self, until: float) -> None:
        """Run the steps that begin before `until`. The last one may end later."""
        if self.hangs:
            return
        while self.time < until and not self.is_idle:
            self._step_tokens = self._budget(self.running)
            began = self._admit()
            if self._prefilling:
                self._mixed_step(began)
            elif self._decoding:
                self._decode_steps(until)
            else:
                raise AssertionError(
                    f"{self.name}: {self.waiting} requests wait and none can start"
                )

    def _admit(self) -> int:
        """Start waiting requests while sequences, tokens and KV blocks are left; return how many.

        As in vLLM, a step that preempts starts none.
        """
        began = 0
        if not self.waiting or self._has_preempted:
            return 0
        running = self.running
        budget = self._step_tokens - len(self._decoding)
        budget -= sum([row.left for row in self._prefilling])
        free = self.spec.blocks - self.blocks_used - self._new_blocks(1)
        while self.waiting and running < self.limit_sequences and budget > 0:
            tier = self._next_tier(running)
            if tier is None:
                break
            request = self.queues[tier][0]
            blocks = -(-request.to_prefill // BLOCK_TOKENS)
            if blocks > free:
                break
            self.queues[tier].popleft()
            self.waiting -= 1
            free -= blocks
            running += 1
            began += 1
            budget -= self._start(request, blocks)
        return began

    def _budget(self, running: int) -> int:
        wanted = max(self.limit_tokens, running + PREFILL_QUANTUM_TOKENS)
        return min(self.spec.max_tokens, wanted)

    def _start(self, request: Request, blocks: int) -> int:
        """Start a request; return the prompt tokens that it has to compute."""
        if request.scheduled < 0:
            request.scheduled = self.time
            self.counts.scheduled(request.tier, self.time - request.arrived, request.prompt)
        hit = int(self.spec.prefix_hit_ratio * request.to_prefill)
        self._serial += 1
        row = _Sequence(request, request.to_prefill - hit, hit, blocks, serial=self._serial)
        self._prefilling.append(row)
        self._running_by_tier[request.tier] += 1
        self.blocks_used += blocks
        self.kv_tokens += hit
        return row.left

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

    def _mixed_step(self, began: int) -> None:
        """Run one step with prefill."""
        self._make_room(1)
        if not self._prefilling:
            return
        costs, decoding = self.spec.costs, len(self._decoding)
        budget = self._step_tokens - decoding
        total, pairs, sequences = 0, 0.0, decoding
        kv = self.kv_tokens
        for row in self._prefilling:
            chunk = min(row.left, budget - total)
            if chunk <= 0 and row.left > 0:
                break
            pairs += chunk * (row.computed + chunk / 2)
            total += chunk
            sequences += 1
            row.left -= chunk
            row.computed += chunk
        step_s = self.slowness * (
            costs.t0_s
            + max(costs.w_s, costs.g_s * (total + decoding))
            + costs.b_s * decoding
            + costs.c_s * kv
            + costs.q_s * pairs
            + costs.request_s * began
        )
        self.counts.prefill_step(total, sequences, kv, step_s)
        self.time += step_s
        self.kv_tokens += total
        self._has_preempted = False
        self._decoded(1)
        self._end_prefills()

    def _end_prefills(self) -> None:
        """Turn finished prefills into decoding sequences; the step gave each its first token."""
        waiting = []
        for row in self._prefilling:
            if row.left > 0:
                waiting.append(row)
                continue
            request = row.request
            if request.first_token < 0:
                request.first_token = self.time
            self.counts.generated(1)
            request.to_generate -= 1
            if request.to_generate <= 0:
                self._release(row, row.blocks, row.computed)
                self._end(request)
                continue
            row.entered, row.ends = self._clock, self._clock + request.to_generate
            self._decoding[row.serial] = row
            heapq.heappush(self._ends, (row.ends, row.serial))
            self._phases[(row.computed - self._clock) % BLOCK_TOKENS] += 1
        self._prefilling = waiting

    def _decode_steps(self, until: float) -> None:
        """Run decode-only steps until one ends after `until`, a sequence ends or KV blocks run out."""
        costs, sequences = self.spec.costs, len(self._decoding)
        first_s = self.slowness * (
            costs.t0_s
            + max(costs.w_s, costs.g_s * sequences)
            + costs.b_s * sequences
            + costs.c_s * self.kv_tokens
        )
        growth_s = self.slowness * costs.c_s * sequences
        steps = min(
            self._ends[0][0] - self._clock,
            steps_until(first_s, growth_s, self._next_start(until) - self.time),
        )
        steps = self._make_room(1 if self._has_preempted else steps)
        if len(self._decoding) != sequences:
            return
        self._has_preempted = False
        self.counts.decode_steps(steps, sequences, self.kv_tokens, first_s, growth_s)
        self.time += steps * first_s + growth_s * (steps * (steps - 1) // 2)
        self._decoded(steps)

    def _next_start(self, until: float) -> float:
        """Return the earlier of `until` and the time when a reserve ends that may keep requests waiting."""
        reserve_ends = self._realtime_seen + RESERVE_KEPT_S
        return min(until, reserve_ends) if self.waiting and self.time < reserve_ends else until

    def _decoded(self, steps: int) -> None:
        """Give every decoding sequence `steps` tokens, and end those that have all."""
        count = len(self._decoding)
        if not count:
            return
        self.blocks_used += self._new_blocks(steps)
        self.kv_tokens += steps * count
        self._clock += steps
        self.counts.generated(steps * count)
        while self._ends and self._ends[0][0] <= self._clock:
            _, serial = heapq.heappop(self._ends)
            row = self._decoding.pop(serial, None)
            if row is not None:
                self._leave(row)
                self._end(row.request)
        while self._ends and self._ends[0][1] not in self._decoding:
            heapq.heappop(self._ends)

    def _end(self, request: Request) -> None:
        request.ended = self.time
        self.ended.append(request)

    def _leave(self, row: _Sequence) -> int:
        """Free what a decoding sequence holds; return the tokens that it has in the KV cache."""
        tokens = row.computed + self._clock - row.entered
        self._phases[(row.computed - row.entered) % BLOCK_TOKENS] -= 1
        self._release(row, -(-tokens // BLOCK_TOKENS), tokens)
        return tokens

    def _release(self, row: _Sequence, blocks: int, tokens: int) -> None:
        self.blocks_used -= blocks
        self.kv_tokens -= tokens
        self._running_by_tier[row.request.tier] -= 1

    # -- KV blocks ----------------------------------------------------------------------------------

    def _new_blocks(self, steps: int) -> int:
        """Return the blocks that the decoding sequences fill in the next steps: one each 16 tokens."""
        cycles, rest = divmod(steps, BLOCK_TOKENS)
        phases, clock = self._phases, self._clock
        blocks = cycles * len(self._decoding)
        for step in range(rest):
            blocks += phases[-(clock + step) % BLOCK_TOKENS]
        return blocks

    def _make_room(self, steps: int) -> int:
        """Return how many of these steps the free blocks allow; preempt while they do not allow one.

        vLLM preempts the sequence that started last, frees its blocks, and computes it again later.
        """
        while True:
            free = self.spec.blocks - self.blocks_used
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
        self.counts.preempted()
        self._has_preempted = True
        if self._prefilling:
            row = self._prefilling.pop()
            self._release(row, row.blocks, row.computed)
        else:
            _, row = self._decoding.popitem()
            tokens = self._leave(row)
            row.request.to_generate -= self._clock - row.entered
            row.request.to_prefill = tokens + 1
        self.queues[row.request.tier].appendleft(row.request)
        self.waiting += 1
        while self._ends and self._ends[0][1] not in self._decoding:
            heapq.heappop(self._ends)

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

"""A small model of one engine: a queue per tier, continuous batching, step time, KV cache, metrics.

It advances in slices of virtual time. Within a slice the batch composition is constant: R sequences
decode one token per step, and the prefill backlog uses the remaining tokens of the step. All sequences
advance at the same pace, so a finish is a mark on one shared token clock (a heap), and a slice costs
O(finished), not O(running). It exports the counters and gauges of a real pod.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from fleetkeeper.autoscale.capacity.step_time_model import StepTime
from fleetkeeper.autoscale.signals.histogram_edges import snap_down
from fleetkeeper.autoscale.signals.samples import Counters, Gauges, PodSample
from fleetkeeper_contract.histogram_buckets import BATCH_TIME_EDGES_S, QUEUE_WAIT_EDGES_S
from fleetkeeper_contract.step_terms import StepSums


@dataclass(frozen=True, slots=True)
class Engine:
    """Hardware and model: step time, KV capacity, start-up limits, objectives.

    `step_noise`: spread of single steps around the model (lognormal sigma), for attainment.
    `queue_limits`: most waiting requests by tier.
    """

    step_time: StepTime
    kv_capacity_tokens: float = 400_000.0
    max_sequences: int = 256
    max_tokens: int = 8192
    queue_wait_objective_s: float = 0.5
    batch_time_objective_s: float = 0.05
    step_noise: float = 0.08
    queue_limits: tuple[int, int, int] = (64, 256, 1024)


H100_8B = Engine(StepTime(0.0026, 0.0041, 2.0e-5, 5.3e-6, 4.1e-8))
"""Llama-3.1-8B on one H100, with coefficients of the order of measured kernels."""
H100_70B = Engine(StepTime(0.0068, 0.0099, 6.2e-5, 7.9e-6, 2.86e-8), kv_capacity_tokens=420_000.0)
"""Llama-3.1-70B on four H100."""


@dataclass(slots=True)
class Request:
    """A request: tier (0 realtime, 1 standard, 2 batch), prompt tokens and generated tokens."""

    arrived: float
    tier: int
    prompt: float
    generated: float


@dataclass
class EnginePod:
    """The running state of one engine. `advance` moves it in time; `sample` returns its scrape.

    `slowness`: factor on the modeled time of every step, as on an overcommitted node.
    """

    engine: Engine
    name: str
    started: float
    limit_sequences: int = 0
    limit_tokens: int = 0
    generation: float = 0.0
    admit: tuple[float, float, float] = (1.0, 1.0, 1.0)
    queues: tuple[deque[Request], deque[Request], deque[Request]] = field(
        default_factory=lambda: (deque(), deque(), deque())
    )
    running: int = 0
    kv_tokens: float = 0.0
    prefill_backlog: float = 0.0
    clock: float = 0.0
    finishing: list[tuple[float, float]] = field(default_factory=list)
    finished: int = 0
    violated_steps: float = 0.0
    counters: list[float] = field(default_factory=lambda: [0.0] * len(Counters._fields))
    decode: list[float] = field(default_factory=lambda: [0.0] * len(StepSums._fields))
    prefill: list[float] = field(default_factory=lambda: [0.0] * len(StepSums._fields))
    bin_arrivals: int = 0
    bin_number: int = -1
    refused: float = 0.0
    hangs: bool = False
    slowness: float = 1.0

    def __post_init__(self) -> None:
        """Start with the start-up limits."""
        self.limit_sequences = self.limit_sequences or self.engine.max_sequences
        self.limit_tokens = self.limit_tokens or self.engine.max_tokens
        engine = self.engine
        self._wait_edge = snap_down(engine.queue_wait_objective_s, QUEUE_WAIT_EDGES_S)
        self._step_edge = snap_down(engine.batch_time_objective_s, BATCH_TIME_EDGES_S)

    def _count(self, name: str, value: float) -> None:
        self.counters[_INDEX[name]] += value

    def arrive(self, request: Request, draw: float) -> bool:
        """Count an arrival and queue it; return False if the tier's queue is full or its admission sheds it.

        `draw`: a random number in [0, 1), compared with the admitted share.
        """
        tier = _TIER_NAMES[request.tier]
        self._count(f"arrivals_{tier}", 1)
        second = math.floor(request.arrived)
        if second != self.bin_number:
            self._count("arrivals_squared", float(self.bin_arrivals**2))
            self.bin_number, self.bin_arrivals = second, 0
        self.bin_arrivals += 1
        full = len(self.queues[request.tier]) >= self.engine.queue_limits[request.tier]
        if full or draw >= self.admit[request.tier]:
            self.refused += 1
            return False
        self.queues[request.tier].append(request)
        return True

    def advance(self, now: float, slice_s: float) -> None:
        """Advance the engine from `now` to `now + slice_s`."""
        if self.hangs:
            return
        self._admit(now)
        spent = 0.0
        while spent < slice_s and self.running:
            spent += self._some_steps(slice_s - spent)
            self._admit(now + spent)

    def _admit(self, now: float) -> None:
        for tier, queue in enumerate(self.queues):
            while queue and self.running < self.limit_sequences:
                if self.kv_tokens + queue[0].prompt > self.engine.kv_capacity_tokens:
                    return
                request = queue.popleft()
                name = _TIER_NAMES[tier]
                wait_s = max(0.0, now - request.arrived)
                self._count(f"wait_count_{name}", 1)
                self._count(f"wait_sum_s_{name}", wait_s)
                self._count(f"wait_within_{name}", float(wait_s <= self._wait_edge))
                self.running += 1
                self.kv_tokens += request.prompt
                self.prefill_backlog += request.prompt
                self._count("prompt_tokens", request.prompt)
                heapq.heappush(
                    self.finishing,
                    (self.clock + request.generated, request.prompt + request.generated),
                )

    def _some_steps(self, room_s: float) -> float:
        """Run equal steps until the slice, the prefill backlog or the next finish ends; return seconds."""
        sequences = float(self.running)
        budget = max(1.0, self.limit_tokens - sequences)
        chunk = min(self.prefill_backlog, budget)
        modelled_s = self.engine.step_time.batch_time_s(chunk, sequences, self.kv_tokens)
        step_s = self.slowness * modelled_s
        steps = max(room_s / step_s, 0.05)
        if chunk > 0:
            steps = min(steps, max(self.prefill_backlog / chunk, 0.05))
        steps = min(steps, max(self.finishing[0][0] - self.clock, 0.05))
        self.prefill_backlog = max(0.0, self.prefill_backlog - steps * chunk)
        self.clock += steps
        self.kv_tokens += steps * sequences
        self._observe(steps, step_s, chunk, sequences)
        while self.finishing and self.finishing[0][0] <= self.clock:
            _, held = heapq.heappop(self.finishing)
            self.running -= 1
            self.kv_tokens -= held
            self.finished += 1
        self.kv_tokens = max(0.0, self.kv_tokens) if self.running else 0.0
        self._preempt()
        return steps * step_s

    def _preempt(self) -> None:
        """Preempt sequences while KV tokens exceed the capacity; their prompts are computed again."""
        while self.kv_tokens > self.engine.kv_capacity_tokens and self.running > 1:
            self._count("preemptions", 1)
            finish, held = self.finishing.pop()
            heapq.heapify(self.finishing)
            left = max(1.0, finish - self.clock)
            self.running -= 1
            self.kv_tokens -= max(0.0, held - left)
            self.queues[1].appendleft(Request(0.0, 1, max(0.0, held - left), left))

    def _observe(self, steps: float, step_s: float, chunk: float, sequences: float) -> None:
        within = _share_within(step_s, self._step_edge, self.engine.step_noise)
        self.violated_steps += steps * (1 - within)
        self._count("batch_time_count", steps)
        self._count("batch_time_sum_s", steps * step_s)
        self._count("batch_time_within", steps * within)
        self._count("steps", steps)
        self._count("schedule_calls", steps)
        self._count("generation_tokens", steps * sequences)
        sums = self.prefill if chunk > 0 else self.decode
        kv = self.kv_tokens
        products = StepSums(
            steps=1.0,
            prefill=chunk,
            sequences=sequences,
            kv=kv,
            seconds=step_s,
            prefill_prefill=chunk * chunk,
            prefill_sequences=chunk * sequences,
            prefill_kv=chunk * kv,
            prefill_seconds=chunk * step_s,
            sequences_sequences=sequences * sequences,
            sequences_kv=sequences * kv,
            sequences_seconds=sequences * step_s,
            kv_kv=kv * kv,
            kv_seconds=kv * step_s,
            seconds_seconds=step_s * step_s * (1 + self.engine.step_noise**2),
        )
        for index, value in enumerate(products):
            sums[index] += steps * value

    def sample(self, now: float) -> PodSample:
        """Return the sample of a scrape at `now`."""
        waiting = [len(queue) for queue in self.queues]
        oldest = [max(0.0, now - queue[0].arrived) if queue else 0.0 for queue in self.queues]
        oldest = [min(wait, now - self.started) for wait in oldest]
        return PodSample(
            self.name,
            now,
            Counters._make(self.counters),
            Gauges(
                waiting_realtime=float(waiting[0]),
                waiting_standard=float(waiting[1]),
                waiting_batch=float(waiting[2]),
                running=float(self.running),
                oldest_wait_s_realtime=oldest[0],
                oldest_wait_s_standard=oldest[1],
                oldest_wait_s_batch=oldest[2],
                limit_sequences=float(self.limit_sequences),
                limit_tokens=float(self.limit_tokens),
                limit_generation=self.generation,
                kv_capacity_tokens=self.engine.kv_capacity_tokens,
                kv_resident_tokens=min(self.kv_tokens, self.engine.kv_capacity_tokens),
                memory_used_ratio=0.7,
                memory_peak_ratio=0.74,
                hung=float(self.hangs and bool(self.running or any(waiting))),
            ),
            StepSums._make(self.decode),
            StepSums._make(self.prefill),
        )


_TIER_NAMES = ("realtime", "standard", "batch")
_INDEX = {name: index for index, name in enumerate(Counters._fields)}


def _share_within(step_s: float, edge_s: float, sigma: float) -> float:
    """Return the share of steps up to `edge_s` if single steps spread lognormally around `step_s`."""
    return 0.5 * (1 + math.erf(math.log(edge_s / step_s) / (sigma * math.sqrt(2))))

"""A second simulated engine, one loop per step, to check `fleetkeeper.simulate.engine` against.

It follows vLLM V1: one list of running sequences in the order of their start, KV blocks per sequence,
preemption from the end of the list, and no start of a waiting request in a step that preempted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fleetkeeper.simulate.engine import EngineSpec
from fleetkeeper.simulate.requests import Request

BLOCK = 16


@dataclass
class Running:
    """A running sequence. `in_kv`: its tokens in the KV cache. `left`: prompt tokens to compute."""

    request: Request
    left: int
    in_kv: int
    blocks: list[int]
    decodes: bool = False


@dataclass
class Step:
    """One step: tokens by kind, sequences, KV tokens before it, its limits and its time."""

    prefill: int
    decoding: int
    sequences: int
    kv: int
    seconds: float
    running: int
    has_prefill: bool


@dataclass
class NaiveEngine:
    """The same engine, step by step, from the rules."""

    spec: EngineSpec
    time: float
    limit_sequences: int
    limit_tokens: int
    waiting: list[list[Request]] = field(default_factory=lambda: [[], [], []])
    running: list[Running] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    generated: int = 0
    preemptions: int = 0
    waits: list[float] = field(default_factory=list)
    realtime_seen: float = -math.inf

    def __post_init__(self) -> None:
        """Make all blocks free."""
        self.free = list(range(self.spec.blocks))

    @property
    def is_idle(self) -> bool:
        """Whether there is no request."""
        return not self.running and not any(self.waiting)

    def arrive(self, request: Request) -> bool:
        """Queue a request, or refuse it."""
        if request.tier == 0:
            self.realtime_seen = request.arrived
        limits = self.spec.queue_limits
        if limits is not None and len(self.waiting[request.tier]) >= limits[request.tier]:
            return False
        if request.prompt + request.generated > self.spec.blocks * BLOCK:
            return False
        if self.is_idle:
            self.time = max(self.time, request.arrived)
        self.waiting[request.tier].append(request)
        return True

    def advance(self, until: float) -> None:
        """Run the steps that begin before `until`."""
        while self.time < until and not self.is_idle:
            self._step()

    def _step(self) -> None:
        spare = min(self.spec.max_tokens, max(self.limit_tokens, len(self.running) + 256))
        given: list[tuple[Running, int]] = []
        has_preempted = False
        for row in list(self.running):  # decoding sequences, oldest first
            if not row.decodes or row not in self.running:
                continue
            while row in self.running and row.in_kv == BLOCK * len(row.blocks) and not self.free:
                has_preempted = True
                self._preempt()
            if row in self.running:
                if row.in_kv == BLOCK * len(row.blocks):
                    row.blocks.append(self.free.pop())
                given.append((row, 1))
                spare -= 1
        given = [(row, tokens) for row, tokens in given if row in self.running]
        for row in self.running:
            if not row.decodes and spare > 0:
                tokens = min(row.left, spare)
                given.append((row, tokens))
                spare -= tokens
        starts = 0
        while not has_preempted and spare > 0 and len(self.running) < self.limit_sequences:
            request = self._next()
            if request is None or -(-request.to_prefill // BLOCK) > len(self.free):
                break
            self.waiting[request.tier].remove(request)
            row = self._start(request)
            tokens = min(row.left, spare)
            given.append((row, tokens))
            spare -= tokens
            starts += 1
        self._run(given, starts)

    def _start(self, request: Request) -> Running:
        if request.scheduled < 0:
            request.scheduled = self.time
            self.waits.append(self.time - request.arrived)
        blocks = [self.free.pop() for _ in range(-(-request.to_prefill // BLOCK))]
        row = Running(request, request.to_prefill, 0, blocks)
        self.running.append(row)
        return row

    def _next(self) -> Request | None:
        realtime, standard, batch = self.waiting
        if realtime:
            return realtime[0]
        if not standard and not batch:
            return None
        if self.time < self.realtime_seen + 10.0 and self.running:
            kept = max(1, math.ceil(self.limit_sequences / 20))
            if self.limit_sequences - len(self.running) <= kept:
                return None
        if not standard or not batch:
            return (standard or batch)[0]
        most = max(1, int(self.spec.batch_share_ratio * self.limit_sequences))
        in_batch = sum(row.request.tier == 2 for row in self.running)
        is_due = batch[0].arrived + self.spec.batch_ageing_s < standard[0].arrived
        return batch[0] if is_due and in_batch < most else standard[0]

    def _preempt(self) -> None:
        row = self.running.pop()
        self.preemptions += 1
        self.free += row.blocks
        if row.decodes:
            row.request.to_prefill = row.in_kv + 1
        self.waiting[row.request.tier].insert(0, row.request)

    def _run(self, given: list[tuple[Running, int]], starts: int) -> None:
        costs = self.spec.costs
        kv = sum(row.in_kv for row in self.running)
        decoding = sum(row.decodes for row, _ in given)
        prefill = sum(tokens for row, tokens in given if not row.decodes)
        pairs = sum(t * (row.in_kv + t / 2) for row, t in given if not row.decodes)
        seconds = costs.t0_s + max(costs.w_s, costs.g_s * (prefill + decoding))
        seconds += costs.b_s * decoding + costs.c_s * kv
        seconds += costs.q_s * pairs + costs.request_s * starts
        has_prefill = decoding < len(self.running)
        self.steps.append(
            Step(prefill, decoding, len(given), kv, seconds, len(self.running), has_prefill)
        )
        self.time += seconds
        for row, tokens in given:
            row.in_kv += tokens
            row.left -= 0 if row.decodes else tokens
            if row.left == 0:
                row.decodes = True
                self._token(row)

    def _token(self, row: Running) -> None:
        request = row.request
        self.generated += 1
        request.to_generate -= 1
        if request.first_token < 0:
            request.first_token = self.time
        if request.to_generate == 0:
            request.ended = self.time
            self.ended.append(request)
            self.running.remove(row)
            self.free += row.blocks

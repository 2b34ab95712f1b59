"""Limits and statistics around the calls of a vLLM scheduler.

vLLM's scheduler interface is not public. The required attributes are therefore looked up on the
finished instance. If one is missing, live limits are reported as not supported.

Only `max_num_active_reqs` and `max_num_scheduled_tokens` are set, before each schedule call.
`max_num_running_reqs` is left alone: an assertion in vLLM ends the core when it is below the number
of running requests.

Between the output of a step and the start of the next one the accelerator waits for this thread.
Only what must be done by then is done there: setting the limits, and writing that a step is about
to run. Everything else is counted when vLLM asks for the step's grammar, while the workers compute.
Several short steps are counted together, because running code that has left the processor's caches
costs many times its work.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import takewhile
from typing import Any

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.priority import PriorityRule, goes_first, is_realtime, microseconds
from fleetkeeper_engine.in_vllm.realtime_reserve import (
    RESERVE_KEPT_S,
    RecentPeak,
    active_sequences,
    progressing_tokens,
)
from fleetkeeper_engine.in_vllm.scheduler_facts import (
    is_blocked,
    kv_capacity_tokens,
    quantum_of,
    waiting_requests,
    whole,
)
from fleetkeeper_engine.in_vllm.stats import (
    Flight,
    SchedulerRecord,
    Waiting,
    prefill_tokens_of,
)
from fleetkeeper_engine.in_vllm.vllm_settings import VllmSettings
from fleetkeeper_engine.limits import LimitRange, Limits, limits_change_at, limits_in_force
from fleetkeeper_engine.shm.layout import SupervisorBlock
from fleetkeeper_engine.shm.region import Region

NEEDED = ("max_num_active_reqs", "max_num_scheduled_tokens")
_COUNT_EVERY_S = 0.2
_COUNT_WAITING_EVERY_S = 0.05
"""While something waits inside vLLM: an old figure would look like a request that still waits."""
_ORIGINS_KEPT = 4096


class SchedulerMixin:
    """The base of classes that surround a vLLM scheduler and add no method of their own to it."""


class LiveScheduling:
    """Limits and statistics around the calls of one vLLM scheduler."""

    def __init__(
        self,
        scheduler: Any,  # noqa: ANN401 - one of several vLLM classes without a common public type
        region: Region | None,
        settings: VllmSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._region = region
        self._clock = clock
        rule = PriorityRule(
            microseconds(settings.standard_offset_s), microseconds(settings.batch_ageing_s)
        )
        # The tier of each running sequence is needed several times a second.
        self._origin_of = lru_cache(_ORIGINS_KEPT)(rule.origin)
        self.record = SchedulerRecord(region.heartbeat if region is not None else None)
        self.supported = all(isinstance(getattr(scheduler, name, None), int) for name in NEEDED)
        ceiling_sequences, ceiling_tokens = (
            int(getattr(scheduler, name, 0) or 1) for name in NEEDED
        )
        self._speculative = whole(getattr(scheduler, "num_spec_tokens", 0))
        self._quantum = quantum_of(scheduler)
        self._sequences = LimitRange(
            min(settings.min_sequences, ceiling_sequences), ceiling_sequences
        )
        self._tokens = LimitRange(min(settings.min_tokens, ceiling_tokens), ceiling_tokens)
        self._chunked = bool(
            getattr(getattr(scheduler, "scheduler_config", None), "enable_chunked_prefill", False)
        )
        self._supervisor_block: SupervisorBlock | None = None
        self._supervisor_sequence = -1
        self._limits = Limits(ceiling_sequences, ceiling_tokens)
        self._limits_until = -math.inf
        self._same_until = -math.inf
        self._same_running = -1
        self._asks_grammar = any(
            "get_grammar_bitmask" in vars(kind)
            for kind in type(scheduler).__mro__
            if not issubclass(kind, SchedulerMixin)
        )
        self._uncounted: list[tuple[Any, Flight | None]] = []
        self._scheduled_at = -math.inf
        self._first_scheduled: list[tuple[int, float]] = []
        self._followed = True
        self._count_due = -math.inf
        self._reserved_until = 0.0
        self._realtime_peak = RecentPeak()
        self._waiting_due = 0.0
        self._waits = False
        self._describe()

    @property
    def followed(self) -> bool:
        """Return whether `while_running` has followed the last schedule call."""
        return self._followed

    def before_schedule(self) -> None:
        """Set the limits in force on the scheduler, unless they are those of the last call."""
        if not self._followed:
            self.while_running()
        if not self.supported:
            return
        now, running = self._clock(), len(self._scheduler.running)
        region, sequence = self._region, self._supervisor_sequence
        if region is not None:
            sequence = region.supervisor_sequence()
        if (
            now < self._same_until
            and running == self._same_running
            and sequence == self._supervisor_sequence
        ):
            return
        self._set_limits(now, running, sequence)

    def _set_limits(self, now: float, running: int, sequence: int) -> None:
        if sequence != self._supervisor_sequence:
            self._read_supervisor(sequence)
        scheduler, block = self._scheduler, self._supervisor_block
        if now >= self._limits_until:
            self._limits = limits_in_force(block, self._sequences, self._tokens, now)
            self._limits_until = limits_change_at(block, now)
        limits = self._limits
        active, self._same_until = limits.sequences, self._limits_until
        if now < self._reserved_until:
            active = self._active_with_reserve(limits.sequences, running, now)
            self._same_until = -math.inf
        if block is not None and block.cap_exceeded:
            active = 0
        tokens = self._tokens.ceiling
        if self._chunked:
            tokens = progressing_tokens(
                limits.tokens, tokens, running, self._speculative, self._quantum
            )
        scheduler.max_num_active_reqs = active
        scheduler.max_num_scheduled_tokens = tokens
        self._same_running = running
        generation = block.generation if block is not None else 0
        self.record.record_limits(generation, limits.sequences, tokens)

    def _active_with_reserve(self, limit: int, running: int, now: float) -> int:
        scheduler = self._scheduler
        # The queue iterates in order of priority, so only the first band is read. A blocked request
        # leaves the slot that is admitted for it to another tier.
        band = takewhile(lambda request: goes_first(request.priority), scheduler.waiting)
        waiting = sum(not is_blocked(getattr(request, "status", None)) for request in band)
        first = sum(1 for request in scheduler.running if goes_first(request.priority))
        self._realtime_peak = self._realtime_peak.after(first + waiting, now)
        return active_sequences(
            limit,
            running,
            waiting,
            reserved=True,
            realtime_running=first,
            realtime_peak=self._realtime_peak.value,
        )

    def after_schedule(self, step: Any) -> None:  # noqa: ANN401 - vLLM's SchedulerOutput
        """Record that a step goes to the workers, before it runs."""
        now = self._clock()
        tokens = step.total_num_scheduled_tokens
        flight = Flight(step, tokens, now) if tokens else None
        self.record.record_schedule(flight)
        self._uncounted.append((step, flight))
        self._scheduled_at = now
        self._followed = False
        # Before the step is sent: a client may hang up while the workers run it.
        for entry in step.scheduled_new_reqs:
            self._record_new(entry.req_id, now)
        if not (tokens and self._asks_grammar):
            self.while_running()

    def while_running(self) -> None:
        """Inspect the last step once, and count the finished steps if it is time.

        Counts every 200 ms, every 50 ms while something waits, and at once with new limits or
        without work. State that is gone when the step's sequences end is read in each step.
        """
        if self._followed:
            return
        self._followed = True
        (_, flight), now = self._uncounted[-1], self._scheduled_at
        if flight is not None:
            flight.kv_tokens = self._kv_tokens()
        if flight is None or now >= self._count_due:
            self._count(now)

    def after_update(self, step: Any, outputs: Any) -> None:  # noqa: ANN401 - vLLM's types
        """Record the outputs of a step. Count at once if no step follows."""
        now = self._clock()
        left = self._scheduler.has_unfinished_requests()
        self.record.record_output(step, outputs, now, work_left=left)
        if not left or (now >= self._count_due and not self._asks_grammar):
            self._count(now, idle=not left)

    def _count(self, now: float, *, idle: bool = False) -> None:
        """Count the schedule calls and outputs since the last count, and publish the result."""
        self.record.put("kv_resident_tokens", self._kv_tokens())
        for step, flight in self._uncounted:
            if flight is not None:
                self._fill(flight, step)
        self._uncounted.clear()
        for number, scheduled_at in self._first_scheduled:
            self.record.record_first_scheduled(self._origin_of(number), number, scheduled_at)
        self._first_scheduled.clear()
        self.record.count()
        self._record_waiting(now, must=idle)
        self._count_due = now + (_COUNT_WAITING_EVERY_S if self._waits else _COUNT_EVERY_S)
        self.publish()

    def _kv_tokens(self) -> int:
        usage: float = self._scheduler.kv_cache_manager.usage
        return round(usage * self._kv_capacity)

    def _fill(self, flight: Flight, step: Any) -> None:  # noqa: ANN401 - vLLM's SchedulerOutput
        new = step.scheduled_new_reqs
        scheduled: dict[str, int] = step.num_scheduled_tokens
        flight.prefill_tokens = prefill_tokens_of(
            list(scheduled.values()),
            [scheduled.get(entry.req_id, 0) for entry in new],
            1 + self._speculative,
            only_decodes=not new and flight.tokens <= len(scheduled),
        )
        flight.sequences = len(scheduled)

    def record_preemption(self) -> None:
        """Record that a sequence was preempted."""
        self.record.add("preemptions", 1)

    def _describe(self) -> None:
        record, scheduler = self.record, self._scheduler
        record.put("pid", os.getpid())
        record.put("supported", int(self.supported))
        record.put("ceiling_sequences", self._sequences.ceiling)
        record.put("ceiling_tokens", self._tokens.ceiling)
        record.put("limit_sequences", self._sequences.ceiling)
        record.put("limit_tokens", self._tokens.ceiling)
        record.put("floor_sequences", self._sequences.floor)
        record.put("floor_tokens", self._tokens.floor if self._chunked else self._tokens.ceiling)
        self._kv_capacity = kv_capacity_tokens(scheduler)
        record.put("kv_capacity_tokens", self._kv_capacity)
        self.publish()

    def _read_supervisor(self, sequence: int) -> None:
        if self._region is not None:
            self._supervisor_block = self._region.read_supervisor()
        self._supervisor_sequence = sequence
        self._limits_until = self._count_due = -math.inf

    def _record_new(self, request_id: str, now: float) -> None:
        request = self._scheduler.requests.get(request_id)
        if request is None or request.num_preemptions:
            return
        self._first_scheduled.append((request.priority, now))
        if is_realtime(request.priority):
            self._reserved_until = now + RESERVE_KEPT_S
            self._same_until = -math.inf

    def _record_waiting(self, now: float, *, must: bool = False) -> None:
        if now < self._waiting_due and not must:
            return
        self._waiting_due = now + _COUNT_WAITING_EVERY_S
        scheduler = self._scheduler
        running, _ = self._by_tier(scheduler.running)
        queue = waiting_requests(scheduler)
        waiting, oldest = self._by_tier(queue)
        self._waits = any(waiting)
        blocked = sum(is_blocked(getattr(request, "status", None)) for request in queue)
        self.record.record_waiting(Waiting(running, waiting, oldest, blocked))

    def _by_tier(
        self, requests: Iterable[Any]
    ) -> tuple[tuple[int, int, int], tuple[float, float, float]]:
        counts, oldest = [0, 0, 0], [0.0, 0.0, 0.0]
        for request in requests:
            origin = self._origin_of(request.priority)
            tier = Tier.STANDARD if origin is None else origin.tier
            counts[tier] += 1
            if origin is not None:
                arrival = origin.arrival_us / 1e6
                oldest[tier] = min(oldest[tier] or arrival, arrival)
        return (counts[0], counts[1], counts[2]), (oldest[0], oldest[1], oldest[2])

    def ceilings(self) -> tuple[int, int]:
        """Return the start-up values, in the order of `NEEDED`."""
        return self._sequences.ceiling, self._tokens.ceiling

    def publish(self) -> None:
        """Write the block to shared memory."""
        if self._region is not None:
            self._region.publish(self.record.cells)

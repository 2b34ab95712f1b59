"""The scheduler's statistics: its block in shared memory, updated cell by cell.

Counting a step costs some microseconds and no allocation that grows with the number of buckets. It
is separate from recording that a step was sent and came back, so that it can be deferred.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetkeeper_contract.histogram_buckets import (
    BATCH_SEQUENCES_EDGES,
    BATCH_TIME_EDGES_S,
    BATCH_TOKENS_EDGES,
    QUEUE_WAIT_EDGES_S,
)
from fleetkeeper_contract.step_terms import TERMS, StepClass
from fleetkeeper_contract.tiers import TIERS
from fleetkeeper_engine.in_vllm.priority import Origin, request_of
from fleetkeeper_engine.in_vllm.scheduler_facts import tokens_sent
from fleetkeeper_engine.shm.layout import HEARTBEAT, SCHEDULER, Cells

_SEEN_REQUESTS = 8192
_MAX_FLIGHTS = 64
_GENERATION, _LIMIT_SEQUENCES, _LIMIT_TOKENS = (
    SCHEDULER.cells[name] for name in ("generation", "limit_sequences", "limit_tokens")
)
_WORKED, _GENERATED, _PROMPT, _MODEL, _WAITS, _WAITED = (
    SCHEDULER.cells[name]
    for name in (
        "worked_steps",
        "generation_tokens",
        "prompt_tokens",
        "step_model",
        "queue_wait_buckets",
        "queue_wait_sum",
    )
)
_RUNNING, _WAITING = (SCHEDULER.cells[name] for name in ("running", "waiting"))
_HISTOGRAMS = tuple(
    (SCHEDULER.cells[f"{name}_buckets"], SCHEDULER.cells[f"{name}_sum"], edges)
    for name, edges in (
        ("batch_time", BATCH_TIME_EDGES_S),
        ("batch_sequences", BATCH_SEQUENCES_EDGES),
        ("batch_tokens", BATCH_TOKENS_EDGES),
    )
)
_WAIT_WIDTH = len(QUEUE_WAIT_EDGES_S) + 1
_CALLS, _STEPS, _TOKENS, _OLDEST = (
    HEARTBEAT.cells[name] for name in ("schedule_calls", "steps", "tokens", "oldest_arrival")
)


@dataclass(slots=True)
class Flight:
    """A step that was sent to the workers."""

    step: object
    """vLLM's own description of the step, which identifies its output."""
    tokens: int
    sent: float
    prefill_tokens: int = 0
    sequences: int = 0
    kv_tokens: int = 0
    """These three are set while the step runs, or before it is counted."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Sequences by tier inside vLLM."""

    running: tuple[int, int, int]
    waiting: tuple[int, int, int]
    oldest_arrival: tuple[float, float, float]
    blocked: int = 0
    """Waiting sequences that are not runnable yet."""


class SchedulerRecord:
    """Counters, histograms and sums of one engine. `now` is CLOCK_MONOTONIC in seconds.

    `cells` holds them, except for `heartbeat`, which is written between two steps. Where it is part
    of the shared region, readers see it at once.
    """

    def __init__(self, heartbeat: Cells | None = None) -> None:
        self.cells = Cells(SCHEDULER)
        self._whole = self.cells.whole
        self._real = self.cells.real
        self._at = SCHEDULER.cells
        self.heartbeat = Cells(HEARTBEAT) if heartbeat is None else heartbeat
        self.heartbeat.clear()
        self._heartbeat_cells = self.heartbeat.whole
        self._flights: deque[Flight] = deque()
        self._ended: list[tuple[Flight, float, Mapping[int, Any]]] = []
        self._seen: dict[int, None] = {}
        self._interval_start: float | None = None

    def put(self, name: str, value: int) -> None:
        """Set a field of one unsigned cell."""
        self._whole[self._at[name]] = value

    def add(self, name: str, value: int) -> None:
        """Add to a counter."""
        self._whole[self._at[name]] += value

    def record_limits(self, generation: int, sequences: int, tokens: int) -> None:
        """Record the limits of the next schedule call."""
        whole = self._whole
        whole[_GENERATION] = generation
        whole[_LIMIT_SEQUENCES] = sequences
        whole[_LIMIT_TOKENS] = tokens

    def record_schedule(self, flight: Flight | None) -> None:
        """Record that a schedule call returned. A step with tokens goes to the workers."""
        cells = self._heartbeat_cells
        cells[_CALLS] += 1
        if flight is None:
            return
        if self._interval_start is None:
            self._interval_start = flight.sent
        flights = self._flights
        flights.append(flight)
        cells[_TOKENS] += flight.tokens
        if len(flights) > _MAX_FLIGHTS:
            self._pop_oldest()
        cells[_STEPS] = len(flights)

    def record_first_scheduled(self, origin: Origin | None, number: int, now: float) -> None:
        """Record a request's queue wait when a sequence is in a step for the first time."""
        request = request_of(number)
        if origin is None or request in self._seen:
            return
        self._seen[request] = None
        if len(self._seen) > _SEEN_REQUESTS:
            del self._seen[next(iter(self._seen))]
        wait_s = max(0.0, now - origin.arrival_us / 1e6)
        place = origin.tier * _WAIT_WIDTH + bisect_left(QUEUE_WAIT_EDGES_S, wait_s)
        self._whole[_WAITS + place] += 1
        self._real[_WAITED + origin.tier] += wait_s

    def record_output(
        self, step: object, outputs: Mapping[int, Any], now: float, *, work_left: bool
    ) -> None:
        """Record the outputs of a step, as vLLM sends them to its API servers.

        Steps come back in the order they were sent. A step that never came back, because its output
        was dropped, is forgotten with the next one. Batch time is the time since the last update
        from output, or since there was work again. With asynchronous scheduling the next step is
        already running, so the time from sending to output would count twice.
        """
        flights = self._flights
        if flights and flights[0].step is step:
            flight: Flight | None = flights[0]
            self._pop_oldest()
        else:
            flight = self._pop_flight(step)
        if flight is not None:
            start = flight.sent if self._interval_start is None else self._interval_start
            self._ended.append((flight, max(0.0, now - start), outputs))
        self._interval_start = now if work_left or self._flights else None

    def count(self) -> None:
        """Count the steps that came back since the last call."""
        whole = self._whole
        for flight, seconds, outputs in self._ended:
            self._count(flight, seconds)
            whole[_GENERATED] += tokens_sent(outputs)
        whole[_WORKED] += len(self._ended)
        self._ended.clear()

    def record_waiting(self, waiting: Waiting) -> None:
        """Record the sequences inside vLLM by tier."""
        for tier in TIERS:
            self._whole[_RUNNING + tier] = waiting.running[tier]
            self._whole[_WAITING + tier] = waiting.waiting[tier]
            self.heartbeat.real[_OLDEST + tier] = waiting.oldest_arrival[tier]
        self.put("blocked", waiting.blocked)

    def disable_instrumentation(self) -> None:
        """Mark instrumentation as disabled and clear what would otherwise stay shown for ever."""
        self.put("supported", 0)
        self.put("instrumentation_disabled", 1)
        self.record_waiting(Waiting((0, 0, 0), (0, 0, 0), (0.0, 0.0, 0.0)))
        self._flights.clear()
        self._heartbeat_cells[_STEPS] = self._heartbeat_cells[_TOKENS] = 0

    def _pop_flight(self, step: object) -> Flight | None:
        for place, flight in enumerate(self._flights):
            if flight.step is step:
                for _ in range(place + 1):
                    self._pop_oldest()
                return flight
        return None

    def _pop_oldest(self) -> None:
        """Remove the oldest step in flight."""
        self._heartbeat_cells[_TOKENS] -= self._flights.popleft().tokens
        self._heartbeat_cells[_STEPS] = len(self._flights)

    def _count(self, flight: Flight, seconds: float) -> None:
        whole, real = self._whole, self._real
        seen = (seconds, flight.sequences, flight.tokens)
        for (buckets, total, edges), value in zip(_HISTOGRAMS, seen, strict=True):
            whole[buckets + bisect_left(edges, value)] += 1
            real[total] += value
        whole[_PROMPT] += flight.prefill_tokens
        kind = StepClass.PREFILL if flight.prefill_tokens else StepClass.DECODE
        sums = products(flight.prefill_tokens, flight.sequences, flight.kv_tokens, seconds)
        for place, value in enumerate(sums, _MODEL + kind * len(TERMS)):
            if value:
                real[place] += value


def prefill_tokens_of(
    scheduled: Sequence[int], new: Sequence[int], decode_tokens: int, *, only_decodes: bool
) -> int:
    """Return the prefill tokens of a step: of new sequences, and chunks larger than a decode.

    Args:
        scheduled: tokens of every sequence in the step.
        new: tokens of the sequences that are in a step for the first time, or again after a
            preemption.
        decode_tokens: the most that a decoding sequence takes: 1 and its draft tokens.
        only_decodes: known beforehand, which skips the computation.
    """
    if only_decodes:
        return 0
    if decode_tokens == 1:
        # Two counts replace the two sums below: much faster for many sequences.
        return sum(scheduled) - scheduled.count(1) + new.count(1)
    small_new = sum(some for some in new if some <= decode_tokens)
    return small_new + sum(some for some in scheduled if some > decode_tokens)


def products(prefill: float, sequences: float, kv: float, seconds: float) -> tuple[float, ...]:
    """Return what one step adds to each of `step_terms.TERMS`, the sums of the step-time model."""
    return (
        1.0,
        prefill,
        sequences,
        kv,
        seconds,
        prefill * prefill,
        prefill * sequences,
        prefill * kv,
        prefill * seconds,
        sequences * sequences,
        sequences * kv,
        sequences * seconds,
        kv * kv,
        kv * seconds,
        seconds * seconds,
    )

"""Planned requests played against the simulated engine, and the figures that are compared. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fleetkeeper.autoscale.signals.windows import Window
from fleetkeeper.autoscale.types import Limits
from fleetkeeper.simulate.engine import Engine, EngineSpec
from fleetkeeper.simulate.hardware import fit_of_sums, model_of_sums
from fleetkeeper.simulate.requests import Request
from fleetkeeper_contract.step_terms import TERMS, StepClass, StepSums
from fleetkeeper_contract.tiers import TIER_LABELS
from fleetkeeper_local.load.schedule import Arrival
from fleetkeeper_steps.costs import StepCosts
from fleetkeeper_steps.hardware import Hardware

STANDARD = 1
MIN_STEPS = 200
"""A window with fewer steps says little about the machine's speed."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a load came to. Means; times in seconds.

    `requests_per_s`, `tokens_per_s`: completed (tokens: generated), over the span of the load.
    `queue_wait_s`: from arrival to the first step. `ttft_s`: from arrival to the first token. `tpot_s`:
    mean over requests of the time per output token after the first. `itl_s`: the same over all tokens.
    `batch_time_s`, `sequences`: of a step. `busy_ratio`: share of the time in which a step runs.
    """

    requests_per_s: float
    tokens_per_s: float
    queue_wait_s: float
    ttft_s: float
    tpot_s: float
    itl_s: float
    batch_time_s: float
    sequences: float
    busy_ratio: float


@dataclass(frozen=True, slots=True)
class Reading:
    """Cumulative counters of an engine at a time, as its shared memory or the simulator has them."""

    at_s: float
    requests: float
    wait_s: float
    steps: float
    steps_s: float
    sequences: float
    decode: StepSums
    prefill: StepSums


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that was answered. Times from the start of the load, in seconds."""

    sent_s: float
    first_s: float
    ended_s: float
    tokens: int

    @property
    def tpot_s(self) -> float:
        """The mean time per output token after the first."""
        return (self.ended_s - self.first_s) / (self.tokens - 1)


def sums_of(step_model: Sequence[float], kind: StepClass) -> StepSums:
    """Return the sums of a class of steps from a scheduler's block."""
    return StepSums._make(step_model[kind * len(TERMS) : (kind + 1) * len(TERMS)])


def windows_of(readings: Sequence[Reading]) -> list[Window]:
    """Return the windows between readings, with the steps in them."""
    return [
        Window(
            before.at_s,
            after.at_s,
            decode=_grown(before.decode, after.decode),
            prefill=_grown(before.prefill, after.prefill),
        )
        for before, after in pairwise(readings)
    ]


def _grown(before: StepSums, after: StepSums) -> StepSums:
    return StepSums._make(b - a for a, b in zip(before, after, strict=True))


def fitted(readings: Sequence[Reading], kv_capacity_tokens: float) -> Hardware:
    """Return the hardware that the operator's fit makes of these readings.

    Raises:
        InvalidHardware: too few steps were taken.
    """
    model = model_of_sums(windows_of(readings))
    return fit_of_sums(model, kv_capacity_tokens=kv_capacity_tokens, name="cpu")


def speeds(readings: Sequence[Reading], hardware: Hardware) -> list[float]:
    """Return for each window the time of its steps, relative to what the fit gives for them."""
    found = []
    for window in windows_of(readings):
        decode, prefill = window.decode, window.prefill
        if decode.steps + prefill.steps >= MIN_STEPS:
            expected_s = _expected_s(hardware.costs, decode, prefill)
            found.append((decode.seconds + prefill.seconds) / expected_s)
    return found


def _expected_s(costs: StepCosts, decode: StepSums, prefill: StepSums) -> float:
    """Return the modeled time of steps: decode-only ones below the knee, the others above it."""
    return (
        costs.t0_s * (decode.steps + prefill.steps)
        + costs.w_s * decode.steps
        + costs.g_s * (prefill.prefill + prefill.sequences)
        + costs.b_s * (decode.sequences + prefill.sequences)
        + costs.c_s * (decode.kv + prefill.kv)
        + costs.request_s * prefill.steps
    )


def figures_of(
    before: Reading, after: Reading, ended: Sequence[Ended], span_s: tuple[float, float]
) -> Figures:
    """Return the figures between two readings.

    `ended`: the requests of the load. Those that ended within `span_s` count for throughput, all for
    latencies.

    Raises:
        ValueError: no request ended, or none was scheduled.
    """
    begin, end = span_s
    within = [row for row in ended if begin <= row.ended_s <= end]
    requests, steps = after.requests - before.requests, after.steps - before.steps
    if not within or requests <= 0 or steps <= 0:
        raise ValueError(f"no request ended or started between {begin:.1f} and {end:.1f} s")
    seconds = end - begin
    return Figures(
        requests_per_s=len(within) / seconds,
        tokens_per_s=sum(row.tokens for row in within) / seconds,
        queue_wait_s=(after.wait_s - before.wait_s) / requests,
        ttft_s=_mean(row.first_s - row.sent_s for row in within),
        tpot_s=_mean(row.tpot_s for row in within),
        itl_s=sum(row.ended_s - row.first_s for row in within)
        / sum(row.tokens - 1 for row in within),
        batch_time_s=(after.steps_s - before.steps_s) / steps,
        sequences=(after.sequences - before.sequences) / steps,
        busy_ratio=(after.steps_s - before.steps_s) / (after.at_s - before.at_s),
    )


def _mean(values: Iterable[float]) -> float:
    rows = list(values)
    return sum(rows) / len(rows)


def reading_of(engine: Engine) -> Reading:
    """Return the counters of a simulated engine at the end of its last step."""
    sample = engine.sample(engine.time)
    counters, decode, prefill = sample.counters, sample.decode, sample.prefill
    assert decode is not None
    assert prefill is not None
    return Reading(
        at_s=engine.time,
        requests=sum(getattr(counters, f"wait_count_{tier}") for tier in TIER_LABELS),
        wait_s=sum(getattr(counters, f"wait_sum_s_{tier}") for tier in TIER_LABELS),
        steps=counters.steps,
        steps_s=counters.batch_time_sum_s,
        sequences=decode.sequences + prefill.sequences,
        decode=decode,
        prefill=prefill,
    )


class Simulated:
    """One simulated engine that requests are played against, from time 0."""

    def __init__(self, hardware: Hardware, limits: Limits) -> None:
        self._engine = Engine(
            EngineSpec(
                hardware.costs,
                kv_capacity_tokens=hardware.kv_capacity_tokens,
                max_sequences=limits.sequences,
                max_tokens=limits.tokens,
                queue_limits=None,
            ),
            hardware.name,
            started=0.0,
        )
        self._ended: list[Ended] = []

    def open_loop(self, arrivals: Sequence[Arrival]) -> Figures:
        """Return the figures of requests that arrive at their times, until the last one ends."""
        engine, before = self._engine, reading_of(self._engine)
        for arrival in arrivals:
            engine.advance(arrival.at_s)
            self._arrive(arrival, arrival.at_s)
        while not engine.is_idle:
            engine.advance(engine.time + 1.0)
        self._take()
        return figures_of(before, reading_of(self._engine), self._ended, (0.0, engine.time))

    def closed_loop(
        self, arrivals: Sequence[Arrival], clients: int, span_s: tuple[float, float]
    ) -> Figures:
        """Return the figures within a span while so many clients always have one request in flight.

        Raises:
            ValueError: the planned requests do not last that long.
        """
        engine, planned = self._engine, iter(arrivals)
        for _ in range(clients):
            self._arrive(next(planned), 0.0)
        begin, end = span_s
        before: Reading | None = None
        while engine.time < end:
            engine.advance(math.nextafter(engine.time, math.inf))  # one step
            for _ in range(self._take()):
                arrival = next(planned, None)
                if arrival is None:
                    raise ValueError(f"{len(arrivals)} requests do not last {end:.0f} s")
                self._arrive(arrival, engine.time)
            if before is None and engine.time >= begin:
                before = reading_of(self._engine)
        assert before is not None
        return figures_of(before, reading_of(self._engine), self._ended, span_s)

    def _arrive(self, arrival: Arrival, at_s: float) -> None:
        request = Request(at_s, STANDARD, arrival.prompt_tokens, arrival.output_tokens)
        if not self._engine.arrive(request):
            raise ValueError(f"request {arrival.number} does not fit into the KV cache")

    def _take(self) -> int:
        """Note the requests that ended; return how many."""
        new = self._engine.take_ended()
        self._ended += [
            Ended(row.arrived, row.first_token, row.ended, row.generated) for row in new
        ]
        return len(new)

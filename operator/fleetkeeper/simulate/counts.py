"""The counters that a simulated engine exports, as a real one counts them."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from fleetkeeper.autoscale.signals.histogram_edges import snap_down
from fleetkeeper.autoscale.signals.samples import Counters
from fleetkeeper_contract.histogram_buckets import BATCH_TIME_EDGES_S, QUEUE_WAIT_EDGES_S
from fleetkeeper_contract.step_terms import StepSums
from fleetkeeper_contract.tiers import TIER_LABELS

_INDEX: Final = {name: index for index, name in enumerate(Counters._fields)}
_WAIT_COUNT, _WAIT_SUM, _WAIT_WITHIN, _ARRIVALS = (
    tuple(_INDEX[f"{prefix}_{tier}"] for tier in TIER_LABELS)
    for prefix in ("wait_count", "wait_sum_s", "wait_within", "arrivals")
)
_SQUARED = _INDEX["arrivals_squared"]
_STEP_COUNT, _STEP_SUM, _STEP_WITHIN = (
    _INDEX[name] for name in ("batch_time_count", "batch_time_sum_s", "batch_time_within")
)
_STEPS, _CALLS = _INDEX["steps"], _INDEX["schedule_calls"]
_PROMPT, _GENERATED = _INDEX["prompt_tokens"], _INDEX["generation_tokens"]
_PREEMPTIONS = _INDEX["preemptions"]
_TERMS: Final = len(StepSums._fields)


class Counts:
    """The cumulative counters of one engine, with the sums for the step-time model by class of step."""

    def __init__(self, queue_wait_s: float, batch_time_s: float, noise: float) -> None:
        self.counters = [0.0] * len(Counters._fields)
        self._decode = [0.0] * _TERMS
        self._prefill = [0.0] * _TERMS
        self._wait_edge_s = snap_down(queue_wait_s, QUEUE_WAIT_EDGES_S)
        self._step_edge_s = snap_down(batch_time_s, BATCH_TIME_EDGES_S)
        self._noise = noise
        self._bin = -1
        self._in_bin = 0

    def arrived(self, tier: int, now: float) -> None:
        """Count an arrival, and close its bin of one second when the next one begins."""
        self.counters[_ARRIVALS[tier]] += 1.0
        second = math.floor(now)
        if second != self._bin:
            self.counters[_SQUARED] += float(self._in_bin**2)
            self._bin, self._in_bin = second, 0
        self._in_bin += 1

    def scheduled(self, tier: int, wait_s: float, prompt: int) -> None:
        """Count a request's first step and its queue wait."""
        counters = self.counters
        counters[_WAIT_COUNT[tier]] += 1.0
        counters[_WAIT_SUM[tier]] += wait_s
        counters[_WAIT_WITHIN[tier]] += wait_s <= self._wait_edge_s
        counters[_PROMPT] += prompt

    def generated(self, tokens: int) -> None:
        """Count generated tokens."""
        self.counters[_GENERATED] += tokens

    def preempted(self) -> None:
        """Count a preemption."""
        self.counters[_PREEMPTIONS] += 1.0

    def prefill_step(self, tokens: int, sequences: int, kv: int, step_s: float) -> None:
        """Count one step with prefill tokens."""
        self._steps(1, step_s, share_within(step_s, self._step_edge_s, self._noise))
        _add(self._prefill, _Steps(1, float(tokens), float(sequences), kv, 0, step_s), self._noise)

    def decode_steps(
        self, steps: int, sequences: int, kv: int, first_s: float, growth_s: float
    ) -> None:
        """Count decode-only steps; step i has `kv + i sequences` KV tokens and takes `first + i growth`."""
        mean_s = first_s + growth_s * (steps - 1) / 2
        self._steps(steps, mean_s, share_within(mean_s, self._step_edge_s, self._noise))
        run = _Steps(steps, 0.0, float(sequences), kv, sequences, first_s, growth_s)
        _add(self._decode, run, self._noise)

    def _steps(self, steps: int, mean_s: float, within: float) -> None:
        counters = self.counters
        counters[_STEP_COUNT] += steps
        counters[_STEP_SUM] += steps * mean_s
        counters[_STEP_WITHIN] += steps * within
        counters[_STEPS] += steps
        counters[_CALLS] += steps

    def sums(self) -> tuple[StepSums, StepSums]:
        """Return the sums of decode-only steps and of steps with prefill."""
        return StepSums._make(self._decode), StepSums._make(self._prefill)


class _Steps(NamedTuple):
    """Steps whose KV tokens and times grow linearly."""

    n: int
    prefill: float
    sequences: float
    kv: float
    kv_growth: float
    first_s: float
    growth_s: float = 0.0


def _add(sums: list[float], steps: _Steps, noise: float) -> None:
    """Add the products of the steps: sums of i and i^2 give all of them."""
    n, prefill, sequences, kv, kv_growth, first_s, growth_s = steps
    i1 = n * (n - 1) / 2
    i2 = (n - 1) * n * (2 * n - 1) / 6
    kv_sum = n * kv + kv_growth * i1
    time_sum = n * first_s + growth_s * i1
    kv_kv = n * kv * kv + 2 * kv * kv_growth * i1 + kv_growth * kv_growth * i2
    kv_time = (
        n * kv * first_s + (kv * growth_s + kv_growth * first_s) * i1 + kv_growth * growth_s * i2
    )
    time_time = n * first_s**2 + 2 * first_s * growth_s * i1 + growth_s * growth_s * i2
    terms = (
        n, n * prefill, n * sequences, kv_sum, time_sum,
        n * prefill * prefill, n * prefill * sequences, prefill * kv_sum, prefill * time_sum,
        n * sequences * sequences, sequences * kv_sum, sequences * time_sum,
        kv_kv, kv_time, time_time * (1 + noise * noise),
    )  # fmt: skip
    for index, value in enumerate(terms):
        sums[index] += value


def share_within(step_s: float, edge_s: float, sigma: float) -> float:
    """Return the share of steps up to `edge_s` if single steps spread lognormally around `step_s`."""
    if sigma <= 0.0:
        return float(step_s <= edge_s)
    return 0.5 * (1 + math.erf(math.log(edge_s / step_s) / (sigma * math.sqrt(2))))

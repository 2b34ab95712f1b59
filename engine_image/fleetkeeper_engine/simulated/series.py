"""The metrics of a simulated engine: vLLM's names, labels and buckets, and the lateness of its steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from prometheus_client.core import HistogramMetricFamily, Metric

    from fleetkeeper_engine.simulated.core import Lateness

LATENCY_EDGES_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
FIRST_TOKEN_EDGES_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
NEXT_TOKEN_EDGES_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0)  # fmt: skip
STEP_TOKENS_EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LATENESS = "fleetkeeper_simulated_step_lateness_seconds"
"""Ours: vLLM has no planned times. P99 above 20 ms: the machine is too busy for the times of the steps."""
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


class _Prefill(Protocol):
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...


class _Request(Protocol):
    @property
    def arrival_s(self) -> float: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...


class _Histogram:
    """Counts of values by the first edge that is not below them."""

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value


@dataclass(frozen=True, slots=True)
class Gauges:
    """The state of the scheduler when metrics are read. `kv_usage` is a ratio."""

    running: int
    waiting: int
    kv_usage: float
    preemptions: int
    num_gpu_blocks: int
    block_size: int


class Series:
    """Counters and histograms since the start. Times are seconds."""

    def __init__(self, model: str, max_length: int) -> None:
        self._labels = (model, "0")
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self._ended = dict.fromkeys(FINISH_REASONS, 0)
        lengths = _one_two_five(max_length)
        self._histograms = {
            "time_to_first_token_seconds": _Histogram(FIRST_TOKEN_EDGES_S),
            "inter_token_latency_seconds": _Histogram(NEXT_TOKEN_EDGES_S),
            "e2e_request_latency_seconds": _Histogram(LATENCY_EDGES_S),
            "request_prompt_tokens": _Histogram(lengths),
            "request_generation_tokens": _Histogram(lengths),
            "iteration_tokens_total": _Histogram(STEP_TOKENS_EDGES),
        }
        self._first, self._next, self._whole, self._prompts, self._answers, self._steps = (
            self._histograms.values()
        )

    def prefilled(self, prefill: _Prefill, seconds: float) -> None:
        """Count a prompt whose first token came after this time."""
        self.prompt_tokens += prefill.num_prompt_tokens
        self.cached_tokens += prefill.num_cached_tokens
        self._first.observe(seconds)

    def followed(self, seconds: float) -> None:
        """Count a further output of a sequence, this long after the one before it."""
        self._next.observe(seconds)

    def stepped(self, tokens: int) -> None:
        """Count a step with tokens."""
        if tokens:
            self._steps.observe(tokens)

    def ended(self, request: _Request, reason: str, generated: int, now: float) -> None:
        """Count a sequence that ended. As in vLLM, one that its client aborted is not among them."""
        self._ended[reason] += 1
        self._whole.observe(now - request.arrival_s)
        self._prompts.observe(len(request.prompt_token_ids))
        self._answers.observe(generated)

    def render(self, gauges: Gauges, lateness: Lateness) -> bytes:
        """Return the metrics in Prometheus' format."""
        # Imported with the first scrape: a start does not wait for it.
        from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Once([*self._families(gauges), _family_of(lateness)]))
        return generate_latest(registry)

    def _families(self, gauges: Gauges) -> Iterator[Metric]:
        from prometheus_client.core import (  # noqa: PLC0415 - as above
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        names = ("model_name", "engine")
        for name, value in (
            ("num_requests_running", gauges.running),
            ("num_requests_waiting", gauges.waiting),
            ("kv_cache_usage_perc", gauges.kv_usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", _HELP[name], labels=names)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, value in (
            ("prefix_cache_queries", self.prompt_tokens),
            ("prefix_cache_hits", self.cached_tokens),
            ("num_preemptions", gauges.preemptions),
            ("prompt_tokens", self.prompt_tokens),
            ("prompt_tokens_cached", self.cached_tokens),
            ("generation_tokens", self.generation_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", _HELP[name], labels=names)
            counter.add_metric(self._labels, value)
            yield counter
        ended = CounterMetricFamily(
            "vllm:request_success", _HELP["request_success"], labels=(*names, "finished_reason")
        )
        for reason, value in self._ended.items():
            ended.add_metric((*self._labels, reason), value)
        yield ended
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            _HELP["cache_config_info"],
            labels=("block_size", "engine", "num_gpu_blocks"),
        )
        info.add_metric((str(gauges.block_size), "0", str(gauges.num_gpu_blocks)), 1)
        yield info
        for name, histogram in self._histograms.items():
            family = HistogramMetricFamily(f"vllm:{name}", _HELP[name], labels=names)
            edges = [*(str(float(edge)) for edge in histogram.edges), "+Inf"]
            totals = map(float, accumulate(histogram.counts))
            family.add_metric(self._labels, list(zip(edges, totals, strict=True)), histogram.sum)
            yield family


class _Once:
    """A collector with these families."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _family_of(lateness: Lateness) -> HistogramMetricFamily:
    from prometheus_client.core import HistogramMetricFamily  # noqa: PLC0415 - as above

    family = HistogramMetricFamily(LATENESS, "Time from a step's planned end to its end.")
    edges = [*map(str, lateness.EDGES_S), "+Inf"]
    totals = map(float, accumulate(lateness.counts))
    family.add_metric((), list(zip(edges, totals, strict=True)), lateness.sum_s)
    return family


def _one_two_five(most: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50 ... up to a number."""
    found: list[float] = []
    factor = 1
    while True:
        for digit in (1, 2, 5):
            if digit * factor > most:
                return found
            found.append(digit * factor)
        factor *= 10


_HELP = {
    "num_requests_running": "Sequences in the batch (simulated).",
    "num_requests_waiting": "Sequences that wait (simulated).",
    "kv_cache_usage_perc": "Share of the KV cache in use (simulated). 1 is all of it.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens that the prefix cache had.",
    "num_preemptions": "Preempted sequences.",
    "prompt_tokens": "Prompt tokens.",
    "prompt_tokens_cached": "Prompt tokens that the prefix cache had.",
    "generation_tokens": "Generated tokens.",
    "request_success": "Sequences that ended, by reason.",
    "cache_config_info": "The KV cache.",
    "time_to_first_token_seconds": "Time from arrival to the first token.",
    "inter_token_latency_seconds": "Time between two outputs of a sequence.",
    "e2e_request_latency_seconds": "Time from arrival to the last token.",
    "request_prompt_tokens": "Prompt tokens of a sequence.",
    "request_generation_tokens": "Generated tokens of a sequence.",
    "iteration_tokens_total": "Tokens of a step.",
}

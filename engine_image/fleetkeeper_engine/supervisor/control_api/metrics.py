"""The pod's metrics in Prometheus' format, from one read of its state. Pure except for that read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from fleetkeeper_contract.step_terms import TERMS, StepClass
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.limits import LimitRange, limits_in_force
from fleetkeeper_engine.shm.layout import (
    CapBlock,
    GrantRefusal,
    HeartbeatBlock,
    MiddlewareBlock,
    Outcome,
    SchedulerBlock,
    SupervisorBlock,
)
from fleetkeeper_engine.spec import CONTRACT
from fleetkeeper_engine.supervisor.control_api.metric_table import METRICS_BY_NAME
from fleetkeeper_engine.supervisor.health import stalled_s
from fleetkeeper_engine.supervisor.memory.watch import FRESH_S
from fleetkeeper_engine.supervisor.state import PodState


@dataclass(frozen=True, slots=True)
class Sample:
    """A value with the values of its labels."""

    labels: tuple[str, ...]
    value: float


def render_metrics(
    pod: PodState, kids: Iterable[str], now: float, engine_text: bytes | None
) -> bytes:
    """Return our metrics, then vLLM's own unchanged."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(list(_families(pod, kids, now, engine_up=engine_text is not None))))
    return generate_latest(registry) + (engine_text or b"")


class _Once(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(
    pod: PodState, kids: Iterable[str], now: float, *, engine_up: bool
) -> Iterator[Metric]:
    scheduler, heartbeat, middleware = pod.scheduler(), pod.heartbeat(), pod.middleware()
    yield from _engine(pod, scheduler, now, engine_up=engine_up)
    yield from _memory(pod, now)
    yield from _limits(pod, scheduler, kids, now)
    # Counters that do not move while requests are answered would look like a hang, so none is
    # better.
    instrumentation_disabled = scheduler is not None and scheduler.instrumentation_disabled
    if not instrumentation_disabled and (scheduler is not None or middleware is not None):
        yield from _load(scheduler, middleware)
        yield from _oldest(heartbeat, middleware or MiddlewareBlock(), now)
    if middleware is not None:
        yield from _arrivals(middleware)
        yield from _latencies(middleware)
    if scheduler is not None and not instrumentation_disabled:
        yield from _work(scheduler)
        yield _counter("fleetkeeper_schedule_calls_total", heartbeat.schedule_calls)
    yield _gauge("fleetkeeper_stalled_seconds", stalled_s(pod.progress, now))
    yield _gauge("fleetkeeper_hung", pod.is_hung(now))
    yield _gauge("fleetkeeper_idle_seconds", pod.activity.idle_s(now))


def _engine(
    pod: PodState, scheduler: SchedulerBlock | None, now: float, *, engine_up: bool
) -> Iterator[Metric]:
    yield _gauges(
        "fleetkeeper_engine_info",
        [Sample((pod.vllm_version, pod.document.accelerator.value, str(CONTRACT)), 1)],
    )
    if scheduler is not None:
        yield _gauge("fleetkeeper_live_limits_supported", scheduler.supported)
    yield _gauge("fleetkeeper_engine_metrics_up", engine_up)
    yield _gauges(
        "fleetkeeper_start_seconds",
        [Sample((stage.value,), seconds) for stage, seconds in pod.start_seconds(now).items()],
    )
    yield _gauge("fleetkeeper_draining", pod.draining)
    dropped = sum(outlet.dropped for outlet in pod.outlets)
    yield _counter("fleetkeeper_log_dropped_bytes_total", dropped)
    yield _counters(
        "fleetkeeper_control_requests_total",
        [Sample((str(code),), count) for code, count in sorted(pod.control_answers.items())],
    )


def _memory(pod: PodState, now: float) -> Iterator[Metric]:
    memory = pod.memory
    yield _gauge("fleetkeeper_memory_cap_ratio", memory.cap_ratio)
    if memory.is_fresh(now):
        yield _gauge("fleetkeeper_memory_used_ratio", memory.used_ratio)
        yield _gauge("fleetkeeper_memory_own", memory.own)
        yield _gauge("fleetkeeper_memory_peak_ratio", memory.peak_ratio)
        yield _gauge("fleetkeeper_memory_over_cap", memory.over_cap)
    fragmented = [cap.fragmentation_ratio for cap in pod.caps() if _is_shown(cap, now)]
    if fragmented:
        yield _gauge("fleetkeeper_memory_fragmentation_ratio", max(fragmented))


def _is_shown(cap: CapBlock, now: float) -> bool:
    """Return whether the allocator's figures are known and recent: figures of an ended reporter disappear."""
    return cap.reserved_bytes > 0 and now - cap.written <= FRESH_S


def _limits(
    pod: PodState, scheduler: SchedulerBlock | None, kids: Iterable[str], now: float
) -> Iterator[Metric]:
    yield _gauges("fleetkeeper_control_keys", [Sample((kid,), 1) for kid in kids])
    yield _gauge("fleetkeeper_limit_lease_seconds", pod.lease.seconds_left(now))
    request = pod.lease.request
    accepted = request.generation if request else 0
    applied = scheduler.generation if scheduler else 0
    yield _gauges(
        "fleetkeeper_limit_generation",
        [Sample(("accepted",), accepted), Sample(("applied",), applied)],
    )
    if scheduler is None:
        return
    sequences = LimitRange(scheduler.floor_sequences, scheduler.ceiling_sequences)
    tokens = LimitRange(scheduler.floor_tokens, scheduler.ceiling_tokens)
    block = SupervisorBlock(
        sequences=request.sequences if request else 0,
        tokens=request.tokens if request else 0,
        lease_deadline=pod.lease.deadline,
    )
    wanted = limits_in_force(block, sequences, tokens, now)
    yield _limit("sequences", wanted.sequences, scheduler.limit_sequences, sequences)
    yield _limit("tokens", wanted.tokens, scheduler.limit_tokens, tokens)


def _limit(what: str, wanted: int, effective: int, allowed: LimitRange) -> Metric:
    return _gauges(
        f"fleetkeeper_limit_{what}",
        [
            Sample(("wanted",), wanted),
            Sample(("effective",), effective),
            Sample(("floor",), allowed.floor),
            Sample(("ceiling",), allowed.ceiling),
        ],
    )


def _load(scheduler: SchedulerBlock | None, middleware: MiddlewareBlock | None) -> Iterator[Metric]:
    inside, outside = scheduler or SchedulerBlock(), middleware or MiddlewareBlock()
    waiting, running = [], []
    for tier in Tier:
        label = (tier.label,)
        waiting.append(Sample(label, outside.waiting[tier] + inside.waiting[tier]))
        running.append(Sample(label, inside.running[tier]))
    yield _gauges("fleetkeeper_waiting", waiting)
    yield _gauges("fleetkeeper_running", running)


def _oldest(heartbeat: HeartbeatBlock, middleware: MiddlewareBlock, now: float) -> Iterator[Metric]:
    oldest = []
    for tier in Tier:
        arrivals = (block.oldest_arrival[tier] for block in (heartbeat, middleware))
        waits = (now - arrival for arrival in arrivals if arrival > 0)
        oldest.append(Sample((tier.label,), max(waits, default=0.0)))
    yield _gauges("fleetkeeper_oldest_wait_seconds", oldest)


def _arrivals(middleware: MiddlewareBlock) -> Iterator[Metric]:
    for name in ("arrivals", "arrivals_squared"):
        counts: Sequence[int] = getattr(middleware, name)
        yield _counters(
            f"fleetkeeper_{name}_total", [Sample((tier.label,), counts[tier]) for tier in Tier]
        )
    yield _counters(
        "fleetkeeper_requests_total",
        [
            Sample((tier.label, outcome.label), middleware.outcomes[len(Outcome) * tier + outcome])
            for tier in Tier
            for outcome in Outcome
        ],
    )
    yield _counter("fleetkeeper_unauthorized_total", middleware.unauthorized)
    yield _counter("fleetkeeper_rejected_total", middleware.rejected)
    yield _gauge("fleetkeeper_grants_demanded", middleware.grants_demanded)
    yield _counters(
        "fleetkeeper_grants_refused_total",
        [Sample((reason.label,), middleware.grants_refused[reason]) for reason in GrantRefusal],
    )


def _latencies(middleware: MiddlewareBlock) -> Iterator[Metric]:
    first = _histogram_family("fleetkeeper_time_to_first_token_seconds")
    gaps = _histogram_family("fleetkeeper_inter_token_latency_seconds")
    for tier in Tier:
        label = (tier.label,)
        first_sum, gap_sum = middleware.time_to_first_token_sum, middleware.inter_token_latency_sum
        _add_histogram(first, label, middleware.time_to_first_token_of(tier), first_sum[tier])
        _add_histogram(gaps, label, middleware.inter_token_latency_of(tier), gap_sum[tier])
    yield first
    yield gaps


def _work(scheduler: SchedulerBlock) -> Iterator[Metric]:
    queue_wait = _histogram_family("fleetkeeper_queue_wait_seconds")
    for tier in Tier:
        _add_histogram(
            queue_wait, (tier.label,), scheduler.queue_wait_of(tier), scheduler.queue_wait_sum[tier]
        )
    yield queue_wait
    for name in ("batch_time", "batch_sequences", "batch_tokens"):
        suffix = "_seconds" if name == "batch_time" else ""
        family = _histogram_family(f"fleetkeeper_{name}{suffix}")
        _add_histogram(
            family, (), getattr(scheduler, f"{name}_buckets"), getattr(scheduler, f"{name}_sum")
        )
        yield family
    for index, term in enumerate(TERMS):
        yield _counters(
            f"fleetkeeper_step_model_{term}_total",
            [
                Sample((step.label,), scheduler.step_model[len(TERMS) * step + index])
                for step in StepClass
            ],
        )
    yield _counter("fleetkeeper_steps_total", scheduler.worked_steps)
    yield _counter("fleetkeeper_prompt_tokens_total", scheduler.prompt_tokens)
    yield _counter("fleetkeeper_generation_tokens_total", scheduler.generation_tokens)
    yield _counter("fleetkeeper_preemptions_total", scheduler.preemptions)
    yield _gauge("fleetkeeper_kv_capacity_tokens", scheduler.kv_capacity_tokens)
    yield _gauge("fleetkeeper_kv_resident_tokens", scheduler.kv_resident_tokens)


def _gauges(name: str, samples: Iterable[Sample]) -> Metric:
    known = METRICS_BY_NAME[name]
    family = GaugeMetricFamily(name, known.help, labels=known.labels)
    for sample in samples:
        family.add_metric(sample.labels, sample.value)
    return family


def _gauge(name: str, value: float) -> Metric:
    return _gauges(name, [Sample((), value)])


def _counters(name: str, samples: Iterable[Sample]) -> Metric:
    known = METRICS_BY_NAME[name]
    family = CounterMetricFamily(name, known.help, labels=known.labels)
    for sample in samples:
        family.add_metric(sample.labels, sample.value)
    return family


def _counter(name: str, value: float) -> Metric:
    return _counters(name, [Sample((), value)])


def _histogram_family(name: str) -> HistogramMetricFamily:
    known = METRICS_BY_NAME[name]
    return HistogramMetricFamily(name, known.help, labels=known.labels)


def _add_histogram(
    family: HistogramMetricFamily, labels: tuple[str, ...], buckets: Sequence[int], total: float
) -> None:
    edges = [*(f"{edge:.10g}" for edge in METRICS_BY_NAME[family.name].edges), "+Inf"]
    counts = map(float, accumulate(buckets))  # as Prometheus' `le`; the last is the total
    family.add_metric(labels, list(zip(edges, counts, strict=True)), total)

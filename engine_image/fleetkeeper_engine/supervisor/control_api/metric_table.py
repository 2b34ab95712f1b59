"""Every metric that a pod exports, as a table: the contract with the operator and its dashboards."""

from __future__ import annotations

import json
from dataclasses import dataclass

from fleetkeeper_engine.shm.histogram import (
    BATCH_SEQUENCES_EDGES,
    BATCH_TIME_EDGES_S,
    BATCH_TOKENS_EDGES,
    QUEUE_WAIT_EDGES_S,
)
from fleetkeeper_engine.shm.layout import Outcome, Tier
from fleetkeeper_engine.shm.step_sums import TERMS, StepClass
from fleetkeeper_engine.spec import CONTRACT

TIERS = tuple(tier.label for tier in Tier)
OUTCOMES = tuple(outcome.label for outcome in Outcome)
STEP_CLASSES = tuple(step.label for step in StepClass)
LIMIT_KINDS = ("wanted", "effective", "floor", "ceiling")


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported family: its full name, Prometheus type, label names and meaning."""

    name: str
    type: str
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, tuple[str, ...]], ...] = ()
    edges: tuple[float, ...] = ()


_BY_TIER = (("tier", TIERS),)

METRICS: tuple[Metric, ...] = (
    Metric(
        "fleetkeeper_queue_wait_seconds",
        "histogram",
        "Time from a request's arrival to its first schedule, observed at that schedule.",
        ("tier",),
        _BY_TIER,
        QUEUE_WAIT_EDGES_S,
    ),
    Metric(
        "fleetkeeper_batch_time_seconds",
        "histogram",
        "Time between two updates from output while there is work: one engine step.",
        edges=BATCH_TIME_EDGES_S,
    ),
    Metric(
        "fleetkeeper_batch_sequences",
        "histogram",
        "Sequences in a step.",
        edges=BATCH_SEQUENCES_EDGES,
    ),
    Metric("fleetkeeper_batch_tokens", "histogram", "Tokens in a step.", edges=BATCH_TOKENS_EDGES),
    *(
        Metric(
            f"fleetkeeper_step_model_{name}_total",
            "counter",
            "Sum over steps of the named product: prefill tokens, sequences, resident KV tokens, seconds.",
            ("step_class",),
            (("step_class", STEP_CLASSES),),
        )
        for name in TERMS
    ),
    Metric(
        "fleetkeeper_oldest_wait_seconds",
        "gauge",
        "Age of the oldest request that was not scheduled yet, middleware and engine together.",
        ("tier",),
        _BY_TIER,
    ),
    Metric(
        "fleetkeeper_waiting",
        "gauge",
        "Requests that were not scheduled yet, middleware and engine together.",
        ("tier",),
        _BY_TIER,
    ),
    Metric("fleetkeeper_running", "gauge", "Requests being served.", ("tier",), _BY_TIER),
    Metric(
        "fleetkeeper_arrivals_total",
        "counter",
        "Requests that arrived; a retry with the same X-Request-Id is not counted again.",
        ("tier",),
        _BY_TIER,
    ),
    Metric(
        "fleetkeeper_arrivals_squared_total",
        "counter",
        "Sum over 1 s bins of the squared number of arrivals: with arrivals, the index of dispersion.",
        ("tier",),
        _BY_TIER,
    ),
    Metric(
        "fleetkeeper_limit_sequences",
        "gauge",
        "Limit of sequences in a batch.",
        ("kind",),
        (("kind", LIMIT_KINDS),),
    ),
    Metric(
        "fleetkeeper_limit_tokens",
        "gauge",
        "Limit of tokens in a step. Effective is above wanted where what runs needs more to progress.",
        ("kind",),
        (("kind", LIMIT_KINDS),),
    ),
    Metric(
        "fleetkeeper_limit_generation",
        "gauge",
        "Generation of the limits: as ordered last, and as read by the scheduler last.",
        ("kind",),
        (("kind", ("accepted", "applied")),),
    ),
    Metric("fleetkeeper_limit_lease_seconds", "gauge", "Seconds left of the lease of the limits."),
    Metric("fleetkeeper_control_keys", "gauge", "1 for each key this pod trusts.", ("kid",)),
    Metric(
        "fleetkeeper_control_requests_total",
        "counter",
        "Requests for limits, by answer.",
        ("code",),
        (("code", ("200", "401", "409", "422")),),
    ),
    Metric(
        "fleetkeeper_requests_total",
        "counter",
        "Requests by outcome at admission.",
        ("tier", "outcome"),
        (("tier", TIERS), ("outcome", OUTCOMES)),
    ),
    Metric("fleetkeeper_schedule_calls_total", "counter", "Calls of the scheduler."),
    Metric("fleetkeeper_steps_total", "counter", "Steps that held at least one token."),
    Metric("fleetkeeper_prompt_tokens_total", "counter", "Prompt tokens computed."),
    Metric("fleetkeeper_generation_tokens_total", "counter", "Tokens generated."),
    Metric("fleetkeeper_preemptions_total", "counter", "Sequences that lost their KV cache."),
    Metric(
        "fleetkeeper_memory_used_ratio",
        "gauge",
        "Memory in use now, of the accelerator's (cuda) or the pod's (cpu).",
    ),
    Metric(
        "fleetkeeper_memory_own",
        "gauge",
        "1 when the memory in use is of this pod's processes alone, "
        "0 when NVML does not say whose it is and whole devices are counted.",
    ),
    Metric(
        "fleetkeeper_memory_peak_ratio",
        "gauge",
        "Largest memory in use since start, 100 ms samples.",
    ),
    Metric("fleetkeeper_memory_cap_ratio", "gauge", "The cap of memory."),
    Metric(
        "fleetkeeper_memory_over_cap",
        "gauge",
        "1 while new sequences are stopped because memory was above its cap for 10 s.",
    ),
    Metric(
        "fleetkeeper_memory_fragmentation_ratio",
        "gauge",
        "Share of the allocator's reserved memory that holds nothing (cuda).",
    ),
    Metric("fleetkeeper_kv_capacity_tokens", "gauge", "Tokens that the KV cache can hold."),
    Metric("fleetkeeper_kv_resident_tokens", "gauge", "Tokens in the KV cache."),
    Metric(
        "fleetkeeper_unauthorized_total",
        "counter",
        "Requests refused for want of a valid API key.",
    ),
    Metric(
        "fleetkeeper_rejected_total",
        "counter",
        "Requests refused for an unknown tier, an unknown path, a response in background or their body.",
    ),
    Metric(
        "fleetkeeper_engine_metrics_up",
        "gauge",
        "1 when vLLM's own metrics answered at this scrape.",
    ),
    Metric(
        "fleetkeeper_stalled_seconds",
        "gauge",
        "Seconds for which the engine had work and made no step.",
    ),
    Metric(
        "fleetkeeper_hung",
        "gauge",
        "1 while the engine is stalled for longer than the step in flight and stallSeconds allow. "
        "0 otherwise, and while new sequences are stopped by the memory cap.",
    ),
    Metric(
        "fleetkeeper_log_dropped_bytes_total",
        "counter",
        "Bytes of the engine's output and of the log that were dropped because nobody read them.",
    ),
    Metric("fleetkeeper_draining", "gauge", "1 while the pod leaves."),
    Metric(
        "fleetkeeper_engine_info",
        "gauge",
        "1; what runs here.",
        ("vllm_version", "accelerator", "contract"),
    ),
    Metric(
        "fleetkeeper_live_limits_supported",
        "gauge",
        "1 when the scheduler takes live limits, 0 when the engine runs as it is.",
    ),
)

METRICS_BY_NAME = {metric.name: metric for metric in METRICS}


def contract_files() -> dict[str, str]:
    """The generated table, by path from the repository's root."""
    table = {
        "contract": CONTRACT,
        "metrics": [
            {
                "name": metric.name,
                "type": metric.type,
                "help": metric.help,
                "labels": list(metric.labels),
                **({"values": {k: list(v) for k, v in metric.values}} if metric.values else {}),
                **({"edges": list(metric.edges)} if metric.edges else {}),
            }
            for metric in METRICS
        ],
    }
    return {"engine_image/contract/metrics.json": json.dumps(table, indent=2) + "\n"}

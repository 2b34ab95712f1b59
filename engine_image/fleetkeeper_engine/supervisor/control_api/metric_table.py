"""Table of every metric that a pod exports: the contract with the operator and its dashboards."""

from __future__ import annotations

import json
from dataclasses import dataclass

from fleetkeeper_contract.histogram_buckets import (
    BATCH_SEQUENCES_EDGES,
    BATCH_TIME_EDGES_S,
    BATCH_TOKENS_EDGES,
    INTER_TOKEN_LATENCY_EDGES_S,
    QUEUE_WAIT_EDGES_S,
    TIME_TO_FIRST_TOKEN_EDGES_S,
)
from fleetkeeper_contract.step_terms import TERMS, StepClass
from fleetkeeper_contract.tiers import TIER_LABELS
from fleetkeeper_engine.shm.layout import GrantRefusal, Outcome
from fleetkeeper_engine.spec import CONTRACT
from fleetkeeper_engine.supervisor.start_stages import StartStage

OUTCOMES = tuple(outcome.label for outcome in Outcome)
GRANT_REFUSALS = tuple(reason.label for reason in GrantRefusal)
START_STAGES = tuple(stage.value for stage in StartStage)
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


_BY_TIER = (("tier", TIER_LABELS),)

METRICS: tuple[Metric, ...] = (
    Metric(
        "fleetkeeper_queue_wait_seconds",
        "histogram",
        "Time from a request's arrival until it was first scheduled, observed at that moment.",
        ("tier",),
        _BY_TIER,
        QUEUE_WAIT_EDGES_S,
    ),
    Metric(
        "fleetkeeper_batch_time_seconds",
        "histogram",
        "Duration of an engine step: the time between two outputs while there is work.",
        edges=BATCH_TIME_EDGES_S,
    ),
    Metric(
        "fleetkeeper_time_to_first_token_seconds",
        "histogram",
        "Time from a request's arrival until the first frame with a token left vLLM. Streamed answers "
        "only: one that is sent whole has no first token, and is not counted.",
        ("tier",),
        _BY_TIER,
        TIME_TO_FIRST_TOKEN_EDGES_S,
    ),
    Metric(
        "fleetkeeper_inter_token_latency_seconds",
        "histogram",
        "Time between two successive frames with tokens of one streamed answer. A frame may hold "
        "several tokens. Requests for several sequences are not counted.",
        ("tier",),
        _BY_TIER,
        INTER_TOKEN_LATENCY_EDGES_S,
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
            "Sum over steps of the named product of prefill tokens, sequences, resident KV tokens and seconds.",
            ("step_class",),
            (("step_class", STEP_CLASSES),),
        )
        for name in TERMS
    ),
    Metric(
        "fleetkeeper_oldest_wait_seconds",
        "gauge",
        "Age of the oldest request that is not scheduled yet, in middleware or engine.",
        ("tier",),
        _BY_TIER,
    ),
    Metric(
        "fleetkeeper_waiting",
        "gauge",
        "Requests that are not scheduled yet, in middleware and engine.",
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
        "Sum over 1 s bins of the squared number of arrivals. With arrivals it gives the index of dispersion.",
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
        "Limit of tokens in a step. Effective is above wanted if the running sequences need more to progress.",
        ("kind",),
        (("kind", LIMIT_KINDS),),
    ),
    Metric(
        "fleetkeeper_limit_generation",
        "gauge",
        "Generation of the limits: last accepted, and last read by the scheduler.",
        ("kind",),
        (("kind", ("accepted", "applied")),),
    ),
    Metric("fleetkeeper_limit_lease_seconds", "gauge", "Seconds left of the limits lease."),
    Metric("fleetkeeper_control_keys", "gauge", "1 for each key that this pod trusts.", ("kid",)),
    Metric(
        "fleetkeeper_control_requests_total",
        "counter",
        "Requests for limits, by status code.",
        ("code",),
        (("code", ("200", "401", "409", "422")),),
    ),
    Metric(
        "fleetkeeper_requests_total",
        "counter",
        "Requests by outcome at admission.",
        ("tier", "outcome"),
        (("tier", TIER_LABELS), ("outcome", OUTCOMES)),
    ),
    Metric("fleetkeeper_schedule_calls_total", "counter", "Calls of the scheduler."),
    Metric("fleetkeeper_steps_total", "counter", "Steps with at least one token."),
    Metric("fleetkeeper_prompt_tokens_total", "counter", "Prompt tokens computed."),
    Metric("fleetkeeper_generation_tokens_total", "counter", "Tokens generated."),
    Metric(
        "fleetkeeper_preemptions_total",
        "counter",
        "Sequences that were preempted and lost their KV cache.",
    ),
    Metric(
        "fleetkeeper_memory_used_ratio",
        "gauge",
        "Memory in use, as a share of the accelerator's (cuda) or the pod's (cpu).",
    ),
    Metric(
        "fleetkeeper_memory_own",
        "gauge",
        "1 if the memory in use covers this pod's processes alone, "
        "0 if NVML does not list them and whole devices are counted.",
    ),
    Metric(
        "fleetkeeper_memory_peak_ratio",
        "gauge",
        "Peak of the memory in use since start, from 100 ms samples.",
    ),
    Metric("fleetkeeper_memory_cap_ratio", "gauge", "The memory cap."),
    Metric(
        "fleetkeeper_memory_over_cap",
        "gauge",
        "1 while no new sequences start because memory was above its cap for 10 s.",
    ),
    Metric(
        "fleetkeeper_memory_fragmentation_ratio",
        "gauge",
        "Share of the allocator's reserved memory that is not allocated (cuda).",
    ),
    Metric("fleetkeeper_kv_capacity_tokens", "gauge", "Tokens that the KV cache can hold."),
    Metric("fleetkeeper_kv_resident_tokens", "gauge", "Tokens in the KV cache."),
    Metric(
        "fleetkeeper_unauthorized_total",
        "counter",
        "Requests refused because the API key was missing or wrong.",
    ),
    Metric(
        "fleetkeeper_rejected_total",
        "counter",
        "Requests refused for an unknown tier, an unknown path, a background response or their body.",
    ),
    Metric(
        "fleetkeeper_grants_demanded",
        "gauge",
        "1 while the engine accepts only requests with a grant of the gateway (spec.access: Gateway).",
    ),
    Metric(
        "fleetkeeper_grants_refused_total",
        "counter",
        "Requests refused because their grant was missing, invalid, expired or used before.",
        ("reason",),
        (("reason", GRANT_REFUSALS),),
    ),
    Metric(
        "fleetkeeper_engine_metrics_up",
        "gauge",
        "1 if vLLM's own metrics were available at this scrape.",
    ),
    Metric(
        "fleetkeeper_start_seconds",
        "gauge",
        "Seconds of each stage of the last start, from the start of the container. weights: the engine's "
        "processes start, the model is fetched and its weights are loaded. load: compilation, KV cache "
        "and API server. warm_up: the first tokens. A stage appears when it begins, and the last one "
        "grows until the pod is ready. Without load, weights includes it.",
        ("stage",),
        (("stage", START_STAGES),),
    ),
    Metric(
        "fleetkeeper_stalled_seconds",
        "gauge",
        "Seconds for which the engine had pending requests but completed no step.",
    ),
    Metric(
        "fleetkeeper_hung",
        "gauge",
        "1 while the engine is stalled for longer than the step in flight and stallSeconds allow. "
        "0 otherwise, and while the memory cap stops new sequences.",
    ),
    Metric(
        "fleetkeeper_idle_seconds",
        "gauge",
        "Seconds since the last request for the engine arrived, waited or ran; 0 while one does. Refused "
        "requests count, probes do not. Without a request since the pod became ready, the time since then.",
    ),
    Metric(
        "fleetkeeper_log_dropped_bytes_total",
        "counter",
        "Bytes of the engine's output and of the log that were dropped because they were not read.",
    ),
    Metric("fleetkeeper_draining", "gauge", "1 while the pod is draining."),
    Metric(
        "fleetkeeper_engine_info",
        "gauge",
        "Engine build information; always 1.",
        ("vllm_version", "accelerator", "contract"),
    ),
    Metric(
        "fleetkeeper_live_limits_supported",
        "gauge",
        "1 if the scheduler supports live limits, 0 if the engine runs without them.",
    ),
)

METRICS_BY_NAME = {metric.name: metric for metric in METRICS}


def contract_files() -> dict[str, str]:
    """Return the generated table, by path from the repository's root."""
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
    return {"engine_image/schemas/metrics.json": json.dumps(table, indent=2) + "\n"}

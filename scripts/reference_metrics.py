"""The metrics page and the index of runbooks, generated from the contract, operator and reasons.

Tables here hold what no program defines; tests/unit/repository/test_docs_reference.py compares them with the
programs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetkeeper.api.conditions import ConditionType, Reason
from fleetkeeper.reconcile.status.gauges import MAIN
from fleetkeeper.runtime.autoscaler.metrics import ControlMetrics
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from reference_pages import FOLDER, page, row

ROOT = Path(__file__).resolve().parent.parent
RUNBOOKS = "docs/runbooks"
STEP_MODEL = "fleetkeeper_step_model_"

CONTROL_GAUGES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "decision_replicas": (
        ("kind",),
        "Replicas: `recommended` (by the control loop), `allocated` (the recommendation after bounds and budgets), `live` (in the Deployment), `ready` (ready pods of it that are not being deleted).",
    ),
    "decision_limit_sequences": (
        (),
        "Maximum number of sequences in a batch, as currently in force.",
    ),
    "decision_limit_tokens": ((), "Maximum number of tokens in a step, as currently in force."),
    "decision_advisory": ((), "1 if batching.mode is Advisory."),
    "breaker_state": (
        ("breaker",),
        "0 closed, 0.5 half-open, 1 open: `control`, each tier (`realtime`, `standard`, `batch`), and `source` (1: Prometheus returns no fresh samples).",
    ),
    "signal_coverage_ratio": ((), "Share of the ready replicas whose signals are used."),
    "signal_queue_wait_seconds": (
        (),
        "Queue wait that is compared with the objective: the mean of scheduled requests or the wait of the oldest waiting one, whichever is longer.",
    ),
    "signal_batch_time_seconds": ((), "Mean time of an engine step."),
    "signal_time_to_first_token_seconds": (
        (),
        "Mean time to first token of streamed answers in the last half minute: realtime and standard requests, or batch if it is alone. Absent without streamed answers. No decision uses it.",
    ),
    "signal_inter_token_latency_seconds": (
        (),
        "Mean inter-token latency of streamed answers, for the same requests. Absent without streamed answers. No decision uses it.",
    ),
    "signal_arrivals_per_second": ((), "Arriving requests per second, all tiers."),
    "signal_waiting": ((), "Requests that are not scheduled yet."),
    "signal_running": ((), "Requests being served."),
    "signal_kv_ratio": ((), "Share of the KV cache in use."),
    "objective_queue_wait_seconds": ((), "objectives.queueWaitMilliseconds, in seconds."),
    "objective_batch_time_seconds": ((), "objectives.batchTimeMilliseconds, in seconds."),
    "pressure_ratio": (
        (),
        "Highest ratio of queue wait, batch time, KV cache and queue to their limits; 1 is exactly at a limit.",
    ),
    "model_capacity_sequences": ((), "Sequences that one replica can run within the objectives."),
    "model_batch_tokens_per_second": (
        (),
        "Tokens per second (prompt and answer) that the ready replicas can give to tier batch beside the other tiers. Only while the batch process has work for the service.",
    ),
    "cold_start_seconds": ((), "Measured time from a pod's creation until it is ready."),
    "replica_start_seconds": (
        ("stage",),
        "Median over the ready replicas of the stages before the engine starts: `scheduling` (until the pod has a node) and `image` (until the container of the engine starts). The engines export the stages after it (`fleetkeeper_start_seconds`).",
    ),
    "signal_fragmentation_ratio": (
        (),
        "Only with memory.restartFragmented: unused share of the allocator's memory, of the worst replica that can be evaluated; 0 if engines do not export it (cpu profiles).",
    ),
    "decision_restart": (
        ("reason",),
        "Only with memory.restartFragmented: 1 in the tick that restarts a fragmented replica, else 0; `reason` is the cause.",
    ),
    "admit_ratio": (("tier",), "Share of a tier's requests that engines admit."),
}
"""The control loop's gauges by name (without `fleetkeeper_`): further labels and description."""

CONTROL_COUNTERS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "service_decisions_total": (
        ("subject",),
        "Decisions that changed something, by subject: `replicas`, `limits`, `breaker`, `restart`, `remedy`. The operator's log has a line for each.",
    ),
    "objective_ticks_total": (
        ("objective", "result"),
        "Ticks with requests, by objective (`queue_wait`, `batch_time`) and result: `met` if the signal is at most the objective, else `missed`. Ticks without fresh signals count nowhere.",
    ),
}
"""The control loop's counters of a service, as above. They begin at 0 with each leader."""

STATE_GAUGES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "service_condition": (
        ("type", "status"),
        f"1 for the present status of a condition, 0 for the two others: `type` is one of {', '.join(f'`{kind}`' for kind in MAIN)}, `status` is `true`, `false` or `unknown`.",
    ),
    "service_condition_reason": (
        ("type", "reason"),
        "1 for the present reason of the same conditions ([reasons](../runbooks/README.md)).",
    ),
    "service_accelerators": (
        (),
        "Accelerators that the service uses: those of its replicas, and of pods that still terminate.",
    ),
    "service_simulated": (
        (),
        "1 if the engines are simulated, so that no model answers. Absent for other services.",
    ),
    "service_failed_wakes": (
        (),
        "Failed starts in a row of a service that wakes; 0 after a start that succeeded. Absent for services that never slept.",
    ),
    "service_min_replicas": ((), "scaling.minReplicas."),
    "service_max_replicas": ((), "scaling.maxReplicas."),
}
"""The gauges of a service that follow from its spec and status, as above. They need no control loop."""

SERVICE_METRICS = {**CONTROL_GAUGES, **CONTROL_COUNTERS, **STATE_GAUGES}

NOTHING_TO_DO: frozenset[Reason] = frozenset(
    {
        Reason.PENDING,
        Reason.ANSWERING,
        Reason.ALL_READY,
        Reason.ENOUGH_READY,
        Reason.ROLLED_OUT,
        Reason.ROLLING_OUT,
        Reason.PREFETCHING_MODEL,
        Reason.SCALING_UP,
        Reason.SCALING_DOWN,
        Reason.AS_EXPECTED,
        Reason.FRESH_METRICS,
        Reason.ALL_METRICS_PRESENT,
        Reason.WITHIN_CAP,
        Reason.WITHIN_BOUNDS,
        Reason.AT_MINIMUM,
        Reason.EXTERNAL,
        Reason.ASLEEP,
        Reason.NEVER_STARTED,
        Reason.WAKING,
        Reason.SWAPPING,
    }
)
"""Reasons that require no action. Every other reason has a page in docs/runbooks."""


def generated_files() -> dict[str, str]:
    """Return {path: text}, for scripts/generate.py."""
    return {
        f"{FOLDER}/metrics.md": page(_metrics()),
        f"{RUNBOOKS}/README.md": page(_runbooks()),
    }


def _metrics() -> Iterator[str]:
    contract = json.loads((ROOT / "engine_image/schemas/metrics.json").read_text())
    yield "# Metrics"
    yield ""
    yield "Names and labels are stable for dashboards and alerts. Times are in seconds, ratios between 0 and 1. The"
    yield "gateway has [metrics of its own](gateway-metrics.md)."
    yield ""
    yield "## Engine metrics"
    yield ""
    yield "Port 9090 of every engine pod, path `/metrics`, next to vLLM's own metrics (`vllm:...`), which are passed through"
    yield "unchanged. Fleetkeeper uses only its own metrics for decisions, so it does not depend on metric names of vLLM."
    yield ""
    yield "| metric | type | labels | |"
    yield "| --- | --- | --- | --- |"
    for metric in _without_terms(contract["metrics"]):
        labels = ", ".join(_label(name, metric.get("values") or {}) for name in metric["labels"])
        text = metric["help"] + _edges(metric.get("edges") or [])
        yield row(f"`{metric['name']}`", metric["type"], labels, text)
    yield ""
    yield "## Service metrics, from the operator"
    yield ""
    yield "Port 8080 of the leading operator, path `/metrics`, with the labels `service_namespace` and `inference_service`: inputs and"
    yield "decisions of the control loop's last tick (every 5 s), and the state that the last reconcile wrote. `fleetkeeper top` and"
    yield "`fleetkeeper explain` show them. The series of a deleted service are gone at the next scrape."
    yield ""
    yield "| metric | type | further labels | |"
    yield "| --- | --- | --- | --- |"
    for name, (labels_, meaning) in SERVICE_METRICS.items():
        kind = "counter" if name in CONTROL_COUNTERS else "gauge"
        labels = ", ".join(f"`{label}`" for label in labels_)
        yield row(f"`fleetkeeper_{name}`", kind, labels, meaning)
    yield ""
    yield "## Operator metrics"
    yield ""
    yield "The same port. No label contains the name of a service. `process_*` and `python_info` are exported too."
    yield ""
    yield "| metric | type | labels | |"
    yield "| --- | --- | --- | --- |"
    for own in operator_metrics():
        yield row(
            f"`{own.name}`", own.kind, ", ".join(f"`{name}`" for name in own.labels), own.meaning
        )
    yield ""
    yield "The router's metrics (port 29000 of router pods) are Envoy's: those of its cluster `engines` and of its HTTP connections `requests`. None has a series for each replica. A router of an earlier release has those of vllm-router."


def _without_terms(metrics: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the metrics; the fifteen sums for the step-time model become one row."""
    terms = [m for m in metrics if m["name"].startswith(STEP_MODEL)]
    for metric in metrics:
        if metric not in terms:
            yield metric
        elif metric is terms[0]:
            names = ", ".join(
                m["name"].removeprefix(STEP_MODEL).removesuffix("_total") for m in terms
            )
            yield {
                **metric,
                "name": f"{STEP_MODEL}*_total",
                "help": f"{metric['help']} * is {names}.",
            }


def _label(name: str, values: Mapping[str, list[str]]) -> str:
    known = values.get(name)
    return f"`{name}`" + (f" ({' '.join(known)})" if known else "")


def _edges(edges: list[float]) -> str:
    return f" {len(edges)} buckets from {edges[0]:g} to {edges[-1]:g}." if edges else ""


@dataclass(frozen=True)
class OperatorMetric:
    """One metric of the operator, as a row of the page."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def operator_metrics() -> Iterator[OperatorMetric]:
    """Yield the metrics of `OperatorMetrics` and of the control loop, in the order of definition."""
    operator = OperatorMetrics()
    for holder in (operator, ControlMetrics(operator.registry)):
        for metric in vars(holder).values():
            if not hasattr(metric, "describe") or "_labelnames" not in vars(metric):
                continue
            (family,) = metric.describe()
            name = family.name + ("_total" if family.type == "counter" else "")
            yield OperatorMetric(
                name, family.type, tuple(vars(metric)["_labelnames"]), family.documentation
            )


def _runbooks() -> Iterator[str]:
    yield "# Reasons and runbooks"
    yield ""
    yield "Every condition of a service has one of these reasons; its message adds names and numbers. Start with"
    yield "[troubleshooting](../troubleshooting.md)."
    yield ""
    yield "| reason | | |"
    yield "| --- | --- | --- |"
    for reason in sorted(Reason):
        todo = "" if reason in NOTHING_TO_DO else f"[runbook]({reason}.md)"
        yield row(f"`{reason}`", reason.text, todo)
    yield ""
    yield f"The conditions are {', '.join(f'`{kind}`' for kind in ConditionType)}"
    yield "([reference](../reference/conditions.md))."

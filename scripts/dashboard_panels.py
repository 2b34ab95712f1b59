"""What the dashboards show: variables, rows, panels and their queries.

The operator's metrics of a service have the label service_namespace; those of the engines have namespace.
No query uses a recording rule, so the dashboards work without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """A variable that is read from the labels of a series."""

    name: str
    label: str
    query: str
    multi: bool = False


@dataclass(frozen=True)
class Panel:
    """A graph over time. `queries`: {legend: query}; `unit` is Grafana's."""

    title: str
    description: str
    unit: str
    queries: Mapping[str, str]
    width: int = 8
    least: float | None = 0


@dataclass(frozen=True)
class Dashboard:
    """One dashboard: rows with a title and panels."""

    name: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


BY = "service_namespace, inference_service"
SERVICE = "{{service_namespace}}/{{inference_service}}"
ENGINES = 'namespace=~"$namespace", inference_service=~".+"'
SERVICES = 'service_namespace=~"$namespace"'
ENGINE = 'namespace="$namespace", inference_service="$service"'
ONE = 'service_namespace="$namespace", inference_service="$service"'
OPERATOR = 'namespace=~"$operator"'
RATE = "$__rate_interval"


def _of_service(metric: str, more: str = "") -> str:
    """Return the value that the leader has for the service."""
    return f"max(fleetkeeper_{metric}{{{ONE}{more}}})"


def _rate(metric: str, by: str, which: str) -> str:
    return f"sum by ({by}) (rate(fleetkeeper_{metric}{{{which}}}[{RATE}]))"


def _quantile(share: float, metric: str, by: str, which: str) -> str:
    le = ", ".join(filter(None, ("le", by)))
    inside = f"sum by ({le}) (rate(fleetkeeper_{metric}_bucket{{{which}}}[{RATE}]))"
    return f"histogram_quantile({share}, {inside})"


def _mean(metric: str, by: str, which: str) -> str:
    return f"{_rate(f'{metric}_sum', by, which)} / {_rate(f'{metric}_count', by, which)}"


FLEET = Dashboard(
    "fleet",
    "Fleet",
    "All services: which of them miss their objectives, shed requests or lack replicas.",
    (
        Variable(
            "namespace",
            "Namespace",
            "label_values(fleetkeeper_pressure_ratio, service_namespace)",
            multi=True,
        ),
    ),
    (
        (
            "Objectives",
            (
                Panel(
                    "Highest pressure",
                    "Highest ratio of queue wait, batch time, KV cache and queue to their limits, for the ten services with the most. 1 is exactly at a limit.",
                    "none",
                    {
                        SERVICE: f"topk(10, max by ({BY}) (fleetkeeper_pressure_ratio{{{SERVICES}}}))"
                    },
                ),
                Panel(
                    "Queue wait to objective",
                    "Queue wait divided by the objective, for the ten services with the most.",
                    "percentunit",
                    {
                        SERVICE: f"topk(10, max by ({BY}) (fleetkeeper_signal_queue_wait_seconds{{{SERVICES}}}) / max by ({BY}) (fleetkeeper_objective_queue_wait_seconds{{{SERVICES}}}))"
                    },
                ),
                Panel(
                    "Batch time to objective",
                    "Mean time of an engine step divided by the objective, for the ten services with the most.",
                    "percentunit",
                    {
                        SERVICE: f"topk(10, max by ({BY}) (fleetkeeper_signal_batch_time_seconds{{{SERVICES}}}) / max by ({BY}) (fleetkeeper_objective_batch_time_seconds{{{SERVICES}}}))"
                    },
                ),
            ),
        ),
        (
            "Load",
            (
                Panel(
                    "Arrivals",
                    "Requests that arrive per second, by tier.",
                    "reqps",
                    {"{{tier}}": _rate("arrivals_total", "tier", ENGINES)},
                ),
                Panel(
                    "Requests not admitted",
                    "Requests that engines do not admit per second, by tier and reason.",
                    "reqps",
                    {
                        "{{tier}} {{outcome}}": _rate(
                            "requests_total", "tier, outcome", f'{ENGINES}, outcome!="admitted"'
                        )
                    },
                ),
                Panel(
                    "Tokens",
                    "Tokens per second: computed from prompts, and generated.",
                    "none",
                    {
                        "prompt": f"sum(rate(fleetkeeper_prompt_tokens_total{{{ENGINES}}}[{RATE}]))",
                        "generated": f"sum(rate(fleetkeeper_generation_tokens_total{{{ENGINES}}}[{RATE}]))",
                    },
                ),
            ),
        ),
        (
            "Replicas and breakers",
            (
                Panel(
                    "Replicas",
                    "Replicas of all services. recommended: by the control loop. allocated: after bounds and budgets. live: in the Deployments. ready: pods that are ready.",
                    "none",
                    {
                        "{{kind}}": f"sum by (kind) (max by ({BY}, kind) (fleetkeeper_decision_replicas{{{SERVICES}}}))"
                    },
                ),
                Panel(
                    "Breakers that are not closed",
                    "Number of services by breaker: control, each tier, and source (Prometheus returns no fresh samples).",
                    "none",
                    {
                        "{{breaker}}": f"sum by (breaker) (max by ({BY}, breaker) (fleetkeeper_breaker_state{{{SERVICES}}}) > bool 0)"
                    },
                ),
                Panel(
                    "Memory to cap",
                    "Highest share of the memory cap that a replica uses, for the ten services with the most.",
                    "percentunit",
                    {
                        "{{namespace}}/{{inference_service}}": f"topk(10, max by (namespace, inference_service) (fleetkeeper_memory_used_ratio{{{ENGINES}}} / fleetkeeper_memory_cap_ratio{{{ENGINES}}}))"
                    },
                ),
            ),
        ),
    ),
)

ONE_SERVICE = Dashboard(
    "service",
    "Service",
    "One service: what its users see, what the control loop decides, and its engines.",
    (
        Variable(
            "namespace", "Namespace", "label_values(fleetkeeper_pressure_ratio, service_namespace)"
        ),
        Variable(
            "service",
            "Service",
            'label_values(fleetkeeper_pressure_ratio{service_namespace="$namespace"}, inference_service)',
        ),
    ),
    (
        (
            "Latency",
            (
                Panel(
                    "Queue wait",
                    "Time until a request is first scheduled: 95th percentile by tier, and the signal that is compared with the objective.",
                    "s",
                    {
                        "p95 {{tier}}": _quantile(0.95, "queue_wait_seconds", "tier", ENGINE),
                        "signal": _of_service("signal_queue_wait_seconds"),
                        "objective": _of_service("objective_queue_wait_seconds"),
                    },
                ),
                Panel(
                    "Batch time",
                    "Duration of an engine step.",
                    "s",
                    {
                        "p95": _quantile(0.95, "batch_time_seconds", "", ENGINE),
                        "signal": _of_service("signal_batch_time_seconds"),
                        "objective": _of_service("objective_batch_time_seconds"),
                    },
                ),
                Panel(
                    "TTFT and ITL",
                    "95th percentile of the time to first token and of the inter-token latency, of streamed answers, by tier.",
                    "s",
                    {
                        "TTFT {{tier}}": _quantile(
                            0.95, "time_to_first_token_seconds", "tier", ENGINE
                        ),
                        "ITL {{tier}}": _quantile(
                            0.95, "inter_token_latency_seconds", "tier", ENGINE
                        ),
                    },
                ),
            ),
        ),
        (
            "Load",
            (
                Panel(
                    "Arrivals",
                    "Requests that arrive per second, by tier.",
                    "reqps",
                    {"{{tier}}": _rate("arrivals_total", "tier", ENGINE)},
                ),
                Panel(
                    "Waiting and running",
                    "Requests that are not scheduled yet, and requests being served.",
                    "none",
                    {
                        "waiting {{tier}}": f"sum by (tier) (fleetkeeper_waiting{{{ENGINE}}})",
                        "running": f"sum(fleetkeeper_running{{{ENGINE}}})",
                    },
                ),
                Panel(
                    "Requests not admitted",
                    "Requests that engines do not admit per second, by tier and reason.",
                    "reqps",
                    {
                        "{{tier}} {{outcome}}": _rate(
                            "requests_total", "tier, outcome", f'{ENGINE}, outcome!="admitted"'
                        )
                    },
                ),
            ),
        ),
        (
            "Decisions",
            (
                Panel(
                    "Replicas",
                    "recommended: by the control loop. allocated: after bounds and budgets. live: in the Deployment. ready: pods that are ready.",
                    "none",
                    {"{{kind}}": f"max by (kind) (fleetkeeper_decision_replicas{{{ONE}}})"},
                ),
                Panel(
                    "Pressure",
                    "Highest ratio of queue wait, batch time, KV cache and queue to their limits. 1 is exactly at a limit.",
                    "none",
                    {"pressure": _of_service("pressure_ratio")},
                ),
                Panel(
                    "Breakers",
                    "0 is closed, 0.5 half-open, 1 open.",
                    "none",
                    {"{{breaker}}": f"max by (breaker) (fleetkeeper_breaker_state{{{ONE}}})"},
                ),
                Panel(
                    "Limit of sequences",
                    "Maximum number of sequences in a batch: what the operator decided, and the smallest and largest in force.",
                    "none",
                    {
                        "decided": _of_service("decision_limit_sequences"),
                        "smallest": f'min(fleetkeeper_limit_sequences{{{ENGINE}, kind="effective"}})',
                        "largest": f'max(fleetkeeper_limit_sequences{{{ENGINE}, kind="effective"}})',
                    },
                ),
                Panel(
                    "Limit of tokens",
                    "Maximum number of tokens in a step: what the operator decided, and the smallest and largest in force.",
                    "none",
                    {
                        "decided": _of_service("decision_limit_tokens"),
                        "smallest": f'min(fleetkeeper_limit_tokens{{{ENGINE}, kind="effective"}})',
                        "largest": f'max(fleetkeeper_limit_tokens{{{ENGINE}, kind="effective"}})',
                    },
                ),
                Panel(
                    "Admitted share",
                    "Share of each tier's requests that engines admit, as the load breaker decided.",
                    "percentunit",
                    {"{{tier}}": f"max by (tier) (fleetkeeper_admit_ratio{{{ONE}}})"},
                ),
            ),
        ),
        (
            "Engines",
            (
                Panel(
                    "Memory",
                    "Memory in use by replica, and the memory cap.",
                    "percentunit",
                    {
                        "{{pod}}": f"max by (pod) (fleetkeeper_memory_used_ratio{{{ENGINE}}})",
                        "cap": f"min(fleetkeeper_memory_cap_ratio{{{ENGINE}}})",
                    },
                ),
                Panel(
                    "KV cache",
                    "Share of the KV cache in use, by replica.",
                    "percentunit",
                    {
                        "{{pod}}": f"max by (pod) (fleetkeeper_kv_resident_tokens{{{ENGINE}}} / fleetkeeper_kv_capacity_tokens{{{ENGINE}}})"
                    },
                ),
                Panel(
                    "Preemptions",
                    "Sequences per second that lost their KV cache, by replica.",
                    "ops",
                    {"{{pod}}": _rate("preemptions_total", "pod", ENGINE)},
                ),
                Panel(
                    "Tokens",
                    "Tokens per second: computed from prompts, and generated.",
                    "none",
                    {
                        "prompt": f"sum(rate(fleetkeeper_prompt_tokens_total{{{ENGINE}}}[{RATE}]))",
                        "generated": f"sum(rate(fleetkeeper_generation_tokens_total{{{ENGINE}}}[{RATE}]))",
                    },
                ),
                Panel(
                    "Sequences in a step",
                    "Mean number of sequences in an engine step, by replica.",
                    "none",
                    {"{{pod}}": _mean("batch_sequences", "pod", ENGINE)},
                ),
                Panel(
                    "Start",
                    "Duration of the stages of each replica's last start. The last stage grows until the replica is ready.",
                    "s",
                    {
                        "{{pod}} {{stage}}": f"max by (pod, stage) (fleetkeeper_start_seconds{{{ENGINE}}})"
                    },
                ),
                Panel(
                    "Stalled",
                    "Seconds for which a replica had requests but completed no step.",
                    "s",
                    {"{{pod}}": f"max by (pod) (fleetkeeper_stalled_seconds{{{ENGINE}}})"},
                ),
                Panel(
                    "Hung, above the cap, draining",
                    "Number of replicas in each of these states.",
                    "none",
                    {
                        "hung": f"sum(fleetkeeper_hung{{{ENGINE}}})",
                        "above the cap": f"sum(fleetkeeper_memory_over_cap{{{ENGINE}}})",
                        "draining": f"sum(fleetkeeper_draining{{{ENGINE}}})",
                    },
                ),
                Panel(
                    "Cold start",
                    "Measured time from a pod's creation until it is ready.",
                    "s",
                    {"cold start": _of_service("cold_start_seconds")},
                ),
            ),
        ),
    ),
)

OF_OPERATOR = Dashboard(
    "operator",
    "Operator",
    "The operator: leadership, reconciles, the control loop, and its requests.",
    (
        Variable(
            "operator",
            "Operator's namespace",
            "label_values(fleetkeeper_leader, namespace)",
            multi=True,
        ),
    ),
    (
        (
            "State",
            (
                Panel(
                    "Leader",
                    "1 for the pod that leads, 0 for a standby.",
                    "none",
                    {"{{pod}}": f"max by (pod) (fleetkeeper_leader{{{OPERATOR}}})"},
                ),
                Panel(
                    "Services and records",
                    "InferenceServices, and their children and pods, in the largest cache.",
                    "none",
                    {
                        "services": f"max(fleetkeeper_services{{{OPERATOR}}})",
                        "records": f"max(fleetkeeper_records{{{OPERATOR}}})",
                    },
                ),
                Panel(
                    "Unreadable",
                    "Objects that cannot be read, by kind.",
                    "none",
                    {"{{kind}}": f"max by (kind) (fleetkeeper_unreadable_objects{{{OPERATOR}}})"},
                ),
            ),
        ),
        (
            "Control loop",
            (
                Panel(
                    "Tick",
                    "Duration of one tick over all services. The period is 5 s.",
                    "s",
                    {
                        "mean": _mean("tick_seconds", "", OPERATOR),
                        "p95": _quantile(0.95, "tick_seconds", "", OPERATOR),
                    },
                ),
                Panel(
                    "Limits requests",
                    "Limits requests to engines per second, by result.",
                    "reqps",
                    {"{{result}}": _rate("limit_puts_total", "result", OPERATOR)},
                ),
                Panel(
                    "Event loop delay",
                    "Delay of the event loop at its last check, by pod.",
                    "s",
                    {"{{pod}}": f"max by (pod) (fleetkeeper_loop_lag_seconds{{{OPERATOR}}})"},
                ),
            ),
        ),
        (
            "Reconciles",
            (
                Panel(
                    "Reconciles",
                    "Reconciles per second, by result. Unchanged ones write nothing.",
                    "ops",
                    {"{{result}}": _rate("reconciles_total", "result", OPERATOR)},
                ),
                Panel(
                    "Duration of a reconcile",
                    "95th percentile with writes, and of planning alone.",
                    "s",
                    {
                        "with writes": _quantile(0.95, "reconcile_seconds", "", OPERATOR),
                        "planning": _quantile(0.95, "decision_seconds", "", OPERATOR),
                    },
                ),
                Panel(
                    "Queue",
                    "Services in the queue, by state.",
                    "none",
                    {"{{state}}": f"sum by (state) (fleetkeeper_queue{{{OPERATOR}}})"},
                ),
                Panel(
                    "Age of the last resync",
                    "Time since every service was reconciled without a change, by pod.",
                    "s",
                    {
                        "{{pod}}": f"time() - max by (pod) (fleetkeeper_last_resync_timestamp_seconds{{{OPERATOR}}} > 0)"
                    },
                ),
            ),
        ),
        (
            "Kubernetes API and errors",
            (
                Panel(
                    "Writes",
                    "Writes per second, by verb and kind.",
                    "reqps",
                    {"{{verb}} {{kind}}": _rate("writes_total", "verb, kind", OPERATOR)},
                ),
                Panel(
                    "Failed requests",
                    "Failed requests to the Kubernetes API per second, by reason.",
                    "reqps",
                    {"{{reason}}": _rate("errors_total", "reason", OPERATOR)},
                ),
                Panel(
                    "Defects and contested fields",
                    "Steps per second that failed because of a defect, and applies whose live object differs.",
                    "ops",
                    {
                        "defect {{where}}": _rate("defects_total", "where", OPERATOR),
                        "differs {{kind}}": _rate("digest_mismatches_total", "kind", OPERATOR),
                    },
                ),
                Panel(
                    "CPU",
                    "CPU time per second, by pod of the operator.",
                    "percentunit",
                    {
                        "{{pod}}": f"sum by (pod) (rate(process_cpu_seconds_total{{{OPERATOR}}}[{RATE}]) and on (instance) fleetkeeper_leader)"
                    },
                ),
                Panel(
                    "Memory",
                    "Resident memory, by pod of the operator.",
                    "bytes",
                    {
                        "{{pod}}": f"max by (pod) (process_resident_memory_bytes{{{OPERATOR}}} and on (instance) fleetkeeper_leader)"
                    },
                ),
            ),
        ),
    ),
)

DASHBOARDS = (FLEET, ONE_SERVICE, OF_OPERATOR)

"""The dashboard of one service."""

from __future__ import annotations

from dashboard_parts import (
    ENGINE,
    ONE,
    RATE,
    Annotation,
    Dashboard,
    Panel,
    Variable,
    mean,
    met,
    not_admitted,
    of_service,
    quantile,
    rate,
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
                        "p95 {{tier}}": quantile(0.95, "queue_wait_seconds", "tier", ENGINE),
                        "signal": of_service("signal_queue_wait_seconds"),
                        "objective": of_service("objective_queue_wait_seconds"),
                    },
                ),
                Panel(
                    "Batch time",
                    "Duration of an engine step.",
                    "s",
                    {
                        "p95": quantile(0.95, "batch_time_seconds", "", ENGINE),
                        "signal": of_service("signal_batch_time_seconds"),
                        "objective": of_service("objective_batch_time_seconds"),
                    },
                ),
                Panel(
                    "TTFT and ITL",
                    "95th percentile of the time to first token and of the inter-token latency, of streamed answers, by tier.",
                    "s",
                    {
                        "TTFT {{tier}}": quantile(
                            0.95, "time_to_first_token_seconds", "tier", ENGINE
                        ),
                        "ITL {{tier}}": quantile(
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
                    {"{{tier}}": rate("arrivals_total", "tier", ENGINE)},
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
                not_admitted(ENGINE),
            ),
        ),
        (
            "Decisions",
            (
                Panel(
                    "Replicas",
                    "recommended: by the control loop. allocated: after bounds and budgets. live: in the Deployment. ready: pods that are ready. min and max: the bounds of the spec.",
                    "none",
                    {
                        "{{kind}}": f"max by (kind) (fleetkeeper_decision_replicas{{{ONE}}})",
                        "min": of_service("service_min_replicas"),
                        "max": of_service("service_max_replicas"),
                    },
                ),
                Panel(
                    "Pressure",
                    "Highest ratio of queue wait, batch time, KV cache and queue to their limits. 1 is exactly at a limit.",
                    "none",
                    {"pressure": of_service("pressure_ratio")},
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
                        "decided": of_service("decision_limit_sequences"),
                        "smallest": f'min(fleetkeeper_limit_sequences{{{ENGINE}, kind="effective"}})',
                        "largest": f'max(fleetkeeper_limit_sequences{{{ENGINE}, kind="effective"}})',
                    },
                ),
                Panel(
                    "Limit of tokens",
                    "Maximum number of tokens in a step: what the operator decided, and the smallest and largest in force.",
                    "none",
                    {
                        "decided": of_service("decision_limit_tokens"),
                        "smallest": f'min(fleetkeeper_limit_tokens{{{ENGINE}, kind="effective"}})',
                        "largest": f'max(fleetkeeper_limit_tokens{{{ENGINE}, kind="effective"}})',
                    },
                ),
                Panel(
                    "Batch deadlines",
                    "Tokens per second that the deadlines of waiting batches require, and that the ready replicas can give to tier batch beside the other tiers. Empty without batches.",
                    "none",
                    {
                        "required": of_service("batch_required_tokens_per_second"),
                        "possible": of_service("model_batch_tokens_per_second"),
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
            "State",
            (
                Panel(
                    "Conditions",
                    "1 while a condition is True. Degraded and ScalingLimited are problems then, the others are not.",
                    "none",
                    {
                        "{{type}}": f'max by (type) (fleetkeeper_service_condition{{{ONE}, status="true"}})'
                    },
                ),
                Panel(
                    "Time within objectives",
                    "Share of the last hour's ticks with requests that meet an objective.",
                    "percentunit",
                    {"{{objective}}": met("objective", ONE)},
                ),
                Panel(
                    "Accelerators",
                    "Accelerators of the replicas, and of pods that still terminate.",
                    "none",
                    {"accelerators": of_service("service_accelerators")},
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
                    {"{{pod}}": rate("preemptions_total", "pod", ENGINE)},
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
                    {"{{pod}}": mean("batch_sequences", "pod", ENGINE)},
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
                    {"cold start": of_service("cold_start_seconds")},
                ),
            ),
        ),
    ),
    (
        Annotation(
            "Decisions",
            "{{subject}}",
            f"sum by (subject) (increase(fleetkeeper_service_decisions_total{{{ONE}}}[{RATE}])) > 0",
        ),
    ),
)

"""The dashboard of all services."""

from __future__ import annotations

from dashboard_parts import (
    BY,
    ENGINES,
    RATE,
    SERVICE,
    SERVICES,
    Dashboard,
    Panel,
    Variable,
    met,
    not_admitted,
    rate,
)


def _within(signal: str) -> str:
    """Return 1 for each service with a signal within its objective, else 0."""
    found, objective = (
        f"max by ({BY}) (fleetkeeper_{kind}_{signal}_seconds{{{SERVICES}}})"
        for kind in ("signal", "objective")
    )
    return f"({found} <= bool {objective})"


def _by_reason(condition: str) -> str:
    """Return the number of services by the reason of a condition."""
    series = f'fleetkeeper_service_condition_reason{{{SERVICES}, type="{condition}"}}'
    return f"count by (reason) (max by ({BY}, reason) ({series}))"


WITHIN = f"{_within('queue_wait')} * {_within('batch_time')}"
ACCELERATORS = f"max by ({BY}) (fleetkeeper_service_accelerators{{{SERVICES}}})"

FLEET = Dashboard(
    "fleet",
    "Fleet",
    "All services: which of them miss their objectives, shed requests or lack replicas, how many accelerators they use, and what limits them.",
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
            "Within objectives",
            (
                Panel(
                    "Services within objectives",
                    "Number of services whose queue wait and batch time are within their objectives now, and of all services.",
                    "none",
                    {
                        "within": f"sum({WITHIN})",
                        "all": f"count(max by ({BY}) (fleetkeeper_objective_queue_wait_seconds{{{SERVICES}}}))",
                    },
                ),
                Panel(
                    "Time within objectives",
                    "Share of the last hour's ticks with requests that meet their objectives, for the ten services with the least.",
                    "percentunit",
                    {SERVICE: f"bottomk(10, {met(BY, SERVICES)})"},
                ),
                Panel(
                    "Ready",
                    "Number of services by the reason of their condition Ready.",
                    "none",
                    {"{{reason}}": _by_reason("Ready")},
                ),
            ),
        ),
        (
            "Cost and limits",
            (
                Panel(
                    "Accelerators",
                    "Accelerators that services use, for the ten services with the most, and of all services.",
                    "none",
                    {
                        SERVICE: f"topk(10, {ACCELERATORS})",
                        "all": f"sum({ACCELERATORS})",
                    },
                ),
                Panel(
                    "Replicas to maximum",
                    "Replicas divided by scaling.maxReplicas, for the ten services with the most.",
                    "percentunit",
                    {
                        SERVICE: f'topk(10, max by ({BY}) (fleetkeeper_decision_replicas{{{SERVICES}, kind="live"}}) / max by ({BY}) (fleetkeeper_service_max_replicas{{{SERVICES}}}))'
                    },
                ),
                Panel(
                    "What limits scaling",
                    "Number of services by the reason of their condition ScalingLimited. WithinBounds: nothing does.",
                    "none",
                    {"{{reason}}": _by_reason("ScalingLimited")},
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
                    {"{{tier}}": rate("arrivals_total", "tier", ENGINES)},
                ),
                not_admitted(ENGINES),
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

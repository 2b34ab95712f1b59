"""The dashboard of the operator."""

from __future__ import annotations

from dashboard_parts import OPERATOR, RATE, Dashboard, Panel, Variable, mean, quantile, rate

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
                        "mean": mean("tick_seconds", "", OPERATOR),
                        "p95": quantile(0.95, "tick_seconds", "", OPERATOR),
                    },
                ),
                Panel(
                    "Limits requests",
                    "Limits requests to engines per second, by result.",
                    "reqps",
                    {"{{result}}": rate("limit_puts_total", "result", OPERATOR)},
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
                    {"{{result}}": rate("reconciles_total", "result", OPERATOR)},
                ),
                Panel(
                    "Duration of a reconcile",
                    "95th percentile with writes, and of planning alone.",
                    "s",
                    {
                        "with writes": quantile(0.95, "reconcile_seconds", "", OPERATOR),
                        "planning": quantile(0.95, "decision_seconds", "", OPERATOR),
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
                    {"{{verb}} {{kind}}": rate("writes_total", "verb, kind", OPERATOR)},
                ),
                Panel(
                    "Failed requests",
                    "Failed requests to the Kubernetes API per second, by reason.",
                    "reqps",
                    {"{{reason}}": rate("errors_total", "reason", OPERATOR)},
                ),
                Panel(
                    "Defects and contested fields",
                    "Steps per second that failed because of a defect, and applies whose live object differs.",
                    "ops",
                    {
                        "defect {{where}}": rate("defects_total", "where", OPERATOR),
                        "differs {{kind}}": rate("digest_mismatches_total", "kind", OPERATOR),
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

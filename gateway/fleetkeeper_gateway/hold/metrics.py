"""Metrics of held requests and wake marks, in the process's default registry."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

HELD = Gauge(
    "fleetkeeper_gateway_held_requests",
    "Requests that wait for a service that sleeps, wakes or swaps.",
)
HELD_BYTES = Gauge(
    "fleetkeeper_gateway_held_bytes", "Bytes of held requests, each with 16 KiB beside its body."
)
ENDED = Counter(
    "fleetkeeper_gateway_holds_total",
    "Holds that ended, by outcome: `sent`, `aborted` (client gone, key revoked) or the code of the error.",
    ("outcome",),
)
SECONDS = Histogram(
    "fleetkeeper_gateway_hold_seconds",
    "Time from the start of a hold until a service took the request, or until the hold ended without.",
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 40, 50, 60, 120, 300),
)
MARKS = Counter("fleetkeeper_gateway_wake_marks_total", "Wake marks that were written.")
FAILURES = Counter(
    "fleetkeeper_gateway_wake_mark_failures_total",
    "Writes of wake marks that failed. They are repeated.",
)

"""Metrics of the usage process, in its default registry. No label names a key."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

ENTRIES = Counter(
    "fleetkeeper_gateway_usage_entries",
    "Requests read from the engines' ledgers, by whether a grant says who sent them.",
    ("attributed",),
)
TOKENS = Counter(
    "fleetkeeper_gateway_usage_tokens",
    "Tokens read from the engines' ledgers: of prompts (prompt), of these from the prefix cache "
    "(cached), and of answers (answer), by whether a grant says who sent the request.",
    ("kind", "attributed"),
)
FORGED = Counter(
    "fleetkeeper_gateway_usage_forged_entries",
    "Requests for which an engine claims a key, and that the gateway did not send to its service. "
    "They count as unattributed.",
)
LOST_ENTRIES = Counter(
    "fleetkeeper_gateway_usage_lost_entries",
    "Requests that engines dropped from their ledgers before they were read.",
)
LOST_TOKENS = Counter(
    "fleetkeeper_gateway_usage_lost_tokens",
    "Tokens of requests that engines dropped from their ledgers before they were read.",
    ("kind",),
)
PODS = Gauge("fleetkeeper_gateway_usage_pods", "Engines whose usage is read.")
UNREACHABLE = Gauge(
    "fleetkeeper_gateway_usage_pods_unreachable", "Engines whose usage could not be read."
)
NOT_COUNTING = Gauge(
    "fleetkeeper_gateway_usage_pods_not_counting",
    "Engines that count no tokens, or could not count all: their log says why.",
)
READ_AGE = Gauge(
    "fleetkeeper_gateway_usage_read_age_seconds",
    "Time since all engines were last asked; NaN before the first time.",
)
SETTLE_FAILURES = Counter(
    "fleetkeeper_gateway_usage_settle_failures",
    "Requests whose tokens could not be settled with the limits.",
)
WRITE_FAILURES = Counter(
    "fleetkeeper_gateway_usage_write_failures",
    "Pages that could not be written to the files. They are read again.",
)

"""Metrics of the usage process, in its default registry. No label names a key.

Figures that an engine reports are counted by its service (NAMESPACE/NAME), so that no engine can falsify
the numbers of another service.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge

from fleetkeeper_contract.usage_files import COUNTS
from fleetkeeper_gateway.usage.lines import Reading

ENTRIES = Counter(
    "fleetkeeper_gateway_usage_entries",
    "Requests read from the engines' ledgers, by whether a grant says who sent them.",
    ("service", "attributed"),
)
TOKENS = Counter(
    "fleetkeeper_gateway_usage_tokens",
    "Tokens read from the engines' ledgers: of prompts (prompt), of these from the prefix cache "
    "(cached), and of answers (answer), by whether a grant says who sent the request.",
    ("service", "kind", "attributed"),
)
FORGED = Counter(
    "fleetkeeper_gateway_usage_forged_entries",
    "Requests for which an engine claims a key, and that the gateway did not send to its service. "
    "They count as unattributed.",
    ("service",),
)
LOST_ENTRIES = Counter(
    "fleetkeeper_gateway_usage_lost_entries",
    "Requests that engines dropped from their ledgers before they were read.",
    ("service",),
)
LOST_TOKENS = Counter(
    "fleetkeeper_gateway_usage_lost_tokens",
    "Tokens of requests that engines dropped from their ledgers before they were read.",
    ("service", "kind"),
)
FAILED_READINGS = Counter(
    "fleetkeeper_gateway_usage_failed_readings",
    "Readings of an engine that ended without a page that could be kept. The log says why.",
    ("service",),
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
    "Longest time since an engine that answered its last reading was read; NaN without such an engine.",
)
SETTLE_FAILURES = Counter(
    "fleetkeeper_gateway_usage_settle_failures",
    "Requests whose tokens could not be settled with the limits.",
)
WRITE_FAILURES = Counter(
    "fleetkeeper_gateway_usage_write_failures",
    "Pages that could not be written to the files. They are read again.",
)

KINDS: Final = COUNTS[2:]


def count(service: str, reading: Reading) -> None:
    """Count the entries and losses of a page."""
    ENTRIES.labels(service, "true").inc(len(reading.attributed))
    ENTRIES.labels(service, "false").inc(reading.unattributed.requests)
    LOST_ENTRIES.labels(service).inc(reading.lost.requests)
    for kind in KINDS:
        own = sum(getattr(entry, kind) for entry in reading.attributed)
        TOKENS.labels(service, kind, "true").inc(own)
        TOKENS.labels(service, kind, "false").inc(getattr(reading.unattributed, kind))
        LOST_TOKENS.labels(service, kind).inc(getattr(reading.lost, kind))


def forget(service: str) -> None:
    """Remove the series of a service."""
    for counter in (FORGED, LOST_ENTRIES, FAILED_READINGS):
        counter.remove(service)
    for kind in KINDS:
        LOST_TOKENS.remove(service, kind)
    for attributed in ("true", "false"):
        ENTRIES.remove(service, attributed)
        for kind in KINDS:
            TOKENS.remove(service, kind, attributed)

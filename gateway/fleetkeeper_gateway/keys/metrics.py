"""Metrics of the keys, in the process's default registry. No label names a key."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

KEYS = Gauge("fleetkeeper_gateway_keys", "Number of valid client keys, expired ones included.")
INVALID_KEYS = Gauge(
    "fleetkeeper_gateway_invalid_keys",
    "Number of Secrets of client keys that are malformed, or whose key another Secret has too.",
)
CONTACT_AGE = Gauge(
    "fleetkeeper_gateway_keys_contact_age_seconds",
    "Time since the API server last confirmed the client keys; NaN before the first list.",
)
CHANGES = Counter(
    "fleetkeeper_gateway_key_changes",
    "Changes of client keys seen, by kind: created, changed, rotated, revoked, expired.",
    ("change",),
)

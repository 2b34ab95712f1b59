"""Metrics of the services, in the process's default registry."""

from __future__ import annotations

from prometheus_client import Gauge

SERVICES = Gauge("fleetkeeper_gateway_services", "Number of InferenceServices known.")
CONTACT_AGE = Gauge(
    "fleetkeeper_gateway_services_contact_age_seconds",
    "Time since the API server last confirmed the services; NaN before the first list.",
)

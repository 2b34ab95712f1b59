"""Tracing with an engine profile: where engines send the spans of requests."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from fleetkeeper.api.base import LabelValue, Section, StringMap, frozen_map
from fleetkeeper_contract.traces_endpoint import (
    DEFAULT_SAMPLE_RATIO,
    PATTERN,
    TracesProtocol,
    endpoint_error,
    port_of,
)

OPTION = "otlp-traces-endpoint"
"""The option of vLLM that `tracing` sets."""


class Collector(Section):
    """The collector's pods or addresses, for the NetworkPolicy of engines."""

    namespace_labels: StringMap[LabelValue] = Field(
        default_factory=frozen_map,
        max_length=8,
        description="Labels of the collector's namespace, for example kubernetes.io/metadata.name. Absent with podLabels: the service's own namespace.",
    )
    pod_labels: StringMap[LabelValue] = Field(
        default_factory=frozen_map,
        max_length=8,
        description="Labels of the collector's pods. Absent: all pods of the namespace.",
    )
    cidr: str | None = Field(
        None,
        max_length=64,
        description="Address range of a collector outside the cluster. Instead of labels.",
    )
    port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Port on which the collector's pods listen, if it differs from the endpoint's: a NetworkPolicy is applied behind the Service.",
    )

    @model_validator(mode="after")
    def _selects_something(self) -> Self:
        if bool(self.cidr) == bool(self.namespace_labels or self.pod_labels):
            raise ValueError("set either namespaceLabels and podLabels, or cidr")
        return self


class Tracing(Section):
    """OpenTelemetry spans of requests, from every engine with the profile."""

    endpoint: str = Field(
        max_length=512,
        pattern=PATTERN,
        description="Address of the collector as engine pods reach it, with its port, for example http://otel-collector.observability:4317. Over http without a path: /v1/traces.",
    )
    protocol: TracesProtocol = Field(
        TracesProtocol.GRPC, description="Transport of OTLP: grpc or http."
    )
    sample_ratio: float = Field(
        DEFAULT_SAMPLE_RATIO,
        ge=0,
        le=1,
        description="Share of the requests without a trace context that get spans. A request with one follows the decision in it.",
    )
    collector: Collector = Field(
        description="The collector's pods or addresses, to which engine pods may connect."
    )

    @model_validator(mode="after")
    def _endpoint_is_usable(self) -> Self:
        if error := endpoint_error(self.endpoint, self.protocol):
            raise ValueError(f"tracing.endpoint: {error}")
        return self

    @property
    def collector_port(self) -> int:
        """Return the port to which engine pods may connect."""
        return self.collector.port or port_of(self.endpoint)

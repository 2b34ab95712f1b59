"""The address of a collector of OpenTelemetry traces, as engine profile and engine document write it."""

from __future__ import annotations

import re
from enum import StrEnum

PATTERN = (
    r"^https?://([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?|\[[0-9a-f:]{2,39}\]):[1-9][0-9]{0,4}"
    r"(/[A-Za-z0-9._~/-]{0,255})?$"
)
"""The port is always written, because a NetworkPolicy needs it."""
HTTP_PATH = "/v1/traces"
"""The path of OTLP over HTTP if the address has none."""
DEFAULT_SAMPLE_RATIO = 0.01
_PORT = re.compile(r":([0-9]+)(/|$)")


class TracesProtocol(StrEnum):
    """The transport of OTLP."""

    GRPC = "grpc"
    HTTP = "http"


def port_of(endpoint: str) -> int:
    """Return the port of an address of the form PATTERN.

    >>> port_of("http://[fd00::1]:4318/v1/traces")
    4318
    """
    found = _PORT.search(endpoint)
    if found is None:
        raise ValueError(f"{endpoint!r} has no port")
    return int(found[1])


def endpoint_error(endpoint: str, protocol: TracesProtocol) -> str | None:
    """Return why an address of the form PATTERN cannot be used, or None."""
    if port_of(endpoint) > 65535:
        return "the port must be 65535 or less"
    if protocol is TracesProtocol.GRPC and not endpoint.endswith(f":{port_of(endpoint)}"):
        return "with protocol grpc the endpoint has no path; remove it, or set protocol to http"
    return None


def signal_endpoint(endpoint: str, protocol: TracesProtocol) -> str:
    """Return the address to which spans are sent.

    >>> signal_endpoint("http://collector.example:4318", TracesProtocol.HTTP)
    'http://collector.example:4318/v1/traces'
    """
    bare = endpoint.endswith(f":{port_of(endpoint)}")
    return endpoint + HTTP_PATH if bare and protocol is TracesProtocol.HTTP else endpoint

"""Settings of held requests."""

from __future__ import annotations

from pydantic import Field

from fleetkeeper_gateway.kubernetes.settings import KubernetesSettings


class HoldSettings(KubernetesSettings):
    """Settings of requests for services that sleep."""

    wake_marks: str = Field(
        "",
        pattern="^([a-z0-9-]+/[a-z0-9.-]+)?$",
        description="ConfigMap of the wake marks, NAMESPACE/NAME. Empty: no service is woken, and requests for one that sleeps get 503 at once. Swaps need no mark.",
    )
    hold_seconds: float = Field(
        55,
        gt=0,
        description="Maximum time that a request waits for a service that sleeps, wakes or swaps. Proxies before the gateway must wait longer.",
    )
    hold_bytes: int = Field(
        67_108_864,
        ge=1,
        description="Maximum bytes of all held requests, each with 16 KiB beside its body. A tenant, and the requests of a service, may hold at most as many as remain free, so at most half.",
    )

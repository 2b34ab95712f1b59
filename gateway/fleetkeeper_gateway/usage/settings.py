"""Settings of the process that collects usage (docs/reference/gateway-settings.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from fleetkeeper_gateway.services.settings import ServicesSettings


class UsageSettings(ServicesSettings):
    """Settings of the reading and the storage of usage."""

    host: str = Field("0.0.0.0", description="Address to listen on.")  # noqa: S104 - a pod serves its network
    usage_port: int = Field(
        8082, ge=1, le=65535, description="Port of usage, health and metrics of the usage process."
    )
    usage_directory: Path = Field(
        Path("/var/lib/fleetkeeper/usage"), description="Directory of the files with usage."
    )
    usage_period_seconds: float = Field(
        5.0, gt=0, le=300, description="Seconds from one reading of the engines to the next."
    )
    usage_retention_days: int = Field(
        90, ge=1, le=3650, description="Days after which the files of an hour are deleted."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level of log lines."
    )
    log_format: Literal["json", "console"] = Field("json", description="Format of log lines.")

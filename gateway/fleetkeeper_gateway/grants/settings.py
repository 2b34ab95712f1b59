"""Settings of the grants (docs/reference/gateway-settings.md)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class GrantSettings(BaseSettings):
    """Settings of the keys that sign grants."""

    model_config = SettingsConfigDict(
        env_prefix="FLEETKEEPER_GATEWAY_", env_ignore_empty=True, frozen=True
    )

    grant_keys_directory: Path | None = Field(
        None,
        description="Directory with signing.pem and jwks.json, and during a rotation next.pem and signFrom. Empty: no grants, so services with access: Gateway refuse every request.",
    )

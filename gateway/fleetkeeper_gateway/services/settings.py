"""Settings of the services."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from fleetkeeper_gateway.kubernetes.settings import KubernetesSettings


class ServicesSettings(KubernetesSettings):
    """Settings of the watch of services."""

    namespaces: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Namespaces whose services get requests, comma-separated. Empty: all namespaces.",
    )

    @field_validator("namespaces", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

"""Settings of the request path."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

_ORIGIN: Final = re.compile(
    r"https?://[a-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:]+\](:[0-9]{1,5})?"
)


class ServeSettings(BaseSettings):
    """Settings of `fleetkeeper-gateway serve`, apart from those of its parts."""

    model_config = SettingsConfigDict(
        env_prefix="FLEETKEEPER_GATEWAY_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    host: str = Field("0.0.0.0", description="Address to listen on.")  # noqa: S104 - a pod
    port: int = Field(8080, ge=0, le=65_535, description="Port of requests.")
    admin_port: int = Field(8081, ge=0, le=65_535, description="Port of health and metrics.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level of log lines."
    )
    log_format: Literal["json", "console"] = Field("json", description="Format of log lines.")
    drain_seconds: float = Field(
        30, ge=0, description="Time for open requests to end after a SIGTERM."
    )
    request_bytes: int = Field(16_777_216, ge=1, description="Maximum body of a request in bytes.")
    body_budget_bytes: int = Field(
        268_435_456,
        ge=2,
        description="Maximum bytes of all bodies that were read and not yet sent, at least twice REQUEST_BYTES. A tenant may hold at most as many as remain free, so at most half.",
    )
    connect_timeout_seconds: float = Field(
        2, gt=0, description="Time to connect to a service, with the lookup of its name."
    )
    wait_seconds: float = Field(
        10,
        ge=0,
        description="Maximum time that a request waits for a service that accepts it. A line of a batch does not wait: the batch process sends it again.",
    )
    request_timeout_seconds: float = Field(
        3600, gt=0, description="Maximum time of a request from its head to its last byte."
    )
    idle_timeout_seconds: float = Field(
        300, gt=0, description="Maximum time between two parts of an answer."
    )
    client_timeout_seconds: float = Field(
        60, gt=0, description="Time without progress after which a slow client is disconnected."
    )

    allowed_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Origins whose scripts may call the gateway from a browser, comma-separated: SCHEME://HOST[:PORT]. Empty: none.",
    )

    @field_validator("allowed_origins", mode="before")
    @classmethod
    def _origins(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        origins = tuple(part.strip() for part in value.split(",") if part.strip())
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin as browsers send it, such as https://chat.example.com"
                )
        return origins

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.body_budget_bytes < 2 * self.request_bytes:
            raise ValueError(
                "BODY_BUDGET_BYTES must be at least twice REQUEST_BYTES: a tenant may hold half of it, "
                "so the largest requests would never be accepted"
            )
        return self

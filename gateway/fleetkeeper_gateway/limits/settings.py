"""Settings of the limits, from the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class LimitSettings(BaseSettings):
    """The Redis in which replicas share their limits. An empty variable counts as absent."""

    # An error is reported without its input, because the URL may contain a password.
    model_config = SettingsConfigDict(
        env_prefix="FLEETKEEPER_GATEWAY_",
        env_ignore_empty=True,
        extra="ignore",
        hide_input_in_errors=True,
        frozen=True,
    )

    redis_url: SecretStr = Field(
        SecretStr(""),
        description="Redis or Valkey that all replicas share: redis://HOST:PORT/DATABASE, or rediss:// for TLS. Empty: each replica has limits of its own.",
    )
    redis_username: str = Field("", description="User of Redis' access control lists.")
    redis_password_file: Path | None = Field(
        None,
        description="File with the password. It is read again for each connection, so that a changed Secret needs no restart.",
    )
    redis_ca_file: Path | None = Field(
        None,
        description="File with the certificates that sign the server's, for rediss://. Default: those of the image.",
    )
    max_tokens_cap: int = Field(
        4096,
        gt=0,
        description="Maximum answer tokens of one choice in an estimate, also if the request allows more. It is the number for requests that name none.",
    )

    @property
    def shared(self) -> bool:
        """Return whether replicas share their limits."""
        return bool(self.redis_url.get_secret_value())

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.shared:
            return self
        address = urlsplit(self.redis_url.get_secret_value())
        if address.scheme not in {"redis", "rediss"} or not address.hostname:
            raise ValueError("REDIS_URL must be redis://HOST:PORT/DATABASE or rediss://...")
        if address.query:
            raise ValueError("REDIS_URL must have no options after `?`; use the other settings")
        if self.redis_ca_file is not None and address.scheme != "rediss":
            raise ValueError("REDIS_CA_FILE needs a REDIS_URL that begins with rediss://")
        if self.redis_username and self.redis_password_file is None:
            raise ValueError("REDIS_USERNAME needs REDIS_PASSWORD_FILE")
        if self.redis_password_file is not None and (address.username or address.password):
            raise ValueError("REDIS_URL contains a user or password beside REDIS_PASSWORD_FILE")
        return self

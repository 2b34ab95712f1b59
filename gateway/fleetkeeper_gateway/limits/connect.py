"""Connections to Redis from the settings: TLS, user, and a password that may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, parse_url
from redis.credentials import CredentialProvider

from fleetkeeper_gateway.limits.settings import LimitSettings


class PasswordFile(CredentialProvider):
    """A user and the password in a file, read for each connection."""

    def __init__(self, username: str, file: Path) -> None:
        self._username = username
        self._file = file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the arguments of AUTH."""
        password = self._file.read_text().rstrip("\r\n")
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Return the same: the file is small and local."""
        return self.get_credentials()


def new_connection(settings: LimitSettings) -> AbstractConnection:
    """Return a connection that is not open yet."""
    options: dict[str, Any] = dict(parse_url(settings.redis_url.get_secret_value()))
    kind = options.pop("connection_class", Connection)
    if settings.redis_password_file is not None:
        options["credential_provider"] = PasswordFile(
            settings.redis_username, settings.redis_password_file
        )
    if kind is SSLConnection and settings.redis_ca_file is not None:
        options["ssl_ca_certs"] = str(settings.redis_ca_file)
    # RESP2: every server knows it, and no greeting is needed. The pipe watches the time.
    options |= {"protocol": 2, "socket_timeout": None, "socket_keepalive": True}
    connection: AbstractConnection = kind(**options)
    return connection

"""The address of Prometheus and the credentials in it, which appear in no message."""

from __future__ import annotations

import base64
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit, urlunsplit


@dataclass(frozen=True, slots=True)
class Address:
    """The URL of Prometheus without its credentials, and the credentials."""

    url: str
    auth: tuple[str, str] | None = None


def parse_address(url: str) -> Address:
    """Return the address in a URL that may contain a user and a password.

    Raises:
        ValueError: it is not an http or https URL with a host; the message does not repeat it.
    """
    try:
        parts = urlsplit(url.rstrip("/"))
        is_whole = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole or parts.query or parts.fragment:
        raise ValueError("must be a URL such as http://prometheus.monitoring:9090") from None
    if "@" not in parts.netloc:
        return Address(url.rstrip("/"))
    host = parts.netloc.rpartition("@")[2]
    auth = (unquote(parts.username or ""), unquote(parts.password or ""))
    return Address(urlunsplit(parts._replace(netloc=host)), auth)


def basic_credentials(auth: tuple[str, str]) -> str:
    """Return a user and a password as they are in the header of basic authentication."""
    return base64.b64encode(":".join(auth).encode()).decode()


def secret_forms(auth: tuple[str, str] | None, token: str = "") -> frozenset[str]:
    """Return every form in which credentials could appear in a message."""
    forms = {token}
    if auth is not None:
        forms |= {auth[1], quote(auth[1], safe=""), quote(auth[1]), ":".join(auth)}
        forms.add(basic_credentials(auth))
    return frozenset(forms - {""})


def hidden(text: str, secrets: Collection[str]) -> str:
    """Return the text with secrets replaced."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text

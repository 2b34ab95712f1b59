"""An HTTP session with limits on response size and time, and without secrets in its errors."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import requests

CHUNK_BYTES: Final = 65_536
MIN_TIMEOUT_S: Final = 0.01
"""With less time left than this, the deadline has passed."""


class PrometheusError(Exception):
    """The lack of a usable response from Prometheus; the message says what was wrong."""


class TooMuch(PrometheusError):
    """A response that is too large. A query for a part of the fleet may succeed."""


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


def secret_forms(auth: tuple[str, str] | None, token: str) -> frozenset[str]:
    """Return every form in which credentials could appear in a message."""
    forms = {token}
    if auth is not None:
        pair = ":".join(auth)
        forms |= {auth[1], quote(auth[1], safe=""), quote(auth[1]), pair}
        forms.add(base64.b64encode(pair.encode()).decode())
    return frozenset(forms - {""})


def hidden(text: str, secrets: Collection[str]) -> str:
    """Return the text with secrets replaced."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


class BoundedSession(requests.Session):
    """A session with limits on response size and time, without redirects or environment proxies."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        super().__init__()
        self.trust_env = False
        self.max_redirects = 0
        self._bounds = threading.local()
        self._monotonic = monotonic

    def set_bounds(self, deadline: float, size: int) -> None:
        """Set the deadline of this thread's requests, and the maximum size of a response in bytes."""
        self._bounds.deadline, self._bounds.size = deadline, size

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:  # noqa: ANN401 - requests' own signature
        """Return the response to one request, its body read within the limits.

        Raises:
            PrometheusError: the body is larger or slower than allowed, or the response is a redirect.
        """
        if self._left_s() <= MIN_TIMEOUT_S:
            raise PrometheusError("no response before the deadline")
        kwargs |= {"stream": True, "allow_redirects": False, "timeout": self._left_s()}
        response = super().request(*args, **kwargs)
        try:
            response._content = self._body(response)  # noqa: SLF001 - requests has no public way to bound a body
        except BaseException:
            response.close()
            raise
        return response

    def _body(self, response: requests.Response) -> bytes:
        if response.is_redirect:
            host = urlsplit(response.headers.get("Location", "")).hostname
            raise PrometheusError(f"redirect to {str(host)[:200]!r} refused")
        body, size = bytearray(), int(self._bounds.size)
        while chunk := response.raw.read1(CHUNK_BYTES, decode_content=True):
            body += chunk
            if len(body) > size:
                raise TooMuch(f"response is larger than {size} bytes")
            if self._left_s() <= MIN_TIMEOUT_S:
                raise PrometheusError("response did not end before the deadline")
        return bytes(body)

    def _left_s(self) -> float:
        return max(MIN_TIMEOUT_S, float(getattr(self._bounds, "deadline", 0.0)) - self._monotonic())

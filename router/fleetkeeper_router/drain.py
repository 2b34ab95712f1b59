"""The end of a router: it says so, takes no more connections, and lets its streams end."""

from __future__ import annotations

import http.client
import socket
import sys
import time
from typing import Final

from fleetkeeper_router.settings import Settings

_CALL_S: Final = 5.0
_PERIOD_S: Final = 0.2


class _Admin(http.client.HTTPConnection):
    """One connection to Envoy's admin interface."""

    def __init__(self, path: str) -> None:
        super().__init__("envoy", timeout=_CALL_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket; `@` begins the name of an abstract one."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_CALL_S)
        self.sock.connect(self._path.replace("@", "\0", 1))


def drain(settings: Settings) -> int:
    """Let the streams of the router in this pod end. Return the exit status.

    It is not ready at once, and each answer closes its connection. After the notice it takes no new
    connections. It returns when no request runs, or at the end of the drain time.
    """
    path = settings.admin_socket
    try:
        call(path, "POST", "/healthcheck/fail")
        time.sleep(settings.notice_seconds)
        call(path, "POST", "/drain_listeners")
        until = time.monotonic() + settings.drain_seconds
        while (left := running(path)) and time.monotonic() < until:
            time.sleep(_PERIOD_S)
    except OSError as error:
        sys.stderr.write(f"fleetkeeper-router: cannot drain, Envoy does not answer: {error}\n")
        return 1
    if left:
        sys.stderr.write(
            f"fleetkeeper-router: {left} requests still run after {settings.drain_seconds:g} s\n"
        )
    return 0


def running(path: str) -> int:
    """Return the number of requests that run.

    Raises:
        OSError: if Envoy does not answer.
    """
    text = call(path, "GET", "/stats?filter=^http.requests.downstream_rq_active$")
    return int(text.rpartition(":")[2] or 0)


def call(path: str, method: str, target: str) -> str:
    """Return the answer of Envoy's admin interface.

    Raises:
        OSError: if it does not answer, or refuses.
    """
    connection = _Admin(path)
    try:
        connection.request(method, target)
        response = connection.getresponse()
        text = response.read().decode()
    except http.client.HTTPException as error:
        raise OSError(f"{target}: {error!r}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise OSError(f"{target}: status {response.status}: {text.strip()}")
    return text.strip()

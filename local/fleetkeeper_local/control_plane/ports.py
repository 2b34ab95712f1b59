"""Free ports on an address, and the processes that hold the others."""

from __future__ import annotations

import random
import socket
import time

import psutil

from fleetkeeper_local.common.errors import LocalError

LOWEST, HIGHEST = 20000, 32000
"""Below the range of ephemeral ports (from 32768): a client connection does not take a port
between the check here and the server's bind."""


_left: list[int] = []
"""Ports not yet returned, in random order. A caller may not listen yet on one that it has."""

DYING_S = 5.0
POLL_S = 0.05


class PortInUse(LocalError):
    """A port that a component needs is taken."""


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen on this address now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return `count` ports on which nothing listens. None comes again before all others came.

    Raises:
        LocalError: the range has too few free ports.
    """
    found: list[int] = []
    for _ in range(LOWEST, HIGHEST):
        if not _left:
            _left.extend(random.sample(range(LOWEST, HIGHEST), k=HIGHEST - LOWEST))
        port = _left.pop()
        if port not in found and is_free(host, port):
            found.append(port)
        if len(found) == count:
            return found
    raise LocalError(f"no {count} free ports between {LOWEST} and {HIGHEST} on {host}")


UNUSED_ADDRESS = "127.255.255.254"
"""A port is free here unless a process listens on every address."""


def require_free(host: str, port: int, what: str, *, exists: bool = True) -> None:
    """Raise PortInUse, naming the port and the process that holds it, unless the port is free.

    On an address that does not exist yet, a port is free unless a process listens on every address.
    A killed process with many threads seems to have ended before its last thread closes its
    sockets. Such a port is waited for.
    """
    deadline = time.monotonic() + DYING_S
    probed = host if exists else UNUSED_ADDRESS
    while not is_free(probed, port):
        owner = holder(port)
        if owner is not None or time.monotonic() > deadline:
            raise PortInUse(
                f"{what} needs {host}:{port}, which is held by "
                f"{owner or 'a process that is not visible from here'}; "
                "end that process or choose another port"
            )
        time.sleep(POLL_S)


def holder(port: int) -> str | None:
    """Return the process that listens on a port; None if it is ending or invisible to this user."""
    for connection in psutil.net_connections(kind="tcp"):
        if (
            connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr.port == port
        ):
            if connection.pid is None:
                return None
            try:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.Error:
                return f"pid {connection.pid}"
    return None

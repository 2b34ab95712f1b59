"""Free ports on an address, and the name of whoever holds one that is not free."""

from __future__ import annotations

import random
import socket

import psutil

from fleetkeeper_local.errors import LocalError

LOWEST, HIGHEST = 20000, 32000
"""Below the range from which the kernel picks ports of outgoing connections (from 32768): a port
found free here is not taken by a passing client before the server binds it."""


class PortInUse(LocalError):
    """A port that a component needs is taken."""


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on this address now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports on which nothing listens.

    Raises:
        LocalError: the host's range is all but exhausted.
    """
    order = random.sample(range(LOWEST, HIGHEST), k=min(HIGHEST - LOWEST, 50 * count))
    found: list[int] = []
    for port in order:
        if is_free(host, port):
            found.append(port)
            if len(found) == count:
                return found
    raise LocalError(f"no {count} free ports between {LOWEST} and {HIGHEST} on {host}")


def require_free(host: str, port: int, what: str) -> None:
    """Raises PortInUse, naming the port and the process that holds it, unless it is free."""
    if not is_free(host, port):
        raise PortInUse(
            f"{what} needs {host}:{port}, which is held by {holder(port)}; "
            "end that process or choose another port"
        )


def holder(port: int) -> str:
    """The process that listens on a port, as far as this user may see it."""
    for connection in psutil.net_connections(kind="tcp"):
        if (
            connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr.port == port
        ):
            if connection.pid is None:
                return "a process of another user"
            try:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.Error:
                return f"pid {connection.pid}"
    return "a process that cannot be seen from here"

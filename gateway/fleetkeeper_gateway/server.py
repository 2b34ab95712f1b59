"""The servers of the processes: sockets, and uvicorn without its signals."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn

KEEP_ALIVE_S: Final = 3700
"""Idle time of a client's connection, longer than that of the proxies before it: a minute (load balancers),
90 s (Traefik), an hour (Envoy). If the gateway closed first, a request that is on its way would fail."""
_BACKLOG = 2048
_TCP_OPTIONS: Final = {
    # Bytes that the kernel takes ahead of a slow reader. It would take megabytes, and report
    # progress only after a third of them.
    socket.TCP_NOTSENT_LOWAT: 65_536,
    # A client that vanished is found within two minutes.
    socket.TCP_KEEPIDLE: 60,
    socket.TCP_KEEPINTVL: 15,
    socket.TCP_KEEPCNT: 4,
}


class CannotStart(Exception):
    """The process cannot start; the message says why and what to do."""


class Server(uvicorn.Server):
    """A server without signal handlers. Those of uvicorn would end the process before its work is done."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handler."""
        yield

    def stop(self) -> None:
        """Stop after the running requests."""
        self.should_exit = True


def server_config(application: object) -> uvicorn.Config:
    """Return the configuration of a server for an ASGI application."""
    return uvicorn.Config(
        application,  # type: ignore[arg-type]  # our ASGI types are looser than uvicorn's
        interface="asgi3",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def allow_open_files() -> None:
    """Raise the soft limit of open files: a stream uses two, and the usual limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bound_memory(most: int) -> None:
    """Limit the data segment of this process (RLIMIT_DATA). Beyond it, the process gets a MemoryError or ends.

    The address space is not limited: the store's library alone reserves more than a gigabyte.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        CannotStart: if the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server(
            (host, port),
            family=family,
            backlog=_BACKLOG,
            dualstack_ipv6=family == socket.AF_INET6 and host == "::",
        )
    except OSError as error:
        raise CannotStart(f"cannot listen on {host} port {port}: {error}") from error
    # Inherited by each connection.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _TCP_OPTIONS.items():
        listener.setsockopt(socket.IPPROTO_TCP, option, value)
    return listener

"""A real redis-server: a process on a loopback port, which a test may freeze, kill and start again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from fleetkeeper_local.common import packages
from fleetkeeper_local.control_plane.pki import Authority
from fleetkeeper_local.control_plane.ports import free_ports
from tests.support.guards import GUARD_S

ATTEMPTS = 5
"""Another process may take a free port before the server does."""


def ensure_redis() -> None:
    """Install the server's Debian package if it is missing, or skip the test."""
    if packages.missing_packages(packages.REDIS_PACKAGES) and (
        os.geteuid() != 0 or shutil.which("apt-get") is None
    ):
        pytest.skip("the package redis-server is missing; installing it needs root on Debian")
    packages.ensure_packages(packages.REDIS_PACKAGES)


@dataclass
class RedisServer:
    """A redis-server that keeps nothing on disk: each start begins empty, on the same port.

    `options` follow our own, and replace them, such as ("--maxmemory", "2mb").
    """

    directory: Path
    options: tuple[str, ...] = ()
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Return the address without TLS."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self.directory / "redis-server.log"

    def client(self) -> redis.Redis:
        """Return a blocking client, for what a test asks of the server beside the gateway."""
        return redis.Redis(port=self.port, socket_timeout=GUARD_S, decode_responses=True)

    def start(self) -> RedisServer:
        """Start it and wait until it listens. The port stays the same after the first start."""
        chosen = self.port
        for _ in range(1 if chosen else ATTEMPTS):
            self.port = chosen or free_ports(1)[0]
            if self._listens():
                return self
        raise AssertionError(f"redis-server did not start: {self._tail()}")

    def freeze(self) -> None:
        """Stop it from running: it accepts connections and answers nothing (a slow server)."""
        self._running().send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it run again."""
        self._running().send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once. Its data is lost."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(GUARD_S)
            self.process = None

    def _running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "the server is not running"
        return self.process

    def _listens(self) -> bool:
        """Start the process, and return whether it got its port."""
        assert self.process is None, "the server is running already"
        self.directory.mkdir(parents=True, exist_ok=True)
        offset = self.log.stat().st_size if self.log.exists() else 0
        defaults = ("--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no",
                    "--dir", str(self.directory), "--daemonize", "no")  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["redis-server", *defaults, *self.options],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        end = time.monotonic() + GUARD_S
        while b"Ready to accept connections" not in self.log.read_bytes()[offset:]:
            if self.process.poll() is not None:
                self.process = None
                return False
            assert time.monotonic() < end, self._tail()
            time.sleep(0.01)
        return True

    def _tail(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()[-20:]


class RedisTls:
    """A further port with TLS, and the authority that signed its certificate."""

    def __init__(self, directory: Path) -> None:
        authority = Authority(directory, "redis-ca").ensure()
        server = authority.issue("redis", "redis", hosts=["127.0.0.1"], server=True)
        port = free_ports(1)[0]
        self.ca_file = authority.certificate
        self.url = f"rediss://127.0.0.1:{port}/0"
        self.options = ("--tls-port", str(port), "--tls-cert-file", str(server.certificate),
                        "--tls-key-file", str(server.key), "--tls-auth-clients", "no")  # fmt: skip


@contextmanager
def redis_server(directory: Path, *options: str) -> Iterator[RedisServer]:
    """A server that listens, with its files in this folder."""
    ensure_redis()
    server = RedisServer(directory, options)
    try:
        yield server.start()
    finally:
        server.kill()

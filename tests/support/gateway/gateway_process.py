"""A real `fleetkeeper-gateway` process: started, killed, and asked for its metrics and its resources."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import aiohttp
import psutil

from fleetkeeper.adapters.keys import new_control_keys
from fleetkeeper_local.control_plane.ports import free_ports
from tests.support.guards import GUARD_S

ENTRY = (sys.executable, str(Path(__file__).with_name("gateway_entry.py")))
PREFIX = "FLEETKEEPER_GATEWAY_"


@dataclass
class GatewayProcess:
    """One process of the gateway, which a test may start and end repeatedly."""

    directory: Path
    name: str = "a"
    settings: dict[str, str] = field(default_factory=dict)
    """By name without the prefix."""
    addresses: Mapping[str, int] = field(default_factory=dict)
    """Ports of the services, see gateway_entry."""
    command: tuple[str, ...] = (*ENTRY, "serve")
    process: subprocess.Popen[bytes] | None = None
    port: int = 0
    admin_port: int = 0

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self.directory / f"gateway-{self.name}.log"

    @property
    def url(self) -> str:
        """The address of the request port."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        """The address of health and metrics."""
        return f"http://127.0.0.1:{self.admin_port}"

    def start(self) -> Self:
        """Start it, on new ports."""
        self.port, self.admin_port = free_ports(2)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        own = {
            "HOST": "127.0.0.1",
            "PORT": str(self.port),
            "ADMIN_PORT": str(self.admin_port),
            "LOG_LEVEL": "debug",
            **self.settings,
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env={
                    **clean,
                    **{f"{PREFIX}{name}": value for name, value in own.items()},
                    "SERVICE_ADDRESSES": json.dumps(dict(self.addresses)),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    async def ready(self) -> Self:
        """Wait until its readiness probe succeeds."""
        async with aiohttp.ClientSession() as session:

            async def answers() -> bool:
                with suppress(aiohttp.ClientError):
                    async with session.get(f"{self.admin_url}/healthz/ready") as answer:
                        return answer.status == 200
                return False

            await self.until(answers, "it is not ready")
        return self

    async def until(self, done: Callable[[], object], otherwise: Callable[[], str] | str) -> None:
        """Wait until a condition holds, while the process lives; it may be a coroutine function."""
        try:
            async with asyncio.timeout(GUARD_S):
                while True:
                    assert self.alive, f"the process ended: {self.tail()}"
                    held = done()
                    if asyncio.iscoroutine(held):
                        held = await held
                    if held:
                        return
                    await asyncio.sleep(0.02)
        except TimeoutError:
            told = otherwise() if callable(otherwise) else otherwise
            raise AssertionError(f"{told}: {self.tail()}") from None

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-3000:]

    @property
    def alive(self) -> bool:
        """Return whether the process runs."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Return the process's ID."""
        assert self.process is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    async def stop(self) -> int:
        """Send SIGTERM and return its exit code."""
        assert self.process is not None
        self.signal(signal.SIGTERM)
        async with asyncio.timeout(GUARD_S):
            return await asyncio.to_thread(self.process.wait)

    async def metrics(self) -> dict[str, float]:
        """Return every series by its name with labels."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.admin_url}/metrics") as answer,
        ):
            assert answer.status == 200
            return series(await answer.text())

    async def metric(self, name: str, *labels: str) -> float:
        """Return the sum of a metric's series that have these labels; 0 if there is none."""
        found = await self.metrics()
        return sum(
            value
            for key, value in found.items()
            if key.partition("{")[0] == name and all(label in key for label in labels)
        )

    def client_sockets(self) -> int:
        """Return how many connections of clients it has."""
        return sum(
            connection.status == psutil.CONN_ESTABLISHED
            and bool(connection.laddr)
            and connection.laddr.port == self.port
            for connection in psutil.Process(self.pid).net_connections("tcp")
        )

    def tracebacks(self) -> list[str]:
        """Return the lines of its log that report a traceback."""
        text = self.log.read_text(errors="replace")
        return [line for line in text.splitlines() if "Traceback" in line or '"exception"' in line]


def series(text: str) -> dict[str, float]:
    """Return the series of a page of metrics."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def write_grant_keys(directory: Path) -> str:
    """Write a pair of keys as the Secret of the grant keys has them; return the public keys (JWKS)."""
    made = new_control_keys()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "signing.pem").write_text(made.private_pem)
    (directory / "jwks.json").write_text(made.jwks)
    return made.jwks

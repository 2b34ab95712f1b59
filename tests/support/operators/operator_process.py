"""One operator process: started, stopped, killed, and asked for its metrics."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, Protocol

import aiohttp

from fleetkeeper_local.control_plane.ports import free_ports

FORKS: Final = multiprocessing.get_context("forkserver")
"""A process that imports the operator once, from which each start forks."""
FORKS.set_forkserver_preload(["fleetkeeper.events", "fleetkeeper.runtime.main"])
STOCK: Final = (str(Path(sys.executable).with_name("fleetkeeper")), "run")
"""The installed command, which imports everything itself and waits as long as it does for users."""
SHORT_WAITS: Final = {
    "reconcile.status.build.WRITE_EVERY_S": 1.0,
    "reconcile.status.build.MOVING_S": 0.5,
    "reconcile.manifests.engine.MIN_READY_S": 1,
}
"""How long counts and progress may wait for the status, and when a ready replica counts as available.

With the usual 10, 3 and 5 s every test would wait for them before it is at rest.
"""
LONGER_LEASE: Final = {
    "FLEETKEEPER_LEADER__DURATION_S": "30",
    "FLEETKEEPER_LEADER__RENEW_DEADLINE_S": "20",
}
"""Nothing starts an operator again that a stall of the machine cost its Lease; for users it is 15 and 10 s."""
PATIENCE_S = 400.0
"""The limit of every wait. Events end a wait, so it only bounds how long a failure takes."""


def _run(environment: Mapping[str, str], log: Path, command: tuple[str, ...]) -> None:
    from tests.support.operators.operator_entry import run  # noqa: PLC0415 - for the forked process alone

    run(environment, log, command)


def end_forks() -> None:
    """End the process that forks, and wait for it: its time is that of the tests."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


class Surroundings(Protocol):
    """Where a process of the operator runs."""

    namespace: str
    directory: Path
    operator_kubeconfig: Path


@dataclass
class OperatorProcess:
    """One operator process, which a test may start and end repeatedly."""

    world: Surroundings
    name: str = "a"
    env: dict[str, str] = field(default_factory=dict)
    kubeconfig: Path | None = None
    waits: Mapping[str, float] | None = field(default_factory=dict)
    """Waits of `operator_entry` to shorten beside SHORT_WAITS; None: all are the usual ones."""
    command: tuple[str, ...] = ()
    """STOCK, or nothing for a forked process."""
    process: BaseProcess | None = None
    port: int = 0

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self.world.directory / f"operator-{self.name}.log"

    def start(self, **env: str) -> OperatorProcess:
        """Start it; `env` applies to this start alone."""
        self.port = free_ports(1)[0]
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("FLEETKEEPER_") or key == "FLEETKEEPER_CACHE"
        }
        environment = {
            **clean,
            "KUBECONFIG": str(self.kubeconfig or self.world.operator_kubeconfig),
            "POD_UID": self.name,
            "FLEETKEEPER_NAMESPACES": json.dumps([self.world.namespace]),
            "FLEETKEEPER_OPERATOR_NAMESPACE": self.world.namespace,
            "FLEETKEEPER_LISTEN_ADDRESS": "127.0.0.1",
            "FLEETKEEPER_LISTEN_PORT": str(self.port),
            # Fake pods have addresses and nothing behind them: nothing is to call them.
            "FLEETKEEPER_CONTROL_ENABLED": "false",
            "FLEETKEEPER_DIRECT_READS": "false",
            "WAITS": json.dumps({} if self.waits is None else {**SHORT_WAITS, **self.waits}),
            **({} if "FLEETKEEPER_CONFIG" in self.env | env else LONGER_LEASE),
            **self.env,
            **env,
        }
        self.process = FORKS.Process(
            target=_run, args=(environment, self.log, self.command), daemon=True
        )
        self.process.start()
        return self

    def peak_bytes(self) -> int:
        """Return the largest resident set that the process has had."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        row = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(row.split()[1]) * 1024

    def tracebacks(self) -> list[str]:
        """Return the log lines with a traceback, except kopf's reports of a broken watch."""
        return [
            line
            for line in self.log.read_text().splitlines()
            if "Traceback" in line and '"logger": "kopf.' not in line
        ]

    @property
    def alive(self) -> bool:
        """Return True if the process runs."""
        return self.process is not None and self.process.is_alive()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self.process is not None
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.join()

    async def ended(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its end and return its exit code, -9 after SIGKILL."""
        assert self.process is not None
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.process.sentinel, end.set)
        try:
            async with asyncio.timeout(timeout_s):
                await end.wait()
        except TimeoutError as error:
            error.add_note(self.log.read_text()[-3000:])
            raise
        finally:
            loop.remove_reader(self.process.sentinel)
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode

    async def stop(self) -> int:
        """Send SIGTERM and return its exit code."""
        self.signal(signal.SIGTERM)
        return await self.ended()

    async def metric(self, name: str, *labels: str) -> float | None:
        """Return the sum of a metric's series with these labels; None if there is none."""
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{self.port}/metrics") as answer,
            ):
                text = await answer.text()
        except aiohttp.ClientError:
            return None
        values = [
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith((f"{name} ", f"{name}{{")) and all(part in line for part in labels)
        ]
        return sum(values) if values else None

    async def leads(self, timeout_s: float = PATIENCE_S) -> OperatorProcess:
        """Wait until it leads."""
        async with asyncio.timeout(timeout_s):
            while await self.metric("fleetkeeper_leader") != 1.0:
                assert self.alive, self.log.read_text()[-3000:]
                await asyncio.sleep(0.05)
        return self

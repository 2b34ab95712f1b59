"""What stands between the load and the upstream: nothing, or the gateway as shipped, of this checkout or another."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import psutil
from proxy_figures import BEFORE, DIRECT, FULL, OURS
from thin_client import Target

from fleetkeeper_contract import client_keys
from fleetkeeper_local.control_plane.ports import free_ports

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
sys.path.insert(0, str(ROOT))
from tests.support.gateway.gateway_api import (  # noqa: E402 -- on the path set above
    KEYS_NAMESPACE,
    ApiStandIn,
    key_secret,
    service,
)
from tests.support.gateway.gateway_process import ENTRY, GatewayProcess, write_grant_keys  # noqa: E402
from tests.support.services.redis_server import RedisServer, ensure_redis  # noqa: E402

SERVICES, KEYS = 1000, 10_000
LIMITS: Final = {
    client_keys.REQUESTS_PER_MINUTE: "100000000",
    client_keys.TOKENS_PER_MINUTE: "900000000",
    client_keys.CONCURRENCY: "100000",
}
"""Limits that no load here reaches, so that each is checked and none refuses."""
START_S: Final = 300.0


@dataclass(frozen=True)
class Contender:
    """An address, and the process whose costs count."""

    name: str
    target: Target
    pid: int | None = None

    def cpu_s(self) -> float:
        """Return the processor time that the process and its children used so far."""
        if self.pid is None:
            return 0.0
        times = [item.cpu_times() for item in self._tree()]
        return sum(cpu.user + cpu.system for cpu in times)

    def rss_mib(self) -> float:
        """Return the resident memory of the process and its children."""
        return sum(item.memory_info().rss for item in self._tree()) / 2**20

    def _tree(self) -> list[psutil.Process]:
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]


def direct(port: int) -> Contender:
    """Return the contender that is not there."""
    return Contender(DIRECT, Target(port, {}))


@asynccontextmanager
async def upstream() -> AsyncIterator[int]:
    """Run the engine's stand-in; yield its port."""
    port = free_ports(1)[0]
    command = [sys.executable, str(HERE / "thin_upstream.py"), str(port)]
    process = _started(command)
    try:
        await _answers(f"http://127.0.0.1:{port}/", process)
        yield port
    finally:
        _ended(process)


@asynccontextmanager
async def gateway(
    folder: Path, port: int, *, full: bool = False, checkout: Path | None = None
) -> AsyncIterator[Contender]:
    """Run the gateway with its defaults: Redis, grants, limits, audit.

    Args:
        folder: for its files.
        port: of the upstream.
        full: with many services and keys, not one of each.
        checkout: whose gateway runs, after its `make setup`; None: this one's.
    """
    server = _redis(folder)
    key = client_keys.KEY_PREFIX + secrets.token_urlsafe(client_keys.KEY_BYTES)
    grant_keys = folder / "grant-keys"
    write_grant_keys(grant_keys)
    async with ApiStandIn() as api:
        api.put(service("team-a", "tiny"))
        api.put(key_secret("bench", key, namespaces="team-a", **LIMITS))
        if full:
            api.put(*(service(f"team-{n % 50}", f"model-{n}") for n in range(SERVICES)))
            for number in range(KEYS):
                other = f"{client_keys.KEY_PREFIX}{number:043d}"
                api.put(key_secret(f"key-{number}", other, namespaces=f"team-{number % 50}"))
        process = GatewayProcess(
            folder,
            settings={
                "LOG_LEVEL": "info",
                "KUBECONFIG": str(api.write_kubeconfig(folder / "kubeconfig")),
                "KEYS_NAMESPACE": KEYS_NAMESPACE,
                "GRANT_KEYS_DIRECTORY": str(grant_keys),
                "REDIS_URL": server.url,
            },
            addresses={"*": port},
            command=(*(ENTRY if checkout is None else entry_of(checkout)), "serve"),
        )
        try:
            await process.start().ready()
            target = Target(process.port, {"Authorization": f"Bearer {key}"})
            name = BEFORE if checkout is not None else FULL if full else OURS
            yield Contender(name, target, process.pid)
        finally:
            process.kill()
            server.kill()


def entry_of(checkout: Path) -> tuple[str, str]:
    """Return the command of another checkout's gateway, in the environment of that checkout."""
    home = checkout.resolve()
    (entry,) = (home / "tests/support").rglob(Path(ENTRY[1]).name)
    return str(home / ".venv/bin/python"), str(entry)


def _redis(folder: Path) -> RedisServer:
    """Start a Redis of its own for a contender, and make the contender's folder."""
    folder.mkdir(parents=True)
    ensure_redis()
    return RedisServer(folder / "redis").start()


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a process; its output goes to ours."""
    return subprocess.Popen(command)


def _ended(process: subprocess.Popen[bytes]) -> None:
    """End a process, by force if it does not end by itself."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _answers(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until an address answers, while its process lives."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(START_S):
        while True:
            if process.poll() is not None:
                raise SystemExit(f"the process of {url} ended with code {process.returncode}")
            with suppress(aiohttp.ClientError):
                async with session.get(url):
                    return
            await asyncio.sleep(0.1)


def redis_version() -> str:
    """Return the version that the page names."""
    command = ["redis-server", "--version"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return printed.split("v=")[1].split()[0]

"""What stands between the load and the upstream: nothing, the gateway as shipped, and LiteLLM's proxy."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import psutil
import yaml
from proxy_figures import DIRECT, FULL, OTHER, OURS
from thin_client import Target

from fleetkeeper_contract import client_keys
from fleetkeeper_local.common.paths import cache_dir
from fleetkeeper_local.control_plane.ports import free_ports

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
from setup import bootstrap_uv  # noqa: E402 -- on the path set above
from tests.support.gateway_api import KEYS_NAMESPACE, ApiStandIn, key_secret, service  # noqa: E402
from tests.support.gateway_process import GatewayProcess, write_grant_keys  # noqa: E402
from tests.support.redis_server import RedisServer, ensure_redis  # noqa: E402

LITELLM: Final = "1.106.12"
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
        return sum(one.user + one.system for one in times)

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
        await _answers(f"http://127.0.0.1:{port}/", process, {})
        yield port
    finally:
        _ended(process)


@asynccontextmanager
async def gateway(folder: Path, port: int, *, full: bool) -> AsyncIterator[Contender]:
    """Run the gateway with its defaults: Redis, grants, limits, audit; one service and one key, or many."""
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
        )
        try:
            await process.start().ready()
            target = Target(process.port, {"Authorization": f"Bearer {key}"})
            yield Contender(FULL if full else OURS, target, process.pid)
        finally:
            process.kill()
            server.kill()


@asynccontextmanager
async def litellm(folder: Path, port: int) -> AsyncIterator[Contender]:
    """Run LiteLLM's proxy with one worker, a master key, and limits that it counts in Redis.

    Its keys with limits of their own need a database. So this is less than what the gateway does: one
    key without limits, and limits of the deployment.
    """
    server = _redis(folder)
    own = free_ports(1)[0]
    key = f"sk-{secrets.token_hex(16)}"
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(litellm_config(port, server.port, key)))
    program = litellm_program()
    command = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(own)]
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    command += ["--num_workers", "1", "--telemetry", "False"]
    process = _started(command, environment, folder / "log")
    headers = {"Authorization": f"Bearer {key}"}
    try:
        await _answers(f"http://127.0.0.1:{own}/v1/models", process, headers)
        yield Contender(OTHER, Target(own, headers), process.pid)
    finally:
        _ended(process)
        server.kill()


def litellm_config(port: int, redis_port: int, key: str) -> dict[str, object]:
    """Return the configuration of LiteLLM's proxy."""
    deployment = {
        "model": "openai/tiny",
        "api_base": f"http://127.0.0.1:{port}/v1",
        "api_key": "none",
        "rpm": 100_000_000,
        "tpm": 1_000_000_000_000,
    }
    return {
        "model_list": [{"model_name": "tiny", "litellm_params": deployment}],
        "router_settings": {
            "routing_strategy": "usage-based-routing-v2",
            "redis_host": "127.0.0.1",
            "redis_port": redis_port,
            "num_retries": 0,
        },
        "litellm_settings": {"json_logs": True, "request_timeout": 3600},
        "general_settings": {"master_key": key, "global_max_parallel_requests": 100_000},
    }


def litellm_program() -> Path:
    """Install LiteLLM's proxy into an environment of its own in the cache; return its command."""
    home = cache_dir() / f"litellm-{LITELLM}"
    if not (home / ".complete").exists():
        uv = str(bootstrap_uv())
        subprocess.run(
            [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, home],
            check=True,
        )
        install = [uv, "pip", "install", "--quiet", "--python", str(home / "bin" / "python")]
        subprocess.run([*install, f"litellm[proxy]=={LITELLM}"], check=True)
        (home / ".complete").touch()
    return home / "bin" / "litellm"


def _redis(folder: Path) -> RedisServer:
    """Start a Redis of its own for a contender, and make the contender's folder."""
    folder.mkdir(parents=True)
    ensure_redis()
    return RedisServer(folder / "redis").start()


def _started(
    command: list[str], environment: Mapping[str, str] | None = None, log: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a process. Its output goes to the log, or to ours."""
    if log is None:
        return subprocess.Popen(command, env=environment)
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


def _ended(process: subprocess.Popen[bytes]) -> None:
    """End a process, by force if it does not end by itself."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _answers(url: str, process: subprocess.Popen[bytes], headers: Mapping[str, str]) -> None:
    """Wait until an address answers, while its process lives."""
    async with aiohttp.ClientSession(headers=headers) as session, asyncio.timeout(START_S):
        while True:
            if process.poll() is not None:
                raise SystemExit(f"the process of {url} ended with code {process.returncode}")
            with suppress(aiohttp.ClientError):
                async with session.get(url):
                    return
            await asyncio.sleep(0.1)


def versions(*, with_litellm: bool) -> dict[str, str]:
    """Return the versions that the page names."""
    command = ["redis-server", "--version"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {"redis": told.split("v=")[1].split()[0]}
    if with_litellm:
        python = str(litellm_program().with_name("python"))
        listed = subprocess.run(
            [python, "-c", _VERSIONS], capture_output=True, text=True, check=True
        )
        found |= json.loads(listed.stdout)
    return found


_VERSIONS: Final = (
    "import importlib.metadata as m, json;"
    "print(json.dumps({n: m.version(n) for n in ('litellm', 'uvicorn', 'fastapi')}))"
)

"""The batch process as it is shipped, in front of one engine: Redis, files in a directory, a key."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from openai import AsyncOpenAI
from openai.types import Batch

from fleetkeeper_contract import client_keys
from fleetkeeper_local.control_plane.ports import free_ports
from fleetkeeper_local.load.schedule import Arrival
from tests.support.gateway.gateway_api import KEYS_NAMESPACE, ApiStandIn, key_secret, service
from tests.support.services.redis_server import RedisServer, ensure_redis

ENDPOINT = "/v1/completions"
START_S = 120.0
POLL_S = 0.2
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


@dataclass(frozen=True)
class RealProcess:
    """The process, and what a benchmark asks beside its API."""

    api: AsyncOpenAI
    """With the key of a client."""
    url: str
    key: str
    pid: int
    redis: RedisServer
    store: str
    """As the settings name it."""


@asynccontextmanager
async def running_process(
    folder: Path, upstream: str, model: str, **settings: str
) -> AsyncIterator[RealProcess]:
    """Run the process."""
    (folder / "store").mkdir(parents=True)
    ensure_redis()
    redis = RedisServer(folder / "redis").start()
    key = client_keys.KEY_PREFIX + secrets.token_urlsafe(client_keys.KEY_BYTES)
    (folder / "upstream-key").write_text("not-asked-for")
    port, admin_port = free_ports(2)
    try:
        async with ApiStandIn() as api:
            api.put(service("team-a", model))
            api.put(
                key_secret("bench", key, namespaces="team-a", **{client_keys.HIGHEST_TIER: "batch"})
            )
            url, store = f"http://127.0.0.1:{port}", f"file://{folder / 'store'}"
            own = {
                "HOST": "127.0.0.1",
                "BATCH_PORT": str(port),
                "BATCH_ADMIN_PORT": str(admin_port),
                "BATCH_STORE": store,
                "BATCH_UPSTREAM": upstream,
                "BATCH_UPSTREAM_KEY_FILE": str(folder / "upstream-key"),
                "REDIS_URL": redis.url,
                "KUBECONFIG": str(api.write_kubeconfig(folder / "kubeconfig")),
                "KEYS_NAMESPACE": KEYS_NAMESPACE,
                **settings,
            }
            process = _started(folder / "log", own)
            try:
                await _until_ready(
                    f"http://127.0.0.1:{admin_port}/healthz/ready", process, folder / "log"
                )
                async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                    yield RealProcess(client, url, key, process.pid, redis, store)
            finally:
                process.terminate()
                process.wait(60)
    finally:
        redis.kill()


def _started(log: Path, settings: dict[str, str]) -> subprocess.Popen[bytes]:
    prefix = "FLEETKEEPER_GATEWAY_"
    own = {f"{prefix}{name}": value for name, value in settings.items()}
    with log.open("wb") as output:
        return subprocess.Popen(
            [str(Path(sys.executable).with_name("fleetkeeper-gateway")), "batch"],
            env={**os.environ, **own},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


async def _until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + START_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < end_s and process.poll() is None:
            with suppress(aiohttp.ClientError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(POLL_S)
    raise RuntimeError(f"the batch process is not ready: {_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text()[-3000:]


def write_lines(path: Path, model: str, arrivals: Sequence[Arrival]) -> None:
    """Write an input file with the requests that the other modes send."""
    with path.open("w") as file:
        for arrival in arrivals:
            body = {
                "model": model,
                "prompt": arrival.prompt,
                "max_tokens": arrival.output_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
            }
            line = {
                "custom_id": str(arrival.number),
                "method": "POST",
                "url": ENDPOINT,
                "body": body,
            }
            file.write(json.dumps(line) + "\n")


async def upload(api: AsyncOpenAI, path: Path) -> str:
    """Upload a file, and return its ID."""
    file = await api.files.create(file=path, purpose="batch")
    return str(file.id)


async def create(api: AsyncOpenAI, file_id: str) -> Batch:
    """Create a batch of an uploaded file."""
    return await api.batches.create(
        input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h"
    )


async def run_file(api: AsyncOpenAI, path: Path) -> tuple[float, int]:
    """Run a file; return the seconds from the creation of its batch to its end, and failed lines."""
    file_id = await upload(api, path)
    began_s = time.monotonic()
    batch = await create(api, file_id)
    while batch.status not in ENDED:
        await asyncio.sleep(POLL_S)
        batch = await api.batches.retrieve(batch.id)
    took_s = time.monotonic() - began_s
    return took_s, batch.request_counts.total - batch.request_counts.completed

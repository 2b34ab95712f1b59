"""The batch process and everything around it: the gateway, an engine, Redis, an API server, clients."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import openai

from fleetkeeper_contract import client_keys
from fleetkeeper_local.control_plane.ports import free_ports
from tests.support.batch.batch_engine import BatchEngine
from tests.support.gateway.gateway_api import KEYS_NAMESPACE, ApiStandIn, key_secret, service
from tests.support.gateway.gateway_process import ENTRY, GatewayProcess, write_grant_keys
from tests.support.gateway.gateway_surroundings import GENEROUS, MODEL, NAMESPACE, new_key
from tests.support.guards import GUARD_S
from tests.support.services.redis_server import RedisServer, ensure_redis

ENDPOINT: Final = "/v1/completions"
ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
FAILURES: Final = (openai.APIError, OSError)
"""What a client meets while processes are killed."""


@dataclass
class FixedGateway(GatewayProcess):
    """`serve` on the same port after each start."""

    def start(self) -> Self:
        """Start it."""
        super().start()
        self.port = int(self.settings["PORT"])
        return self


@dataclass
class BatchProcess(GatewayProcess):
    """`batch`, on new ports after each start."""

    command: tuple[str, ...] = (*ENTRY, "batch")

    def start(self) -> Self:
        """Start it."""
        ports = free_ports(2)
        self.settings |= {"BATCH_PORT": str(ports[0]), "BATCH_ADMIN_PORT": str(ports[1])}
        super().start()
        self.port, self.admin_port = ports
        return self

    def client(self, key: str, **options: Any) -> openai.AsyncOpenAI:
        """Return the official client of a key."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, **options)


@dataclass
class BatchSurroundings:
    """What a test of real batch processes has."""

    directory: Path
    api: ApiStandIn
    redis: RedisServer
    engine: BatchEngine
    serve: FixedGateway
    keys: dict[str, str] = field(default_factory=dict)
    """Secrets by ID."""
    processes: list[BatchProcess] = field(default_factory=list)

    @property
    def store(self) -> Path:
        """The directory with files and results."""
        return self.directory / "store"

    def add_key(self, name: str) -> str:
        """Add a key of the namespace without limits that a test reaches; return it."""
        key = self.keys[name] = new_key()
        self.api.put(key_secret(name, key, **{client_keys.NAMESPACES: NAMESPACE, **GENEROUS}))
        return key

    def batch(self, name: str = "batch-a", **settings: str) -> BatchProcess:
        """Return a batch process that does not run yet."""
        process = BatchProcess(
            self.directory,
            name,
            {
                **self.common_settings(),
                "BATCH_STORE": f"file://{self.store}",
                "BATCH_STORE_SHARED": "true",
                "BATCH_UPSTREAM": self.serve.url,
                **settings,
            },
        )
        self.processes.append(process)
        return process

    def common_settings(self) -> dict[str, str]:
        """Return what both processes are told."""
        return {
            "KUBECONFIG": str(self.api.write_kubeconfig(self.directory / "kubeconfig.json")),
            "KEYS_NAMESPACE": KEYS_NAMESPACE,
            "GRANT_KEYS_DIRECTORY": str(self.directory / "grant-keys"),
            "REDIS_URL": self.redis.url,
        }


def line(number: int, **fields: Any) -> dict[str, Any]:
    """Return a line of an input file, whose prompt is its number."""
    body = {"model": MODEL, "prompt": str(number), "max_tokens": 3, **fields}
    return {"custom_id": f"c-{number}", "method": "POST", "url": ENDPOINT, "body": body}


async def until_engine(engine: BatchEngine, what: str, least: int) -> None:
    """Wait until an engine has `answered` so many requests, or has so many `running`."""
    async with asyncio.timeout(GUARD_S):
        while await engine.asked(what) < least:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.1)


def jsonl(lines: Iterable[dict[str, Any]]) -> bytes:
    """Return an input file."""
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def submit(
    client: openai.AsyncOpenAI, lines: Iterable[dict[str, Any]], window: str = "24h"
) -> str:
    """Upload a file, create its batch and return the ID."""
    file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id,
        endpoint=ENDPOINT,
        completion_window=window,
    )
    return str(batch.id)


async def ended(client: openai.AsyncOpenAI, batch_id: str, *, patience_s: float = GUARD_S) -> Any:
    """Wait until a batch has ended, and return it."""
    async with asyncio.timeout(patience_s):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ENDED:
                return batch
            await asyncio.sleep(0.1)


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of a file; none if there is none."""
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(text) for text in content.text.splitlines()]


def numbers(lines: Iterable[dict[str, Any]]) -> list[int]:
    """Return the numbers of the input lines that lines of a file are about."""
    return [int(one["custom_id"].removeprefix("c-")) for one in lines]


@asynccontextmanager
async def batch_surroundings(
    directory: Path, *, engine_most: int = 64, engine_deaths: float = 0.0
) -> AsyncIterator[BatchSurroundings]:
    """Yield the surroundings with all but the batch processes running, and the key `client`."""
    ensure_redis()
    write_grant_keys(directory / "grant-keys")
    append_only = ("--appendonly", "yes", "--appendfsync", "everysec")
    redis = RedisServer(directory / "redis", append_only)
    engine_port, port = free_ports(2)
    engine = BatchEngine(directory, engine_port, engine_most, engine_deaths)
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(ApiStandIn())
        serve = FixedGateway(directory, "serve", addresses={"*": engine_port})
        world = BatchSurroundings(directory, api, redis, engine, serve)
        api.put(service(NAMESPACE, MODEL))
        world.add_key("client")
        try:
            await asyncio.to_thread(redis.start)
            await asyncio.to_thread(engine.start)
            serve.settings |= {**world.common_settings(), "PORT": str(port)}
            await serve.start().ready()
            yield world
        finally:
            for process in (*world.processes, serve):
                process.kill()
            engine.kill()
            redis.kill()


def append_only_files(redis: RedisServer) -> Path:
    """Return the folder with the append-only files of a server."""
    return redis.directory / "appendonlydir"


def copy_append_only(redis: RedisServer, to: Path) -> None:
    """Copy the append-only files of a server that runs: their ends may be torn."""
    if to.exists():
        shutil.rmtree(to)
    shutil.copytree(append_only_files(redis), to)


def restore_append_only(redis: RedisServer, copy: Path) -> None:
    """Let a server that does not run begin with an earlier copy of its files."""
    shutil.rmtree(append_only_files(redis))
    shutil.copytree(copy, append_only_files(redis))

"""Everything around real processes of the gateway: an API server, services, Redis, and clients."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from fleetkeeper_contract import client_keys
from tests.support.gateway.gateway_api import (
    KEYS_NAMESPACE,
    SECRETS,
    SERVICES,
    ApiStandIn,
    key_secret,
    service,
)
from tests.support.gateway.gateway_process import GatewayProcess, write_grant_keys
from tests.support.gateway.gateway_upstream import UpstreamStandIn
from tests.support.guards import GUARD_S
from tests.support.services.redis_server import RedisServer, ensure_redis

SHARES: Final = {"WAITS_FOR_REDIS": "true"}
"""Settings of a gateway whose limits stay shared, however busy the machine is, see gateway_entry."""
NAMESPACE: Final = "team-a"
MODEL: Final = "tiny"
GENEROUS: Final = {
    client_keys.REQUESTS_PER_MINUTE: "9000000",
    client_keys.TOKENS_PER_MINUTE: "900000000",
    client_keys.CONCURRENCY: "10000",
}
"""Limits that are counted, and that no test reaches."""
PROMPT: Final = "canary-prompt-5b1d"
"""A text that no log may have."""


def new_key() -> str:
    """Return a key as clients have it."""
    return client_keys.KEY_PREFIX + secrets.token_urlsafe(client_keys.KEY_BYTES)


@dataclass
class Surroundings:
    """What a test of real processes has."""

    directory: Path
    api: ApiStandIn
    upstream: UpstreamStandIn
    redis: RedisServer
    session: aiohttp.ClientSession
    key: str = field(default_factory=new_key)
    addresses: dict[str, int] = field(default_factory=dict)
    """Ports of services that are not the stand-in, see gateway_entry."""
    processes: list[GatewayProcess] = field(default_factory=list)

    async def start(self, name: str = "a", **settings: str) -> GatewayProcess:
        """Start a gateway and wait until it is ready."""
        return await self.begin(name, **settings).ready()

    def begin(self, name: str = "a", **settings: str) -> GatewayProcess:
        """Start a gateway."""
        process = GatewayProcess(
            self.directory,
            name,
            {
                "KUBECONFIG": str(self.api.write_kubeconfig(self.directory / "kubeconfig.json")),
                "KEYS_NAMESPACE": KEYS_NAMESPACE,
                "GRANT_KEYS_DIRECTORY": str(self.directory / "grant-keys"),
                "REDIS_URL": self.redis.url,
                **settings,
            },
            {"*": self.upstream.port, **self.addresses},
        )
        self.processes.append(process)
        return process.start()

    def add_key(self, name: str, **entries: str) -> str:
        """Add a key of the namespace without a limit that a test reaches; return it."""
        key = new_key()
        self.put_key(name, key, **entries)
        return key

    def put_key(self, name: str, key: str, **entries: str) -> None:
        """Create or change a key."""
        usual = {client_keys.NAMESPACES: NAMESPACE, **GENEROUS}
        self.api.put(key_secret(name, key, **{**usual, **entries}))

    async def ask(
        self, process: GatewayProcess, key: str | None = None, **fields: Any
    ) -> tuple[int, bytes]:
        """Send a completion; return the status and the whole answer.

        Raises:
            aiohttp.ClientError: the connection ended before the answer did.
        """
        async with self.open(process, key, **fields) as answer:
            return answer.status, await answer.read()

    def open(
        self, process: GatewayProcess, key: str | None = None, **fields: Any
    ) -> aiohttp.client._RequestContextManager:
        """Begin a completion, whose answer is to be read."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, **fields}
        return self.session.post(
            f"{process.url}/v1/completions",
            data=json.dumps(body),
            headers={
                "Authorization": f"Bearer {key or self.key}",
                "Content-Type": "application/json",
            },
            timeout=aiohttp.ClientTimeout(total=GUARD_S),
        )

    async def until_shared(self, process: GatewayProcess) -> None:
        """Wait until a gateway shares its limits."""

        async def shared() -> bool:
            return await process.metric("fleetkeeper_gateway_limits_shared") == 1

        await process.until(shared, "limits never became shared")

    async def at_rest(self, process: GatewayProcess) -> None:
        """Wait until nothing of any request is left: requests, bytes, sockets, slots in Redis."""

        left: dict[str, float] = {}

        async def empty() -> bool:
            left["requests"] = await process.metric("fleetkeeper_gateway_open_requests")
            left["bytes"] = await process.metric("fleetkeeper_gateway_body_bytes")
            left["sockets"] = process.client_sockets()
            left["slots"] = self.slots()
            return not any(left.values())

        await process.until(empty, lambda: f"of the requests are left: {left}")

    def slots(self) -> int:
        """Return the concurrency slots that are taken in Redis, of all keys."""
        client = self.redis.client()
        names = client.scan_iter("fleetkeeper:limits:*:slots", count=1000)
        return sum(int(client.zcard(name)) for name in names)


@asynccontextmanager
async def surroundings(directory: Path) -> AsyncIterator[Surroundings]:
    """Yield the surroundings with one service, which demands grants, and one key."""
    ensure_redis()
    write_grant_keys(directory / "grant-keys")
    redis = RedisServer(directory / "redis")
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(ApiStandIn())
        upstream = await stack.enter_async_context(UpstreamStandIn())
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        await asyncio.to_thread(redis.start)
        world = Surroundings(directory, api, upstream, redis, session)
        api.put(service(NAMESPACE, MODEL))
        api.put(service("team-b", "secret"))
        world.key = world.add_key("client")
        try:
            yield world
        finally:
            for process in world.processes:
                process.kill()
            redis.kill()


__all__ = ["SECRETS", "SERVICES", "Surroundings", "surroundings"]

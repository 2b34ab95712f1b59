"""A gateway with parts in memory, and a service whose answers a test scripts. All sockets are real."""

# ruff: noqa: ARG002 - the Protocols name the arguments
from __future__ import annotations

import asyncio
import contextlib
import io
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import aiohttp
from aiohttp import web
from yarl import URL

from fleetkeeper_contract.sleep import SleepState
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.hold import Hold
from fleetkeeper_gateway.http.parts import Gateway, Parts
from fleetkeeper_gateway.http.settings import ServeSettings
from fleetkeeper_gateway.interfaces import (
    Demand,
    Key,
    KeyRefused,
    LimitRefused,
    Service,
    Sleeping,
)
from fleetkeeper_gateway.serve import Addresses, Signals, serve
from tests.support.guards import GUARD_S

SECRET: Final = "fk_the-secret-of-the-test"
AUTHORIZATION: Final = f"Bearer {SECRET}"
PROMPT: Final = "the-prompt-of-the-test"
CHAT: Final = "/v1/chat/completions"
KEY: Final = Key("key-1", "test", frozenset({"team"}), highest=Tier.STANDARD)


def service(name: str = "chat", url: str = "http://127.0.0.1:9", **changes: Any) -> Service:
    """Returns a service of the namespace `team` that serves `m`."""
    ready = Service("team", name, f"uid-{name}", ("m",), url, False, "Ready", True, 1_700_000_000)
    return replace(ready, **changes)


def asleep(number: int = 1, state: str = "Asleep", **changes: Any) -> Sleeping:
    """Returns the sleep of a service."""
    return replace(Sleeping(number, SleepState(state)), **changes)


def chat(**fields: Any) -> bytes:
    """Returns the body of a request to `m`."""
    return json.dumps({"model": "m", "prompt": PROMPT, **fields}).encode()


class MemoryServices:
    """Services that a test sets."""

    def __init__(self) -> None:
        self.synced = True
        self.known: dict[str, Service] = {}

    def set(self, *services: Service) -> None:
        self.known = {one.path: one for one in services}

    def serving(self, model: str) -> Sequence[Service]:
        return [one for one in self.known.values() if model in one.models]

    def named(self, namespace: str, name: str) -> Service | None:
        return self.known.get(f"{namespace}/{name}")

    def all(self) -> Iterable[Service]:
        return self.known.values()


class MemoryKeys:
    """Keys by their secret."""

    def __init__(self) -> None:
        self.synced = True
        self.known: dict[str, Key] = {AUTHORIZATION: KEY}
        self.revoked: set[str] = set()

    def authenticate(self, authorization: str | None, now: float) -> Key:
        if authorization is None:
            raise KeyRefused("missing_api_key", "Send a key.")
        key = self.known.get(authorization)
        if key is None:
            raise KeyRefused("invalid_api_key", "The key is not known.")
        return key

    def named(self, key_id: str, now: float) -> Key:
        key = next((key for key in self.known.values() if key.id == key_id), None)
        if key is None or key_id in self.revoked:
            raise KeyRefused("invalid_api_key", "The key is not known.", key_id)
        return key

    def in_force(self, key_id: str, now: float) -> bool:
        return key_id not in self.revoked


@dataclass(slots=True)
class MemoryAdmission:
    """An admission that remembers how it ended."""

    demand: Demand
    headers: Mapping[str, str] = field(default_factory=lambda: {"x-ratelimit-limit-requests": "7"})
    released: list[bool] = field(default_factory=list)
    least: int = 0
    may_be_released: asyncio.Event | None = None
    """A test sets it to hold the release."""

    async def release(self, *, sent: bool, least: int = 0) -> None:
        if self.released:
            return
        self.released.append(sent)
        self.least = least
        if self.may_be_released is not None:
            await self.may_be_released.wait()


class MemoryLimiter:
    """Admits all, or refuses as a test says."""

    def __init__(self) -> None:
        self.admissions: list[MemoryAdmission] = []
        self.refusal: LimitRefused | None = None
        self.refuses_all = False
        """Whether the limit of requests is reached, which no body changes."""
        self.may_release: asyncio.Event | None = None

    async def admit(self, demand: Demand) -> MemoryAdmission:
        if self.refusal is not None:
            raise self.refusal
        self.admissions.append(MemoryAdmission(demand, may_be_released=self.may_release))
        return self.admissions[-1]

    def check(self, key: Key, tier: Tier) -> None:
        if self.refuses_all and self.refusal is not None:
            raise self.refusal

    async def settle(self, key_id: str, tier: Tier, request_id: str, tokens: int) -> None:
        raise AssertionError("the usage process settles")

    async def close(self) -> None:
        return


class MemoryMarks:
    """The wake marks that were asked for, in order and without repetition."""

    def __init__(self) -> None:
        self.wanted: list[tuple[str, int, Tier]] = []

    def want(self, service: Service, tier: Tier) -> None:
        if service.sleep is None or not service.sleep.ends_by_mark:
            return
        wanted = (service.uid, service.sleep.number, tier)
        if wanted not in self.wanted:
            self.wanted.append(wanted)

    async def run(self) -> None:
        await asyncio.Event().wait()


class MemoryGrants:
    """Grants that can be read in a test: `hops-N:...` is one of our own. `batch.KEY.signed` is a token."""

    def __init__(self) -> None:
        self.signed: list[dict[str, Any]] = []
        self.error: RuntimeError | None = None

    def sign(self, service: Service, **claims: Any) -> str:
        if self.error is not None:
            raise self.error
        attempt = uuid.uuid4().hex
        self.signed.append({"service": service.uid, "attempt_id": attempt, **claims})
        return f"hops-{claims['hops']}:{attempt}"

    def key_of(self, token: str) -> str | None:
        kind, _, rest = token.partition(".")
        return (
            rest.removesuffix(".signed") if kind == "batch" and rest.endswith(".signed") else None
        )

    def hops_of(self, grant: str) -> int | None:
        text = grant.removeprefix("hops-").partition(":")[0]
        return int(text) if grant.startswith("hops-") and text.isdigit() else None


class MemoryAudit:
    """The audit log as a list."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def request(self, **fields: Any) -> None:
        self.requests.append(fields)

    def change(self, *, key_id: str, change: str, actor: str | None) -> None:
        raise AssertionError("the request path changes no key")


Script = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def answer_ok(request: web.Request) -> web.StreamResponse:
    """Answers as an engine does."""
    return web.json_response({"ok": True})


@dataclass(slots=True)
class Received:
    """A request as the service received it."""

    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]


class StandIn:
    """A service's pod: answers as the script says, and keeps what it received."""

    def __init__(self) -> None:
        self.script: Script = answer_ok
        self.received: list[Received] = []
        self.gone = asyncio.Event()
        """Set when a request's connection broke before its answer was complete."""
        self.url = ""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        headers = [(k.decode(), v.decode("latin-1")) for k, v in request.raw_headers]
        self.received.append(Received(request.path_qs, headers, await request.read()))
        try:
            return await self.script(request)
        except (asyncio.CancelledError, ConnectionError):
            self.gone.set()
            raise

    @contextlib.asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[StandIn]:
        app = web.Application(client_max_size=1024**3)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


def settings(**changes: Any) -> ServeSettings:
    """Returns settings for loopback. Waits that a test does not ask for are long."""
    values = {"host": "127.0.0.1", "port": 0, "admin_port": 0, "wait_seconds": GUARD_S, **changes}
    return ServeSettings(**values)


class World:
    """A running gateway, its parts, a service, and a client."""

    def __init__(self, upstream: StandIn, client: aiohttp.ClientSession) -> None:
        self.upstream = upstream
        self.client = client
        self.services = MemoryServices()
        self.keys = MemoryKeys()
        self.limiter = MemoryLimiter()
        self.marks = MemoryMarks()
        self.hold = Hold(self.services, self.marks, hold_s=GUARD_S, total_bytes=64 * 1024**2)
        self.grants = MemoryGrants()
        self.audit = MemoryAudit()
        self.signals = Signals()
        self.services.set(service(url=upstream.url))
        self.gateway: Gateway
        self.addresses: Addresses
        self.task: asyncio.Task[None]

    def parts(self) -> Parts:
        return Parts(
            services=self.services,
            keys=self.keys,
            limiter=self.limiter,
            hold=self.hold,
            signer=self.grants,
            grants=self.grants,
            batch_tokens=self.grants,
            audit=self.audit,
            estimate=lambda size, tokens, n: size // 4 + (tokens or 0) * n,
            background=(self.hold.run,),
        )

    @contextlib.asynccontextmanager
    async def running(self, **changes: Any) -> AsyncIterator[World]:
        ready = asyncio.Event()

        def started(addresses: Addresses, gateway: Gateway) -> None:
            self.addresses, self.gateway = addresses, gateway
            ready.set()

        self.task = asyncio.create_task(
            serve(settings(**changes), self.parts(), self.signals, started)
        )
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self.task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            waiting.cancel()
            await self.task
        try:
            yield self
        finally:
            self.signals.receive()
            self.signals.receive()
            async with asyncio.timeout(GUARD_S):
                await self.task

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.addresses.requests[1]}{path}"

    def admin_url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.addresses.admin[1]}{path}"

    def post(
        self, body: bytes | None = None, path: str = CHAT, **headers: str
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Sends a request with the test's key; an underscore in a header's name is a hyphen."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(
            URL(self.url(path), encoded=True),
            data=io.BytesIO(chat() if body is None else body),
            headers={"Authorization": AUTHORIZATION, "Content-Type": "application/json", **named},
        )

    async def refused(
        self, body: bytes | None = None, path: str = CHAT, **headers: str
    ) -> tuple[int, str]:
        """Returns the status and the code of a request that the gateway refuses."""
        async with self.post(body, path, **headers) as response:
            return response.status, (await response.json())["error"]["code"]

    async def raw(self, *parts: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a connection and sends bytes."""
        reader, writer = await asyncio.open_connection(*self.addresses.requests)
        for part in parts:
            writer.write(part)
            await writer.drain()
        return reader, writer

    async def raw_status(self, data: bytes) -> int | None:
        """Returns the status that answers raw bytes; None if the connection ends without one."""
        reader, writer = await self.raw(data)
        async with asyncio.timeout(GUARD_S):
            line = await reader.readline()
        writer.close()
        return int(line.split()[1]) if line else None

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something holds that no event tells of."""
        end = time.monotonic() + GUARD_S
        while not holds():
            assert time.monotonic() < end, "it never came true"
            await asyncio.sleep(0.01)


def head(*lines: str, path: str = CHAT, key: str = AUTHORIZATION) -> bytes:
    """Returns the head of a raw request."""
    first = (f"POST {path} HTTP/1.1", "Host: gateway", f"Authorization: {key}")
    return "\r\n".join([*first, *lines, "", ""]).encode("latin-1")

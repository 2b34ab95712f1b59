"""A router, the engines behind it, and the DNS server that knows their addresses.

Engines are stand-ins on addresses of loopback (127.1.0.0/16), all with the same two ports, as the pods of a
service have them. Each keeps what it was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import aiohttp
import requests
from aiohttp import web

from fleetkeeper_local.control_plane.ports import free_ports
from fleetkeeper_router.drain import call
from fleetkeeper_router.settings import PREFIX, Policy
from tests.support.engine.engine_environment import free_port
from tests.support.engine.supervised_engine import RunningEngine
from tests.support.guards import GUARD_S

NAME: Final = "engines.test"
DRAINED: Final = {"error": {"message": "shutting down", "type": "server_error", "code": "draining"}}
FULL: Final = {
    "error": {
        "message": "full",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }
}
_MOST_UDP: Final = 512


class Dns(asyncio.DatagramProtocol):
    """A DNS server: one name, whose IPv4 addresses change. Long answers need TCP."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.tcp_answers = 0
        self.queries = 0
        self.asked: list[tuple[float, int]] = []
        """Time and kind of each question: 1 for IPv4 addresses, 28 for IPv6 ones."""
        self.fails = False
        """Every query gets SERVFAIL."""
        self.port = 0
        self._transport: asyncio.DatagramTransport | None = None

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Dns]:
        """Listen at one port by UDP and TCP."""
        self.port = free_port()
        server = await asyncio.start_server(self._by_tcp, "127.0.0.1", self.port)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", self.port)
        )
        try:
            yield self
        finally:
            transport.close()
            server.close()
            await server.wait_closed()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the socket."""
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Answer, or say that the answer is too long for this."""
        answer = self._answer(data)
        if len(answer) > _MOST_UDP:
            head = bytearray(answer[: self._question_end(data)])
            head[2] |= 2  # truncated
            head[6:8] = bytes(2)
            answer = bytes(head)
        assert self._transport is not None
        self._transport.sendto(answer, addr)

    async def _by_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = struct.unpack("!H", await reader.readexactly(2))
                answer = self._answer(await reader.readexactly(length))
                self.tcp_answers += 1
                writer.write(struct.pack("!H", len(answer)) + answer)
        writer.close()

    def _answer(self, query: bytes) -> bytes:
        end = self._question_end(query)
        self.queries += 1
        (kind,) = struct.unpack("!H", query[end - 4 : end - 2])
        self.asked.append((time.monotonic(), kind))
        if self.fails:
            return query[:2] + struct.pack("!HHHHH", 0x8582, 1, 0, 0, 0) + query[12:end]
        addresses = self.addresses if kind == 1 else []
        head = query[:2] + struct.pack("!HHHHH", 0x8580, 1, len(addresses), 0, 0)
        records = [
            struct.pack("!HHHIH", 0xC00C, 1, 1, 5, 4) + socket.inet_aton(address)
            for address in addresses
        ]
        return head + query[12:end] + b"".join(records)

    @staticmethod
    def _question_end(query: bytes) -> int:
        return query.index(0, 12) + 5


@dataclass
class Received:
    """A request as an engine got it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        """Return the only value of a header; None if it is absent."""
        values = [value for key, value in self.headers if key.lower() == name.lower()]
        assert len(values) <= 1, values
        return values[0] if values else None


@dataclass
class Engine:
    """A stand-in of an engine. By default it answers at once with what `answer` is."""

    address: str
    ready: bool | None = True
    """None: it does not answer whether it is."""
    ready_s: float = 0.0
    """Until it has answered whether it is."""
    seconds: float = 0.0
    """Of one request."""
    slots: int = 1 << 30
    """More requests get a 429."""
    draining: bool = False
    hold: asyncio.Event | None = None
    """The second half of an answer waits for it."""
    reply: Callable[[web.Request], web.StreamResponse] | None = None
    received: list[Received] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    keep_alive_s: float = 5.0
    _runners: list[web.AppRunner] = field(default_factory=list)

    async def start(self, port: int, health_port: int) -> None:
        """Listen. A stand-in that was stopped can be started again."""
        serving, health = web.Application(client_max_size=1 << 30), web.Application()
        serving.router.add_route("*", "/{path:.*}", self._answer)
        health.router.add_get("/healthz/ready", self._ready)
        for app, number in ((serving, port), (health, health_port)):
            runner = web.AppRunner(
                app,
                access_log=None,
                shutdown_timeout=0.1,
                handler_cancellation=True,
                keepalive_timeout=self.keep_alive_s,
            )
            await runner.setup()
            await web.TCPSite(runner, self.address, number).start()
            self._runners.append(runner)

    async def stop(self) -> None:
        """Close all sockets, also those with a request."""
        for runner in self._runners:
            await runner.cleanup()
        self._runners.clear()

    @property
    def connections(self) -> int:
        """Return the number of open connections for requests."""
        server = self._runners[0].server
        return 0 if server is None else len(server.connections)

    async def until(self, found: Callable[[], bool]) -> None:
        """Wait until something holds of this engine, after a request began or ended."""
        async with asyncio.timeout(GUARD_S), self.changed:
            await self.changed.wait_for(found)

    async def _ready(self, _request: web.Request) -> web.Response:
        if self.ready is None:
            await asyncio.sleep(GUARD_S)
        await asyncio.sleep(self.ready_s)
        return web.Response(status=200 if self.ready else 503)

    async def _note(self, change: int) -> None:
        self.running += change
        async with self.changed:
            self.changed.notify_all()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        headers = [
            (key.decode("latin-1"), value.decode("latin-1")) for key, value in request.raw_headers
        ]
        try:
            await self._note(1)
            body = await request.read()
            self.received.append(Received(request.method, request.raw_path, headers, body))
            await self._note(0)
            if self.draining:
                return web.json_response(DRAINED, status=503, headers={"Connection": "close"})
            if self.running > self.slots:
                return web.json_response(FULL, status=429, headers={"Retry-After": "1"})
            if self.reply is not None:
                return self.reply(request)
            if self.hold is not None:
                return await self._halves(request, self.hold)
            await asyncio.sleep(self.seconds)
            return web.json_response({"from": self.address})
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            await self._note(-1)

    async def _halves(self, request: web.Request, hold: asyncio.Event) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        await hold.wait()
        await response.write(b"data: two\n\n")
        return response


@dataclass
class Router:
    """One router as its pod runs it."""

    environment: dict[str, str]
    log: Path
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Return its address for requests."""
        return f"http://127.0.0.1:{self.environment[PREFIX + 'PORT']}"

    @property
    def admin(self) -> str:
        """Return the socket of Envoy's admin interface."""
        return self.environment[PREFIX + "ADMIN_SOCKET"]

    async def command(self, *words: str) -> asyncio.subprocess.Process:
        """Start the command of the image."""
        with self.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "fleetkeeper_router.cli", *words),
                env={**os.environ, **self.environment},
                stdout=log,
                stderr=log,
            )

    async def start(self) -> None:
        """Start it, and wait until it is ready."""
        self.process = await self.command()
        async with aiohttp.ClientSession() as session, asyncio.timeout(GUARD_S):
            while not await self._is_ready(session):
                assert self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.05)

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.url}/readiness") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def stop(self) -> None:
        """End it as a node does."""
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            async with asyncio.timeout(GUARD_S):
                await self.process.wait()

    def members(self) -> set[str]:
        """Return the addresses that its main thread knows as healthy; its workers follow at once."""
        status = json.loads(call(self.admin, "GET", "/clusters?format=json"))
        (engines,) = [one for one in status["cluster_statuses"] if one["name"] == "engines"]
        return {
            host["address"]["socket_address"]["address"]
            for host in engines.get("host_statuses", [])
            if host["health_status"].keys() <= {"eds_health_status"}
        }

    async def knows(self, engines: Iterable[Engine]) -> None:
        """Wait until it sends requests to these engines alone."""
        wanted = {engine.address for engine in engines}
        found: set[str] = set()

        async def are_known() -> bool:
            nonlocal found
            found = await asyncio.to_thread(self.members)
            return found == wanted

        try:
            await until(are_known)
        except TimeoutError:
            raise AssertionError(f"the router sends to {found}, not to {wanted}") from None


@dataclass
class RouterWorld:
    """A service of stand-ins."""

    directory: Path
    dns: Dns
    port: int
    health_port: int
    engines: list[Engine] = field(default_factory=list)
    routers: list[Router] = field(default_factory=list)
    _next: int = 0

    async def add(self, count: int = 1, **fields: Any) -> list[Engine]:
        """Start engines, and make their addresses known."""
        added = []
        for _ in range(count):
            self._next += 1
            engine = Engine(f"127.1.{self._next // 250}.{self._next % 250 + 1}", **fields)
            self.engines.append(engine)
            await engine.start(self.port, self.health_port)
            added.append(engine)
        self.publish()
        return added

    async def remove(self, *engines: Engine) -> None:
        """Forget engines, and stop them."""
        self.engines = [one for one in self.engines if one not in engines]
        self.publish()
        for engine in engines:
            await engine.stop()

    def publish(self) -> None:
        """Let the name have the addresses of all engines."""
        self.dns.addresses = [engine.address for engine in self.engines]

    async def router(self, policy: Policy = Policy.LEAST_LOADED, **settings: object) -> Router:
        """Start a router, and wait until it sends requests to all engines that are ready."""
        number = len(self.routers)
        port, metrics_port = free_ports(2)
        chosen: dict[str, object] = {
            "engines": NAME,
            "policy": policy,
            "engine_port": self.port,
            "health_port": self.health_port,
            "host": "127.0.0.1",
            "port": port,
            "metrics_port": metrics_port,
            "admin_socket": f"@fk-test-{os.getpid()}-{self.port}-{number}",
            "resolver": f"127.0.0.1:{self.dns.port}",
            "notice_seconds": 0,
            **settings,
        }
        environment = {PREFIX + name.upper(): str(value) for name, value in chosen.items()}
        router = Router(environment, self.directory / f"router-{number}.log")
        self.routers.append(router)
        await router.start()
        await router.knows(engine for engine in self.engines if engine.ready)
        return router


class Routed:
    """A running engine whose requests pass a router; all else is the engine's own."""

    def __init__(self, engine: RunningEngine, directory: Path) -> None:
        self._engine = engine
        ports = engine.document["ports"]
        port, metrics_port = free_ports(2)
        settings = {
            "engines": "127.0.0.1",
            "engine_port": ports["serving"],
            "health_port": ports["control"],
            "host": "127.0.0.1",
            "port": port,
            "metrics_port": metrics_port,
            "admin_socket": f"@fk-test-{os.getpid()}-{ports['serving']}",
        }
        self.url = f"http://127.0.0.1:{port}"
        environment = {PREFIX + name.upper(): str(value) for name, value in settings.items()}
        self._log = directory / "router.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fleetkeeper_router.cli"],
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
            )
        engine.wait_for(self._serves, "a router that knows the engine", GUARD_S)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        """End the router."""
        self._process.terminate()
        self._process.wait(GUARD_S)

    def _serves(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            return requests.get(f"{self.url}/v1/models", timeout=GUARD_S).status_code == 200
        except requests.ConnectionError:
            return False


@contextlib.asynccontextmanager
async def router_world(directory: Path) -> AsyncIterator[RouterWorld]:
    """Yield a world without engines and routers; end all of it afterwards."""
    async with Dns().listening() as dns:
        port, health_port = free_ports(2)
        world = RouterWorld(directory, dns, port, health_port)
        try:
            yield world
        finally:
            for router in world.routers:
                await router.stop()
            for engine in world.engines:
                await engine.stop()


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds that has no event."""
    async with asyncio.timeout(GUARD_S):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def post(
    session: aiohttp.ClientSession, router: Router, body: object = None, **more: Any
) -> str:
    """Send a request; return the address of the engine that answered it."""
    data = json.dumps({"model": "m"} if body is None else body)
    async with session.post(f"{router.url}/v1/completions", data=data, **more) as response:
        found = await response.json()
        assert response.status == 200, found
        return str(found["from"])

"""An engine's ledger behind the control port of its supervisor, without a vLLM."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from aiohttp import web

from fleetkeeper_contract.tiers import Tier as EngineTier
from fleetkeeper_engine.shm.ledger import Entry, LedgerWriter, Tokens
from fleetkeeper_engine.supervisor.control_api.auth import UnauthorizedError
from fleetkeeper_engine.supervisor.control_api.usage import UsagePort
from fleetkeeper_engine.supervisor.control_api.usage_auth import UsageVerifier
from fleetkeeper_gateway.grants.attempts import new_attempt

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Engine:
    """A ledger behind the control port of its supervisor."""

    uid: str
    writer: LedgerWriter
    port: UsagePort
    url: str
    secret: bytes
    """The gateway's, with which it makes the IDs of attempts."""
    service: str = "team/chat"
    written: list[Entry] = field(default_factory=list)

    def work(self, count: int, *, granted: bool = True, key: str = "key-1") -> None:
        for _ in range(count):
            entry = Entry(Tokens(10, 4, 5), time.time(), tier=EngineTier.BATCH)
            if granted:
                name = f"{self.uid}-{len(self.written)}"
                request = f"r-{name}"
                attempt = new_attempt(self.secret, self.service, request, key, "batch")
                entry = replace(entry, attempt=attempt, request=request, key=key)
            self.writer.write(entry)
            self.written.append(entry)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """A server on loopback; yields its address."""
    app = web.Application()
    app.router.add_get("/v1/usage", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def an_engine(
    directory: Path, uid: str, keys: Mapping[str, str], secret: bytes, capacity: int = 5_000
) -> AsyncIterator[Engine]:
    """An engine of team/chat that trusts some grant keys: public ones in base64url, by kid."""
    path = directory / f"ledger-{uid}"
    writer = LedgerWriter.open(path, capacity)
    writer.set_state(counting=True)
    verifier = UsageVerifier(uid)
    verifier.trust(keys)
    port = UsagePort(verifier, path, "served")

    async def get(request: web.Request) -> web.StreamResponse:
        try:
            return await port.get(request, time.time())
        except UnauthorizedError:
            return web.json_response({"error": "a valid token is required"}, status=401)

    async with serving(get) as url:
        yield Engine(uid, writer, port, url, secret)
    writer.close()

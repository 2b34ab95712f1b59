"""A collector of usage, and the engines that it reads over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from fleetkeeper.adapters.keys import new_grant_keys
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_contract.usage_files import Report
from fleetkeeper_gateway.grants.attempts import AttemptChecker
from fleetkeeper_gateway.grants.settings import GrantSettings
from fleetkeeper_gateway.grants.signer import UsageTokenSigner, create_key_files
from fleetkeeper_gateway.interfaces import Admission, Demand
from fleetkeeper_gateway.usage.collector import Collector
from fleetkeeper_gateway.usage.engines import open_engines
from fleetkeeper_gateway.usage.lines import Pod
from fleetkeeper_gateway.usage.pods import Target
from fleetkeeper_gateway.usage.store import UsageStore
from tests.support.gateway.usage_engine import Engine, Handler, an_engine, serving
from tests.support.guards import GUARD_S


class Settled:
    """A limiter that keeps what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Tier, str, int]] = []
        self.fails: Callable[[str], bool] = lambda _: False
        """Whether the requests of a key fail."""

    async def admit(self, _demand: Demand) -> Admission:
        raise AssertionError("nothing is admitted here")

    async def settle(self, key_id: str, tier: Tier, request_id: str, tokens: int) -> None:
        if self.fails(key_id):
            raise ConnectionError("Redis is gone")
        self.calls.append((key_id, tier, request_id, tokens))

    async def close(self) -> None:
        return


class Bench:
    """A collector, and the engines that it reads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        files = new_grant_keys()
        (directory / "keys").mkdir()
        for name, text in files.items():
            (directory / "keys" / name).write_text(text)
        listed = json.loads(files["jwks.json"])["keys"]
        self.public = {str(key["kid"]): str(key["x"]) for key in listed}
        self.keys = create_key_files(GrantSettings(grant_keys_directory=directory / "keys"))
        self.limiter = Settled()
        self.store = UsageStore(directory / "usage", 90)
        self.store.open(time.time())
        self.targets: list[Target] = []
        self.signer = UsageTokenSigner(self.keys)
        self.checker = AttemptChecker(self.keys)
        self.collector = self.new_collector()

    def new_collector(self, period_s: float = 300.0) -> Collector:
        return Collector(self.store, self.signer, self.checker, self.limiter, period_s=period_s)

    @asynccontextmanager
    async def engine(self, uid: str, namespace: str = "team") -> AsyncIterator[Engine]:
        secret = self.keys.current().attempt_secret
        async with an_engine(self.directory, uid, self.public, secret) as engine:
            engine.service = f"{namespace}/chat"
            self.add(uid, engine.url, namespace)
            yield engine

    @asynccontextmanager
    async def answering(self, *uids: str, by: Handler, namespace: str) -> AsyncIterator[None]:
        """Pods whose control ports are answered by a handler."""
        async with serving(by) as url:
            for uid in uids:
                self.add(uid, url, namespace)
            yield

    def add(self, uid: str, url: str, namespace: str) -> None:
        self.targets.append(
            Target(Pod(uid, namespace, "chat"), f"chat-{uid}", url, terminating=False)
        )

    async def read_all(self) -> None:
        """Read every engine once."""
        for target in self.targets:
            self.collector.follow(target)
        async with open_engines(self.signer) as engines:
            pods = self.collector._pods.values()
            await asyncio.gather(*(self.collector._read(engines, pod) for pod in pods))

    @asynccontextmanager
    async def running(self, period_s: float = 0.02) -> AsyncIterator[Collector]:
        """Read every engine again and again. The end fails if the collector ended before."""
        collector = self.new_collector(period_s)
        for target in self.targets:
            collector.follow(target)
        run = asyncio.create_task(collector.run())
        try:
            yield collector
            assert not run.done(), run.result()
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)

    def read_up_to(self, uid: str) -> int:
        return self.store.cursor(uid).next

    def report(self) -> Report:
        return self.store.report(0.0, 2.0**33, ("key", "model", "tier", "service"))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(GUARD_S):
        while not holds():  # noqa: ASYNC110 - other tasks tell no event
            await asyncio.sleep(0.01)


async def never(_request: web.Request) -> web.StreamResponse:
    """Answer nothing."""
    await asyncio.Event().wait()
    raise AssertionError

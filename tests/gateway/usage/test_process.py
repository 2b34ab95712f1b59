"""The whole process `usage`: it finds pods, reads their engines, keeps, settles and answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from fleetkeeper.adapters.keys import new_grant_keys
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.grants.keys import read_keys
from fleetkeeper_gateway.interfaces import Demand, Key, LimitRefused, TierLimits
from fleetkeeper_gateway.limits import LimitSettings, create_limiter
from tests.support.engine.engine_environment import free_port
from tests.support.gateway.usage_engine import Engine, an_engine
from tests.support.guards import GUARD_S
from tests.support.plane.list_watch_server import ListWatchServer
from tests.support.services.redis_server import redis_server

PROGRAM = Path(sys.executable).with_name("fleetkeeper-gateway")
pytestmark = pytest.mark.timeout(600)


class Process:
    """`fleetkeeper-gateway usage` over a directory."""

    def __init__(self, directory: Path, api: ListWatchServer, redis_url: str = "") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / "log"
        kubeconfig = directory / "kubeconfig"
        kubeconfig.write_text(json.dumps(_kubeconfig(api.credentials.url)))
        settings = {
            "KUBECONFIG": str(kubeconfig),
            "HOST": "127.0.0.1",
            "USAGE_PORT": str(self.port),
            "USAGE_DIRECTORY": str(directory / "usage"),
            "USAGE_PERIOD_SECONDS": "0.2",
            "GRANT_KEYS_DIRECTORY": str(directory / "keys"),
            "REDIS_URL": redis_url,
        }
        environment = {f"FLEETKEEPER_GATEWAY_{name}": text for name, text in settings.items()}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [PROGRAM, "usage"], env={**os.environ, **environment}, stderr=log, stdout=log
            )

    async def get(self, path: str, **query: str) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.url + path, params=query) as response,
        ):
            return response.status, await response.text()

    async def requests(self) -> int:
        """Requests of the key so far; -1 while nobody answers."""
        try:
            status, text = await self.get("/v1/usage", by="key")
        except aiohttp.ClientError:
            assert self.process.poll() is None, self.log.read_text()
            return -1
        assert status == 200, text
        rows = json.loads(text)["rows"]
        return int(rows[0]["requests"]) if rows else 0

    async def until_requests(self, count: int) -> None:
        async with asyncio.timeout(GUARD_S):
            while await self.requests() != count:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(GUARD_S)


def _kubeconfig(url: str) -> dict[str, Any]:
    return {
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "test", "user": {"token": "token"}}],
    }


@contextmanager
def running(directory: Path, api: ListWatchServer, redis_url: str = "") -> Iterator[Process]:
    process = Process(directory, api, redis_url)
    try:
        yield process
    finally:
        process.end(signal.SIGKILL)


def a_pod(engine: Engine, name: str) -> dict[str, Any]:
    """A pod as the operator makes it, as far as it matters."""
    labels = {
        "app.kubernetes.io/managed-by": "fleetkeeper",
        "fleetkeeper.io/component": "engine",
        "fleetkeeper.io/service": "chat",
    }
    port = {"name": "control", "containerPort": urlsplit(engine.url).port}
    return {
        "metadata": {"name": name, "namespace": "team", "uid": engine.uid, "labels": labels},
        "spec": {"containers": [{"name": "engine", "ports": [{"name": "http"}, port]}]},
        "status": {"podIP": "127.0.0.1", "phase": "Running"},
    }


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Writes the grant keys; the public ones as engines trust them."""
    files = new_grant_keys()
    (tmp_path / "keys").mkdir()
    for name, text in files.items():
        (tmp_path / "keys" / name).write_text(text)
    listed = json.loads(files["jwks.json"])["keys"]
    return {str(key["kid"]): str(key["x"]) for key in listed}


@pytest.fixture
async def api() -> AsyncIterator[ListWatchServer]:
    async with ListWatchServer() as server:
        yield server


@asynccontextmanager
async def a_replica(
    directory: Path, api: ListWatchServer, keys: dict[str, str], name: str
) -> AsyncIterator[Engine]:
    secret = read_keys(directory / "keys").signing.attempt_secret
    async with an_engine(directory, f"uid-{name}", keys, secret) as engine:
        await api.put(a_pod(engine, name))
        yield engine


async def test_a_process_that_is_killed_counts_nothing_twice(
    tmp_path: Path, api: ListWatchServer, keys: dict[str, str]
) -> None:
    """Pods come and go; the process is killed, and starts again on the same files."""
    async with a_replica(tmp_path, api, keys, "one") as one:
        with running(tmp_path, api) as process:
            one.work(3)
            await process.until_requests(3)
            async with a_replica(tmp_path, api, keys, "two") as two:
                two.work(4)
                await process.until_requests(7)
                await api.remove("two")
            process.end(signal.SIGKILL)
            one.work(2)
        with running(tmp_path, api) as process:
            await process.until_requests(9)
            one.work(1)
            await process.until_requests(10)
            assert process.end() == 0, process.log.read_text()
    assert "Traceback" not in process.log.read_text()


@pytest.mark.exhaustive
async def test_health_metrics_and_mistakes(
    tmp_path: Path, api: ListWatchServer, keys: dict[str, str]
) -> None:
    async with a_replica(tmp_path, api, keys, "one") as one:
        with running(tmp_path, api) as process:
            one.work(2)
            one.work(1, granted=False)
            await process.until_requests(2)
            assert await process.get("/healthz") == (200, "ok\n")
            _, text = await process.get("/metrics")
            service = 'service="team/chat"'
            assert (
                f'fleetkeeper_gateway_usage_entries_total{{attributed="true",{service}}} 2.0'
                in text
            )
            assert (
                'fleetkeeper_gateway_usage_tokens_total{attributed="false",kind="answer",'
                f"{service}}} 5.0" in text
            )
            assert "key-1" not in text
            for query in ({"by": "user"}, {"since": "never"}, {"until": "-5"}, {"since": "nan"}):
                status, text = await process.get("/v1/usage", **query)
                assert status == 400
                assert next(iter(query)) in json.loads(text)["error"]
            _, text = await process.get("/v1/usage", since="2020-01-01T00:00:00Z", by="service")
            assert [row["service"] for row in json.loads(text)["rows"]] == ["team/chat"]
            assert (await process.get("/v1/usage", since="1", until="2"))[0] == 200
            assert (await process.get("/other"))[0] == 404


def test_a_wrong_setting_is_told_at_once() -> None:
    environment = {**os.environ, "FLEETKEEPER_GATEWAY_USAGE_PERIOD_SECONDS": "0"}
    done = subprocess.run(
        [PROGRAM, "usage"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "usage_period_seconds" in done.stderr


@pytest.mark.promise("key-limits-settled")
async def test_the_engines_count_replaces_the_estimate_of_the_limits(
    tmp_path: Path, api: ListWatchServer, keys: dict[str, str]
) -> None:
    """Over a real Redis: a request that took less than its estimate makes room for another."""
    limits = {Tier.BATCH: TierLimits(tokens_per_minute=1_000)}
    key = Key("key-1", "key", None, limits=limits)

    def demand(request: str) -> Demand:
        return Demand(key, Tier.BATCH, request, 900)

    with redis_server(tmp_path / "redis") as redis:
        limiter = create_limiter(
            LimitSettings(redis_url=SecretStr(redis.url)), registry=CollectorRegistry()
        )
        await limiter.admit(demand("r-uid-one-0"))
        with pytest.raises(LimitRefused):
            await limiter.admit(demand("other"))
        async with a_replica(tmp_path, api, keys, "one") as one:
            with running(tmp_path, api, redis.url):
                one.work(1)
                async with asyncio.timeout(GUARD_S):
                    while not await _admitted(limiter, demand("other")):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
        await limiter.close()


async def _admitted(limiter: Any, demand: Demand) -> bool:
    try:
        await limiter.admit(demand)
    except LimitRefused:
        return False
    return True

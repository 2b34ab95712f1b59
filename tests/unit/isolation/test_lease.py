"""The lease is renewed whatever the other requests wait for, and nobody can cut its time short."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from fleetkeeper.adapters.clock import SystemClock
from fleetkeeper.adapters.kubernetes.lease import (
    MAX_DURATION_S,
    LeaderLease,
    LeaseClock,
    LeaseLost,
    LeaseTerms,
)
from fleetkeeper.adapters.kubernetes.writes import KubernetesWriter
from fleetkeeper_kube.client import REQUEST_TIMEOUT_S, KubernetesClient
from fleetkeeper_kube.errors import ApiError
from tests.support.guards import GUARD_S
from tests.support.plane.loopback_api import answering

SEEN = {"uid": "u1", "resource_version": "3"}
"""Of every wait: an event ends it."""
SLOTS = 4


class ManualClock:
    """A clock that moves only where the lease waits for its next try."""

    def __init__(self) -> None:
        self.time_s = 1000.0

    def now(self) -> float:
        return self.time_s

    def monotonic(self) -> float:
        return self.time_s

    def jitter(self, seconds: float) -> float:
        self.time_s += seconds
        return 0.0


class Api:
    """An API server with one Lease; what else is asked waits, or is answered 429."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.renewals = 0
        self.changed = asyncio.Condition()
        self.others = 0
        self.answer_others = asyncio.Event()
        self.freed_at = 0.0

    async def handle(self, request: web.Request) -> web.Response:
        if "/leases" in request.path:
            return await self._leases(request)
        async with self.changed:
            self.others += 1
            self.changed.notify_all()
        if request.path == "/limited":
            return web.Response(status=429, headers={"Retry-After": "30"})
        await self.answer_others.wait()
        return web.json_response({"metadata": {}})

    async def _leases(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response(self.lease or {}, status=200 if self.lease else 404)
        body = await request.json()
        given = body["metadata"].get("resourceVersion")
        if self.lease is not None and given != str(self.version):
            return web.json_response({"kind": "Status", "reason": "Conflict"}, status=409)
        async with self.changed:
            self.put(body)
            self.renewals += 1
            if not body["spec"]["holderIdentity"]:
                self.freed_at = asyncio.get_running_loop().time()
            self.changed.notify_all()
        return web.json_response(self.lease)

    def put(self, body: dict[str, Any]) -> None:
        """Write the Lease, as anybody with the right may."""
        self.version += 1
        self.lease = {
            **body,
            "metadata": {**body["metadata"], "resourceVersion": str(self.version)},
        }

    def patch(self, **spec: object) -> None:
        """Change the Lease's spec, as anybody with the right may."""
        assert self.lease is not None
        self.put({**self.lease, "spec": {**self.lease["spec"], **spec}})

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds()`, asked whenever a request came."""
        async with asyncio.timeout(GUARD_S), self.changed:
            await self.changed.wait_for(holds)


@dataclass(frozen=True)
class Clients:
    """The API and its clients: the operator's, and the lease's own."""

    api: Api
    ordinary: KubernetesClient
    own: KubernetesClient

    def lease(
        self, identity: str, clock: LeaseClock, duration_s: float = 15.0, retry_s: float = 1.0
    ) -> LeaderLease:
        terms = LeaseTerms("a", "fleetkeeper", identity, duration_s=duration_s, retry_s=retry_s)
        return LeaderLease(self.own, terms, clock)


@asynccontextmanager
async def clients() -> AsyncIterator[Clients]:
    api = Api()
    async with AsyncExitStack() as stack:
        credentials = await stack.enter_async_context(answering(api.handle))
        ordinary = await stack.enter_async_context(KubernetesClient(credentials, in_flight=SLOTS))
        own = await stack.enter_async_context(KubernetesClient(credentials, retries_429=0))
        stack.callback(api.answer_others.set)
        yield Clients(api, ordinary, own)


@pytest.mark.timeout(GUARD_S * 2)
async def test_renewals_go_on_while_every_slot_is_taken_and_the_server_asks_for_a_pause() -> None:
    async with clients() as found:
        api = found.api
        lease = found.lease("x", SystemClock(), retry_s=0.05)
        await lease.acquire()
        keeping = asyncio.create_task(lease.keep())
        limited = asyncio.create_task(found.ordinary.request("GET", "/limited"))
        await api.until(lambda: api.others == 1)
        slow = [
            asyncio.create_task(found.ordinary.request("GET", "/slow", timeout_s=GUARD_S))
            for _ in range(2 * SLOTS)
        ]
        before = api.renewals
        await api.until(lambda: api.renewals >= before + 20)
        assert lease.holds
        assert not any(task.done() for task in (*slow, limited, keeping))
        for task in (*slow, limited, keeping):
            task.cancel()


@pytest.mark.slow
async def test_a_429_is_waited_for_by_every_request_that_is_not_sent_yet() -> None:
    loop = asyncio.get_running_loop()
    limited: list[float] = []
    arrivals: list[float] = []

    async def handler(request: web.Request) -> web.Response:
        if request.path == "/limited":
            limited.append(loop.time())
            return web.Response(status=429, headers={"Retry-After": "1"})
        arrivals.append(loop.time())
        return web.json_response({})

    async with (
        answering(handler) as credentials,
        KubernetesClient(credentials, retries_429=1) as client,
    ):
        with pytest.raises(ApiError, match="429"):
            await client.request("GET", "/limited")
        await asyncio.gather(*(client.request("GET", "/x") for _ in range(5)))
    assert len(limited) == 2
    assert len(arrivals) == 5
    assert min(arrivals) - limited[-1] >= 1.0, "sent during the pause"


async def test_a_webhook_that_answers_429_pauses_nobody() -> None:
    """It speaks for one object; the caller's queue backs off."""
    refused = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal refused
        if request.path == "/refused":
            refused += 1
            status = {"kind": "Status", "message": 'admission webhook "x" denied the request: no'}
            return web.json_response(status, status=429, headers={"Retry-After": "100000"})
        return web.json_response({})

    async with (
        answering(handler) as credentials,
        KubernetesClient(credentials, in_flight=1) as client,
    ):
        with pytest.raises(ApiError, match="429") as caught:
            await client.request("PATCH", "/refused", body={})
        assert refused == 1
        assert caught.value.retry_after_s == 100_000.0
        assert await client.request("GET", "/x") == {}


@pytest.mark.parametrize(
    ("written", "waited_s"),
    [(1, 15.0), (15, 15.0), (60, 60.0), (365 * 86_400, MAX_DURATION_S)],
    ids=["a second", "our own", "longer", "a year"],
)
async def test_a_standby_waits_for_the_longer_duration_within_bounds(
    written: int, waited_s: float
) -> None:
    async with clients() as found:
        await found.lease("old", ManualClock(), duration_s=15.0).acquire()
        found.api.patch(leaseDurationSeconds=written)
        clock = ManualClock()
        began = clock.time_s
        await found.lease("new", clock, duration_s=15.0).acquire()
        assert waited_s <= clock.time_s - began <= waited_s + 2.0


class EditingClock(ManualClock):
    """Lets somebody edit the Lease while a standby waits."""

    def __init__(self, edit: Callable[[], None], after_s: float) -> None:
        super().__init__()
        self.edit: Callable[[], None] | None = edit
        self.at_s = self.time_s + after_s

    def jitter(self, seconds: float) -> float:
        if self.edit is not None and self.time_s >= self.at_s:
            self.edit()
            self.edit = None
        return super().jitter(seconds)


async def test_a_duration_that_is_cut_while_a_standby_waits_changes_nothing() -> None:
    async with clients() as found:
        await found.lease("old", ManualClock(), duration_s=60.0).acquire()
        clock = EditingClock(lambda: found.api.patch(leaseDurationSeconds=1), after_s=20.0)
        began = clock.time_s
        await found.lease("new", clock, duration_s=15.0).acquire()
        assert clock.edit is None
        assert 60.0 <= clock.time_s - began <= 62.0


async def test_a_lease_that_is_deleted_is_not_free_before_its_holder_has_lost_it() -> None:
    async with clients() as found:
        await found.lease("old", ManualClock()).acquire()

        def delete() -> None:
            found.api.lease = None

        clock = EditingClock(delete, after_s=5.0)
        began = clock.time_s
        await found.lease("new", clock).acquire()
        assert 15.0 <= clock.time_s - began <= 17.0


@pytest.mark.slow
async def test_the_lease_is_not_given_back_while_a_cancelled_write_may_be_applied() -> None:
    loop = asyncio.get_running_loop()
    sent: list[float] = []
    async with clients() as found:
        lease = found.lease("x", SystemClock())
        await lease.acquire()

        def fence() -> None:
            lease.check()
            sent.append(loop.time())

        writer = KubernetesWriter(found.ordinary, fence=fence)
        write = asyncio.create_task(writer.apply_status("a", "chat", {"replicas": 1}, **SEEN))
        await found.api.until(lambda: found.api.others == 1)
        write.cancel()
        with suppress(asyncio.CancelledError):
            await write
        releasing = asyncio.create_task(lease.release(after=writer.settled))
        await asyncio.sleep(0)
        with pytest.raises(LeaseLost):
            await writer.apply_status("a", "chat", {"replicas": 2}, **SEEN)
        await releasing
        assert len(sent) == 1
        assert found.api.freed_at - sent[0] >= REQUEST_TIMEOUT_S


async def test_writes_that_were_answered_hold_nothing_up() -> None:
    async with clients() as found:
        found.api.answer_others.set()
        writer = KubernetesWriter(found.ordinary, fence=lambda: None)
        await writer.apply_status("a", "chat", {"replicas": 1}, **SEEN)
        settled = asyncio.create_task(writer.settled())
        for _ in range(3):
            await asyncio.sleep(0)
        assert settled.done()


async def test_a_renewal_that_was_cut_off_at_the_end_does_not_keep_the_lease() -> None:
    async with clients() as found:
        lease = found.lease("x", SystemClock())
        await lease.acquire()
        found.api.patch(renewTime="2026-01-01T00:00:00.000000Z")  # taken; its answer was not read
        await lease.release(after=lambda: asyncio.sleep(0))
        assert found.api.lease is not None
        assert found.api.lease["spec"]["holderIdentity"] == ""
        assert not lease.holds

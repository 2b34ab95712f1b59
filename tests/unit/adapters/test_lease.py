# ruff: noqa: ARG002 - the doubles take what the real ones take
"""The lease: who may write, judged by the monotonic clock alone."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from typing import Any

import pytest

from fleetkeeper.adapters.kubernetes.lease import LeaderLease, LeaseLost, LeaseTerms
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_kube.resource import Resource

Live = dict[str, Any]


class Clock:
    """A clock that moves when it is told to; `now` may be wrong by any amount."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self.time_s = 1000.0
        self.skew_s = skew_s

    def now(self) -> float:
        return self.time_s + self.skew_s

    def monotonic(self) -> float:
        return self.time_s

    def jitter(self, seconds: float) -> float:
        self.time_s += seconds
        return 0.0


class Server:
    """A lease on an API server: optimistic locking, and answers that may be lost."""

    def __init__(self) -> None:
        self.lease: Live | None = None
        self.version = 0
        self.lose_answers = 0
        self.down = False
        self.puts = 0

    async def read(self, resource: Resource, namespace: str, name: str) -> Live | None:
        self._up()
        return copy.deepcopy(self.lease)

    async def request(
        self, method: str, path: str, *, body: Mapping[str, Any], timeout_s: float
    ) -> Live:
        self._up()
        self.puts += 1
        given = body["metadata"].get("resourceVersion")
        if method == "POST" and self.lease is not None:
            raise ApiError(409, "AlreadyExists", "")
        if method == "PUT" and given != str(self.version):
            raise ApiError(409, "Conflict", "")
        self.version += 1
        self.lease = copy.deepcopy(dict(body))
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        if self.lose_answers:
            self.lose_answers -= 1
            raise ApiError(0, "Timeout", "")
        return copy.deepcopy(self.lease)

    def _up(self) -> None:
        if self.down:
            raise ApiError(0, "Timeout", "")


def lease(server: Server, clock: Clock, identity: str) -> LeaderLease:
    terms = LeaseTerms(namespace="a", name="fleetkeeper", identity=identity, retry_s=0.0)
    return LeaderLease(server, terms, clock)  # type: ignore[arg-type]


async def no_write_under_way() -> None:
    """Nothing to wait for."""


async def test_a_free_lease_is_taken_and_the_fence_opens() -> None:
    server, clock = Server(), Clock()
    mine = lease(server, clock, "x")
    with pytest.raises(LeaseLost):
        mine.check()
    await mine.acquire()
    mine.check()
    assert server.lease is not None
    assert server.lease["spec"]["holderIdentity"] == "x"


@pytest.mark.promise("one-leader")
async def test_the_fence_closes_ten_seconds_after_the_last_renewal_was_sent() -> None:
    server, clock = Server(), Clock()
    mine = lease(server, clock, "x")
    await mine.acquire()
    clock.time_s += 9.9
    mine.check()
    clock.time_s += 0.2
    assert not mine.holds
    with pytest.raises(LeaseLost):
        mine.check()
    with pytest.raises(LeaseLost):
        await mine.keep()
    assert server.puts == 1


@pytest.mark.parametrize("skew_s", [-3600.0, -30.0, 0.0, 30.0, 3600.0])
async def test_anothers_lease_is_taken_after_its_duration_without_a_renewal_seen(
    skew_s: float,
) -> None:
    """Whatever the wall clocks of the two say."""
    server, theirs, mine_clock = Server(), Clock(skew_s), Clock()
    await lease(server, theirs, "old").acquire()
    mine = LeaderLease(
        server,  # type: ignore[arg-type]
        LeaseTerms(namespace="a", name="fleetkeeper", identity="new", retry_s=1.0),
        mine_clock,
    )
    began = mine_clock.time_s
    await mine.acquire()
    assert 15.0 <= mine_clock.time_s - began <= 17.0


async def test_a_lease_that_is_renewed_is_never_taken() -> None:
    server, clock = Server(), Clock()
    holder = lease(server, clock, "old")
    await holder.acquire()

    class Renewing(Clock):
        def jitter(self, seconds: float) -> float:
            assert server.lease is not None
            self.time_s += 2.0
            server.version += 1
            server.lease["metadata"]["resourceVersion"] = str(server.version)
            server.lease["spec"]["renewTime"] = f"t{server.version}"
            return 0.0

    waiting = asyncio.create_task(lease(server, Renewing(), "new").acquire())
    for _ in range(200):
        await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


async def test_the_same_pod_goes_on_at_once() -> None:
    server, clock = Server(), Clock()
    await lease(server, clock, "pod-1").acquire()
    again = lease(server, clock, "pod-1")
    began = clock.time_s
    await again.acquire()
    assert clock.time_s == began


async def test_a_renewal_whose_answer_was_lost_is_found_again() -> None:
    """The write did happen: the next one meets a conflict, and finds itself as the holder."""
    server, clock = Server(), Clock()
    mine = lease(server, clock, "x")
    await mine.acquire()
    server.lose_answers = 1
    keeping = asyncio.create_task(mine.keep())
    for _ in range(50):
        clock.time_s += 0.1
        await asyncio.sleep(0)
    assert not keeping.done()
    assert mine.holds
    keeping.cancel()


async def test_responses_that_are_lost_for_six_seconds_do_not_cost_the_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the outage the first renewal meets a conflict; the next must not wait for its turn."""
    server, clock = Server(), Clock()
    terms = LeaseTerms(namespace="a", name="fleetkeeper", identity="x")
    mine = LeaderLease(server, terms, clock)  # type: ignore[arg-type]
    await mine.acquire()
    turn = asyncio.sleep

    async def sleep(seconds: float) -> None:
        clock.time_s += max(0.0, seconds)
        # 6 s that begin after the last renewal: those sent 2, 4 and 6 s after it lose their response.
        server.lose_answers = int(clock.time_s < 1000.0 + 7.9)
        await turn(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    keeping = asyncio.create_task(mine.keep())
    while clock.time_s < 1030.0 and not keeping.done():
        await turn(0)
    assert not keeping.done(), keeping.exception()
    keeping.cancel()


async def test_a_lease_that_another_took_is_lost() -> None:
    server, clock = Server(), Clock()
    mine = lease(server, clock, "x")
    await mine.acquire()
    assert server.lease is not None
    server.version += 1
    server.lease["metadata"]["resourceVersion"] = str(server.version)
    server.lease["spec"]["holderIdentity"] = "y"
    with pytest.raises(LeaseLost, match="held by y"):
        await mine.keep()
    assert not mine.holds


async def test_an_api_server_that_is_gone_costs_the_lease_at_the_deadline() -> None:
    server, clock = Server(), Clock()
    mine = lease(server, clock, "x")
    await mine.acquire()
    server.down = True
    keeping = asyncio.create_task(mine.keep())
    for _ in range(200):
        clock.time_s += 0.1
        await asyncio.sleep(0)
    with pytest.raises(LeaseLost):
        await keeping


async def test_a_released_lease_is_free_at_once() -> None:
    server, clock = Server(), Clock()
    first = lease(server, clock, "x")
    await first.acquire()
    await first.release(after=no_write_under_way)
    assert not first.holds
    began = clock.time_s
    await lease(server, clock, "y").acquire()
    assert clock.time_s == began


async def test_what_others_wrote_into_the_lease_stays() -> None:
    server, clock = Server(), Clock()
    mine = lease(server, clock, "x")
    await mine.acquire()
    assert server.lease is not None
    server.lease["metadata"]["labels"] = {"team": "a"}
    again = lease(server, clock, "x")
    await again.acquire()
    assert server.lease["metadata"]["labels"] == {"team": "a"}


async def test_missing_rights_are_told_and_not_waited_for() -> None:
    class Forbidding(Server):
        async def read(self, resource: Resource, namespace: str, name: str) -> Live | None:
            raise ApiError(403, "Forbidden", "leases")

    with pytest.raises(ApiError, match="403"):
        await lease(Forbidding(), Clock(), "x").acquire()

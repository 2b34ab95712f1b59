# ruff: noqa: ARG002 - the doubles take what the real ones take
"""Of several namespaces one that cannot be read fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from fleetkeeper.adapters.kubernetes.reflector import all_settled, watch_managed
from fleetkeeper.adapters.kubernetes.resources import POD
from fleetkeeper.runtime.namespaces import NamespaceReads, watch_each
from fleetkeeper.runtime.queue import Key, KeyedQueue
from fleetkeeper.runtime.resync import Resync
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_kube.reflector import Reflector
from fleetkeeper_kube.resource import Resource
from tests.support.guards import GUARD_S
from tests.support.operators.contained import new_defects

DENIED = ApiError(403, "Forbidden", "inferenceservices is forbidden")
BUSY = ApiError(500, "InternalError", "etcd is slow")
NAMES = ("a", "b")


def live(namespace: str, name: str, version: int) -> dict[str, Any]:
    meta = {"namespace": namespace, "name": name, "uid": name, "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {}}


class Clock:
    """The real clocks are not asked; pauses are as short as they can be."""

    def now(self) -> float:
        return 1000.0

    def monotonic(self) -> float:
        return 1000.0

    def jitter(self, seconds: float) -> float:
        return 0.0


class Lists:
    """Answers lists by namespace: with objects, or with an error."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.version = 100
        self.asked: list[str | None] = []
        self.selectors: set[str] = set()
        self.watching = asyncio.Event()
        self.watches: list[ApiError] = []

    async def list_pages(
        self, resource: Resource, namespace: str | None, *, selector: str = "", **_: Any
    ) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(namespace)
        self.selectors.add(selector)
        answer = self.answers[namespace or "all"]
        if isinstance(answer, list) and answer and isinstance(answer[0], ApiError):
            raise answer.pop(0)
        if isinstance(answer, ApiError):
            raise answer
        self.version += 1
        yield {"metadata": {"resourceVersion": str(self.version)}, "items": list(answer)}

    @asynccontextmanager
    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        if self.watches:
            raise self.watches.pop(0)
        self.watching.set()
        await asyncio.Event().wait()
        yield  # type: ignore[misc] # never reached


class World:
    """A cache, what is known of namespaces, and a resync over lists that a test writes."""

    def __init__(self, names: tuple[str, ...] = NAMES, **answers: Any) -> None:
        self.changed: list[Key] = []
        self.recoveries = 0
        self.recovered = asyncio.Event()
        self.metrics = OperatorMetrics()
        self.cache = Cache(now=lambda: 1000.0, changed=self.changed.append)
        self.reads = NamespaceReads(names, self.cache, self.metrics, recovered=self._recovered)
        self.lists = Lists(**answers)
        clock = Clock()
        self.resync = Resync(
            self.lists,  # type: ignore[arg-type]
            self.cache,
            KeyedQueue(monotonic=clock.monotonic, jitter=clock.jitter),
            self.metrics,
            clock,
            defects=new_defects(self.metrics),
            namespaces=names or (None,),
            reads=self.reads,
            period_s=300.0,
            page_size=100,
            also=self._nothing,
        )

    def _recovered(self) -> None:
        self.recoveries += 1
        self.recovered.set()

    async def _nothing(self) -> None:
        """Nothing else belongs to a resync."""

    def unreadable(self, namespace: str) -> float | None:
        """The metric of one namespace."""
        name = "fleetkeeper_namespace_unreadable"
        return self.metrics.registry.get_sample_value(name, {"service_namespace": namespace})


# -- what is known of a namespace ---------------------------------------------------------------------


def test_a_namespace_is_held_until_all_of_it_can_be_read_and_said_once_a_change() -> None:
    world = World()
    key, other = Key("a", "chat"), Key("b", "chat")
    for namespace in NAMES:
        world.cache.put_service(live(namespace, "chat", 1))
    world.changed.clear()
    assert (world.unreadable("a"), world.unreadable("b")) == (0, 0)
    with capture_logs() as logs:
        world.reads.note("a", "pods", DENIED)
        world.reads.note("a", "pods", DENIED)
        world.reads.note("a", "services", DENIED)
        assert world.cache.is_held(key)
        assert not world.cache.is_held(other)
        assert (world.unreadable("a"), world.unreadable("b")) == (1, 0)
        world.reads.note("a", "pods", None)
        assert world.cache.is_held(key)
        assert world.changed == []
        world.reads.note("a", "services", None)
    assert not world.cache.is_held(key)
    assert world.changed == [key], "a service was not queued when its namespace came back"
    assert world.unreadable("a") == 0
    assert [entry["log_level"] for entry in logs] == ["warning", "info"]
    assert world.recoveries == 2


@pytest.mark.parametrize("names", [(), ("a",)], ids=["the cluster", "one namespace"])
def test_where_all_is_one_nothing_fails_alone(names: tuple[str, ...]) -> None:
    world = World(names)
    assert world.reads.report_of("a", "pods") is None
    assert world.reads.report_of(None, "pods") is None


async def test_an_operator_that_is_denied_every_namespace_does_not_wait() -> None:
    world = World()
    world.reads.note("a", "pods", DENIED)
    world.reads.note("b", "pods", BUSY)
    waiting = asyncio.create_task(world.reads.wait_for_one())
    await asyncio.sleep(0)
    assert not waiting.done(), "a server error passes: it is waited for"
    world.reads.note("b", "pods", None)
    async with asyncio.timeout(GUARD_S):
        await waiting
    world.reads.note("b", "services", DENIED)
    with pytest.raises(ApiError, match="403"):
        await world.reads.wait_for_one()


# -- lists --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [DENIED, BUSY], ids=["denied", "an error"])
async def test_a_resync_goes_on_past_a_namespace_that_fails(problem: ApiError) -> None:
    world = World(a=problem, b=[live("b", "new", 50)])
    for namespace in NAMES:
        world.cache.put_service(live(namespace, "old", 1))
    await world.resync.once()
    assert world.lists.asked == ["a", "b"]
    assert set(world.cache.services()) == {Key("a", "old"), Key("b", "new")}
    assert world.resync.last_ended is not None
    assert world.cache.is_held(Key("a", "old")) is (problem is DENIED)


async def test_a_resync_fails_where_no_namespace_can_be_read() -> None:
    world = World(a=DENIED, b=BUSY)
    with pytest.raises(ApiError, match="500"):
        await world.resync.once()
    world.lists.answers["b"] = DENIED
    with pytest.raises(ApiError, match="403"):
        await world.resync.once()
    assert world.resync.last_ended is None


async def test_a_denial_of_the_whole_cluster_ends_a_resync() -> None:
    with pytest.raises(ApiError, match="403"):
        await World((), all=DENIED).resync.once()


async def test_a_namespace_that_was_denied_is_read_again_by_itself() -> None:
    world = World(a=[DENIED, DENIED, live("a", "chat", 5)], b=[])
    await world.resync.once()
    assert world.cache.is_held(Key("a", "chat"))
    retrying = asyncio.create_task(world.resync.retry_denied())
    async with asyncio.timeout(GUARD_S):
        await world.recovered.wait()
    retrying.cancel()
    assert not world.cache.is_held(Key("a", "chat"))
    assert set(world.cache.services()) == {Key("a", "chat")}
    assert world.lists.asked.count("b") == 1


async def test_a_resync_that_fails_has_ended_as_well() -> None:
    """The liveness check must not restart the operator because the API server is down."""
    world = World((), all=DENIED)
    running = asyncio.create_task(world.resync.run())
    world.resync.want()
    async with asyncio.timeout(GUARD_S):
        while world.resync.last_ended is None:  # noqa: ASYNC110 - a time, not an event
            await asyncio.sleep(0.01)
    assert world.lists.asked
    running.cancel()


# -- watches ------------------------------------------------------------------------------------------


def reflector(world: World, namespace: str) -> Reflector:
    report = world.reads.report_of(namespace, POD.plural)
    return watch_managed(world.lists, POD, namespace, world.cache, report)  # type: ignore[arg-type]


async def test_a_start_waits_for_no_namespace_that_is_denied() -> None:
    world = World(a=[DENIED, DENIED, DENIED], b=[])
    both = [reflector(world, name) for name in NAMES]
    running = [asyncio.create_task(one.run()) for one in both]
    async with asyncio.timeout(GUARD_S):
        await all_settled(both)
        await world.reads.wait_for_one()
        await both[0].synced.wait()
    assert world.recoveries == 1
    assert not world.cache.is_held(Key("a", "chat"))
    for task in running:
        assert not task.done()
        task.cancel()


async def test_a_watch_that_is_denied_is_followed_by_a_list() -> None:
    """What was deleted and made again meanwhile is in no event."""
    world = World(a=[], b=[])
    world.lists.watches = [DENIED]
    one = reflector(world, "a")
    running = asyncio.create_task(one.run())
    async with asyncio.timeout(GUARD_S):
        await world.lists.watching.wait()
    assert one.lists == 2
    assert world.recoveries == 1
    running.cancel()


async def test_a_watch_of_services_that_ends_is_started_again_beside_the_others() -> None:
    started: list[str] = []
    beside, again = asyncio.Event(), asyncio.Event()

    async def watch(names: tuple[str, ...]) -> None:
        (name,) = names
        started.append(name)
        if started.count("a") == 3:
            again.set()
        if name == "a":
            raise DENIED
        beside.set()
        await asyncio.Event().wait()

    reads = World().reads
    reads.note("a", "pods", DENIED)
    watching = asyncio.create_task(watch_each(NAMES, watch, reads, lambda _seconds: 0.0))
    async with asyncio.timeout(GUARD_S):
        await beside.wait()
        assert started == ["b"], "a namespace that cannot be read was watched"
        reads.note("a", "pods", None)
        await again.wait()
    assert not watching.done()
    assert started.count("b") == 1
    watching.cancel()


@pytest.mark.parametrize("names", [(), ("a",), NAMES], ids=["the cluster", "one", "several"])
async def test_an_expired_watch_of_services_is_started_again(names: tuple[str, ...]) -> None:
    """Everywhere at the same time: that is no reason to end the process."""
    starts: list[tuple[str, ...]] = []
    again = asyncio.Event()

    async def watch(which: tuple[str, ...]) -> None:
        starts.append(which)
        if starts.count(which) < 3:
            raise ApiError(410, "Expired", "too old resource version")
        if len(starts) >= 3 * max(1, len(names)):
            again.set()
        await asyncio.Event().wait()

    watching = asyncio.create_task(
        watch_each(names, watch, World(names).reads, lambda _seconds: 0.0)
    )
    async with asyncio.timeout(GUARD_S):
        await again.wait()
    assert not watching.done()
    watching.cancel()


@pytest.mark.parametrize("names", [(), ("a",), NAMES], ids=["the cluster", "one", "several"])
async def test_where_every_watch_of_services_ends_the_process_ends(names: tuple[str, ...]) -> None:
    async def watch(_names: tuple[str, ...]) -> None:
        raise DENIED

    ended_with: list[Exception] = []
    try:
        async with asyncio.timeout(GUARD_S):
            await watch_each(names, watch, World(names).reads, lambda _seconds: 0.0)
    except* ApiError as problems:
        ended_with += problems.exceptions
    assert set(ended_with) == {DENIED}


async def test_where_all_is_one_a_denial_before_the_first_list_ends_the_process() -> None:
    lists = Lists(all=[BUSY, DENIED])
    one = watch_managed(lists, POD, None, World(()).cache, None)  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="403"):
        await one.run()
    assert one.failures == 2
    assert lists.selectors == {"app.kubernetes.io/managed-by=fleetkeeper"}

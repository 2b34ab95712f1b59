"""Wake marks are known as the ConfigMap was last read, with any content."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from fleetkeeper.common.sleep import NO_WAKE, Wake
from fleetkeeper.runtime.queue import Key, KeyedQueue, Urgency
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.wake_marks import WakeMarks
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper_contract.sleep import GATEWAY_KEY, GATEWAY_VALUE, WakeMark
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_kube.resource import Resource
from tests.support.guards import GUARD_S
from tests.support.operators.queue_steps import handed_out
from tests.support.plane.list_watch_server import ListWatchServer, thing

NAME = "fleetkeeper-wake-marks"
CHAT, CODE = Key("a", "chat"), Key("b", "code")
HOLDS = {GATEWAY_KEY: GATEWAY_VALUE}
MARK = WakeMark(7, Tier.REALTIME)
Live = dict[str, Any]


class Writer:
    """Creates the ConfigMap, as the server answers: an error of `answers`, or success."""

    def __init__(self) -> None:
        self.answers: list[ApiError] = []
        self.created: list[tuple[str, Live]] = []
        self.asked = asyncio.Event()

    async def create(self, resource: Resource, namespace: str, manifest: Live) -> None:
        self.created.append((resource.path(namespace), manifest))
        self.asked.set()
        if self.answers:
            raise self.answers.pop(0)

    async def until(self, creates: int) -> None:
        """Wait until that many creations were asked for."""
        async with asyncio.timeout(GUARD_S):
            while len(self.created) < creates:
                self.asked.clear()
                await self.asked.wait()


class World:
    """Two services with the UIDs `u-chat` and `u-code`, and their marks."""

    def __init__(self) -> None:
        self.metrics = OperatorMetrics()
        self.queue = KeyedQueue(monotonic=lambda: 0.0, jitter=lambda s: s)
        self.cache = Cache(now=lambda: 0.0, changed=lambda _: None)
        self.writer = Writer()
        self.marks = WakeMarks(
            "fleet",
            NAME,
            helm_release="fk",
            cache=self.cache,
            queue=self.queue,
            writer=self.writer,  # type: ignore[arg-type]
            metrics=self.metrics,
            jitter=lambda _: 0.0,
        )
        for key in (CHAT, CODE):
            meta = {"namespace": key.namespace, "name": key.name, "uid": f"u-{key.name}"}
            self.cache.put_service({"metadata": {**meta, "resourceVersion": "1"}, "spec": {}})

    def put(self, data: object, **more: Any) -> None:
        """The ConfigMap changes to this content."""
        self.marks.take("ConfigMap", config_map(data, **more))

    async def queued(self) -> list[Key]:
        """The services that the queue hands out now, in this order."""
        found = []
        while (key := await handed_out(self.queue)) is not None:
            self.queue.done(key)
            found.append(key)
        return found

    @property
    def count(self) -> float | None:
        """The metric of marks."""
        return self.metrics.registry.get_sample_value("fleetkeeper_wake_marks")


def config_map(data: object = None, **more: Any) -> Live:
    live: Live = thing(NAME) if data is None else {**thing(NAME), "data": data}
    return {**live, **more}


async def test_a_mark_queues_its_service_first_and_once() -> None:
    world = World()
    world.put(HOLDS)
    await world.queued()
    world.queue.add(CHAT, Urgency.RESYNC)
    world.put({**HOLDS, "u-code": "7.realtime", "u-other": "1.batch"})
    assert await world.queued() == [CODE, CHAT]
    assert world.marks.of("u-code") == Wake(can_wake=True, mark=MARK)
    assert world.marks.of("u-chat") == Wake(can_wake=True)
    world.put({**HOLDS, "u-code": "7.realtime", "u-other": "1.standard"})
    assert await world.queued() == []
    world.put({**HOLDS, "u-code": "8.standard"})
    assert await world.queued() == [CODE]
    assert world.marks.of("u-code").mark == WakeMark(8, Tier.STANDARD)
    assert world.count == 1
    world.put(HOLDS)
    assert await world.queued() == [], "a mark that is gone wakes no service"
    assert (world.marks.of("u-code").mark, world.count) == (None, 0)


async def test_no_service_sleeps_until_a_gateway_says_that_it_holds() -> None:
    """Then every service may: those that are idle already are not queued by anything else."""
    world = World()
    assert world.marks.of("u-chat") == NO_WAKE
    world.put({"u-chat": "7.realtime"})
    assert world.marks.of("u-chat") == Wake(can_wake=False, mark=MARK)
    assert await world.queued() == [CHAT]
    world.put(HOLDS)
    assert world.marks.of("u-code") == Wake(can_wake=True)
    assert await world.queued() == [CHAT, CODE]


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "text",
        {"u-code": 7},
        {"u-code": None},
        {"u-code": {"number": 7}},
        {"u-code": "7"},
        {"u-code": "7.urgent"},
        {"u-code": "0.realtime"},
        {"u-code": "-7.realtime"},
        {"u-code": "٧.realtime"},
        {"u-code": "7" * 40 + ".realtime"},
        {"u-code": "7.realtime\n"},
        {"": ""},
        {GATEWAY_KEY: "7.realtime"},
    ],
)
async def test_what_is_no_mark_is_ignored(data: object) -> None:
    """Any client with the right to write the ConfigMap decides what it holds."""
    world = World()
    world.put({**HOLDS, "u-code": "6.realtime"})
    await world.queued()
    world.put(data)
    assert world.marks.of("u-code").mark is None
    assert await world.queued() == []
    world.put({**(data if isinstance(data, dict) else {}), "u-chat": "7.realtime"})
    assert world.marks.of("u-chat").mark == MARK
    assert CHAT in await world.queued()


async def test_marks_that_cannot_be_read_stay_and_let_no_service_sleep() -> None:
    """JSON of a ConfigMap within the server's limit can be larger than we take."""
    world = World()
    world.put({**HOLDS, "u-code": "7.realtime"})
    world.put({}, **{"fleetkeeper.io/unread": "too large"})
    assert world.marks.of("u-code") == Wake(can_wake=False, mark=MARK)
    world.put(HOLDS)
    assert world.marks.of("u-code") == Wake(can_wake=True)


# -- with a server ------------------------------------------------------------------------------------


@asynccontextmanager
async def running(
    world: World, server: ListWatchServer, *, leads: bool = True
) -> AsyncIterator[None]:
    """Watch the ConfigMap of this server, and create it while this process leads."""
    async with KubernetesClient(server.credentials) as client:
        reflector = world.marks.reflector(client)
        tasks = [asyncio.create_task(reflector.run())]
        if leads:
            tasks.append(asyncio.create_task(world.marks.keep()))
        try:
            async with asyncio.timeout(GUARD_S):
                await reflector.settled.wait()
            yield
            assert not any(task.done() for task in tasks)
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def test_only_the_one_config_map_counts() -> None:
    world = World()
    async with ListWatchServer() as server:
        await server.put({**thing("other"), "data": {**HOLDS, "u-code": "7.realtime"}})
        await server.put(config_map({**HOLDS, "u-chat": "7.realtime"}))
        async with running(world, server):
            assert world.marks.of("u-chat") == Wake(can_wake=True, mark=MARK)
            assert world.marks.of("u-code") == Wake(can_wake=True)
    assert world.writer.created == []


@pytest.mark.parametrize("status", [403, 500, 503])
async def test_during_an_outage_marks_stay_and_no_service_goes_to_sleep(status: int) -> None:
    world = World()
    async with ListWatchServer() as server:
        await server.put(config_map({**HOLDS, "u-code": "7.realtime"}))
        async with running(world, server):
            server.list_status = server.watch_status = status
            await server.cut()
            await server.until(lambda: world.marks.of("u-code") == Wake(can_wake=False, mark=MARK))
            await world.queued()
            server.list_status = server.watch_status = 200
            await server.put(config_map({**HOLDS, "u-code": "7.realtime", "u-chat": "1.batch"}))
            async with asyncio.timeout(GUARD_S):
                assert await world.queue.get() == CHAT
            await server.until(lambda: world.marks.of("u-code") == Wake(can_wake=True, mark=MARK))
    assert world.writer.created == [], "what cannot be read is not absent"


async def test_a_config_map_that_cannot_be_read_at_the_start_delays_nothing() -> None:
    world = World()
    async with ListWatchServer() as server:
        server.list_status = 403
        async with running(world, server):
            assert world.marks.of("u-code") == NO_WAKE


@pytest.mark.parametrize("is_late", [False, True], ids=["from the start", "later"])
async def test_an_absent_config_map_is_created_empty_and_marks_are_gone(is_late: bool) -> None:
    world = World()
    async with ListWatchServer() as server:
        if is_late:
            await server.put(config_map({**HOLDS, "u-code": "7.realtime"}))
        async with running(world, server):
            if is_late:
                await server.until(lambda: server.watches == 1)
                await server.remove(NAME)
            await world.writer.until(1)
            assert world.marks.of("u-code") == NO_WAKE
            await world.queued()
            await server.put(config_map(HOLDS))
            async with asyncio.timeout(GUARD_S):
                assert await world.queue.get() == CHAT
            assert world.marks.of("u-code") == Wake(can_wake=True)
    metadata = {
        "name": NAME,
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": {
            "meta.helm.sh/release-name": "fk",
            "meta.helm.sh/release-namespace": "fleet",
        },
    }
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    assert world.writer.created == [("/api/v1/namespaces/fleet/configmaps", manifest)]


async def test_a_refused_creation_is_tried_again_and_not_by_a_standby() -> None:
    world = World()
    world.writer.answers = [ApiError(403, "Forbidden", "no"), ApiError(0, "Timeout", "slow")]
    async with ListWatchServer() as server:
        async with running(world, server, leads=False):
            await server.until(lambda: server.watches == 1)
            assert world.writer.created == []
        async with running(world, server):
            await world.writer.until(3)
    errors = world.metrics.registry.get_sample_value
    assert errors("fleetkeeper_errors_total", {"reason": "Forbidden"}) == 1

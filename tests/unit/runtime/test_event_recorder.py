"""Events are posted in order when the queue is idle, a few seconds later anyhow, and never lost by a stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fleetkeeper.adapters.kubernetes.lease import LeaseLost
from fleetkeeper.common.values import Event
from fleetkeeper.runtime import event_recorder
from fleetkeeper.runtime.event_recorder import EventRecorder
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper_kube.errors import ApiError
from tests.support.operators.contained import new_defects

CHAT, LEASE = Key("a", "chat"), Key("fleet", "fleetkeeper")
LIVE: dict[str, Any] = {
    "metadata": {"name": "chat", "namespace": "a", "uid": "u1", "resourceVersion": "7"}
}


class Server:
    def __init__(self) -> None:
        self.posted: list[str] = []
        self.namespaces: set[str] = set()
        self.about: list[dict[str, Any]] = []
        self.began = asyncio.Event()
        self.asked = asyncio.Condition()
        self.refuse: Exception | None = None

    async def post_event(self, namespace: str, manifest: dict[str, Any]) -> None:
        self.namespaces.add(namespace)
        self.began.set()
        self.about.append(manifest["involvedObject"])
        async with self.asked:
            if self.refuse is None:
                self.posted.append(manifest["reason"])
            self.asked.notify_all()
        if self.refuse is not None:
            raise self.refuse


def recorder_of(server: Server) -> EventRecorder:
    """A recorder whose cache holds the service `chat`."""
    cache = Cache(now=lambda: 100.0, changed=lambda _: None)
    cache.put_service(LIVE)
    return EventRecorder(
        server,  # type: ignore[arg-type]
        cache,
        OperatorMetrics(),
        now=lambda: 100.0,
        instance="pod-1",
        defects=new_defects(),
        lease=LEASE,
    )


@contextlib.asynccontextmanager
async def running(
    recorder: EventRecorder, idle: asyncio.Event
) -> AsyncIterator[asyncio.Task[None]]:
    async def is_idle() -> None:
        await idle.wait()

    task = asyncio.create_task(recorder.run(is_idle))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


def record(recorder: EventRecorder, *reasons: str) -> None:
    for reason in reasons:
        recorder.record(CHAT, Event("Normal", reason, "text"))


async def posted(server: Server, count: int) -> None:
    async with asyncio.timeout(60), server.asked:
        await server.asked.wait_for(lambda: len(server.posted) >= count)


async def test_events_wait_for_an_idle_queue_and_keep_their_order() -> None:
    server, idle = Server(), asyncio.Event()
    recorder = recorder_of(server)
    async with running(recorder, idle):
        record(recorder, "A", "B", "C")
        await asyncio.sleep(0.02)
        assert server.posted == []
        idle.set()
        await posted(server, 3)
        assert server.posted == ["A", "B", "C"]
        record(recorder, "D")
        await posted(server, 4)
    assert len(recorder) == 0


async def test_an_event_is_posted_after_a_while_though_the_queue_is_never_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_recorder, "MAX_WAIT_S", 0.02)
    server = Server()
    recorder = recorder_of(server)
    async with running(recorder, asyncio.Event()):
        record(recorder, "A", "B")
        await posted(server, 2)
    assert server.posted == ["A", "B"]


async def test_what_waits_at_the_end_is_posted() -> None:
    server = Server()
    recorder = recorder_of(server)
    record(recorder, "A", "B")
    await recorder.drain()
    assert (server.posted, len(recorder)) == (["A", "B"], 0)


async def test_an_event_that_is_refused_holds_up_no_other() -> None:
    server, idle = Server(), asyncio.Event()
    idle.set()
    recorder = recorder_of(server)
    async with running(recorder, idle):
        server.refuse = ApiError(403, "Forbidden", "")
        async with asyncio.timeout(60), server.asked:
            record(recorder, "A")
            await server.asked.wait()
        await asyncio.sleep(0)
        server.refuse = None
        record(recorder, "B")
        await posted(server, 1)
    assert (server.posted, server.namespaces) == (["B"], {"a"})


async def test_a_lost_lease_ends_the_recorder() -> None:
    server, idle = Server(), asyncio.Event()
    idle.set()
    recorder = recorder_of(server)
    server.refuse = LeaseLost("too old")
    async with running(recorder, idle) as task:
        record(recorder, "A")
        await asyncio.wait({task}, timeout=5)
        assert isinstance(task.exception(), LeaseLost)


async def test_an_event_names_the_service_or_the_lease_and_none_the_service_that_is_gone() -> None:
    """An event about the fleet is on the operator's Lease, whose namespace it shares."""
    server = Server()
    recorder = recorder_of(server)
    record(recorder, "A")
    recorder.record(Key("a", "gone"), Event("Normal", "B", "text"))
    recorder.record_fleet(Event("Warning", "C", "text"))
    await recorder.drain()
    assert server.posted == ["A", "C"]
    service, lease = server.about
    assert service.items() >= {"kind": "InferenceService", "name": "chat", "uid": "u1"}.items()
    assert service["resourceVersion"] == "7"
    assert (lease["kind"], lease["namespace"], lease["name"]) == ("Lease", "fleet", "fleetkeeper")


async def test_the_oldest_events_are_dropped_when_too_many_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also the one that is being posted: it is not sent again, and no other is skipped."""
    monkeypatch.setattr(event_recorder, "MAX_WAITING", 2)
    server, idle = Server(), asyncio.Event()
    idle.set()
    recorder = recorder_of(server)
    record(recorder, "A", "B", "C")
    assert len(recorder) == 2
    await server.asked.acquire()
    async with running(recorder, idle):
        await server.began.wait()
        record(recorder, "D")
        server.asked.release()
        await posted(server, 3)
    assert (server.posted, len(recorder)) == (["B", "C", "D"], 0)

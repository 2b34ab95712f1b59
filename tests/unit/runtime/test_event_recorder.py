"""Events are posted in order when the queue is idle, a few seconds later anyhow, and never lost by a stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fleetkeeper.adapters.kubernetes.errors import ApiError
from fleetkeeper.adapters.kubernetes.lease import LeaseLost
from fleetkeeper.common.values import Event
from fleetkeeper.runtime import event_recorder
from fleetkeeper.runtime.event_recorder import EventRecorder
from fleetkeeper.runtime.metrics import OperatorMetrics
from fleetkeeper.runtime.queue import Key
from tests.support.contained import new_defects

CHAT = Key("a", "chat")
LIVE: dict[str, Any] = {"metadata": {"name": "chat", "namespace": "a", "uid": "u1"}}


class Server:
    def __init__(self) -> None:
        self.posted: list[str] = []
        self.namespaces: set[str] = set()
        self.asked = asyncio.Condition()
        self.refuse: Exception | None = None

    async def post_event(self, namespace: str, manifest: dict[str, Any]) -> None:
        self.namespaces.add(namespace)
        async with self.asked:
            if self.refuse is None:
                self.posted.append(manifest["reason"])
            self.asked.notify_all()
        if self.refuse is not None:
            raise self.refuse


def board_of(server: Server) -> EventRecorder:
    return EventRecorder(
        server,  # type: ignore[arg-type]
        OperatorMetrics(),
        now=lambda: 100.0,
        instance="pod-1",
        defects=new_defects(),
    )


@contextlib.asynccontextmanager
async def running(board: EventRecorder, idle: asyncio.Event) -> AsyncIterator[asyncio.Task[None]]:
    async def is_idle() -> None:
        await idle.wait()

    task = asyncio.create_task(board.run(is_idle))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


def record(board: EventRecorder, *reasons: str) -> None:
    for reason in reasons:
        board.record(CHAT, LIVE, Event("Normal", reason, "text"))


async def posted(server: Server, count: int) -> None:
    async with asyncio.timeout(5), server.asked:
        await server.asked.wait_for(lambda: len(server.posted) >= count)


async def test_notices_wait_for_calm_and_keep_their_order() -> None:
    server, idle = Server(), asyncio.Event()
    board = board_of(server)
    async with running(board, idle):
        record(board, "A", "B", "C")
        await asyncio.sleep(0.02)
        assert server.posted == []
        idle.set()
        await posted(server, 3)
        assert server.posted == ["A", "B", "C"]
        record(board, "D")
        await posted(server, 4)
    assert len(board) == 0


async def test_a_notice_is_posted_after_a_while_though_it_is_never_calm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_recorder, "MAX_WAIT_S", 0.02)
    server = Server()
    board = board_of(server)
    async with running(board, asyncio.Event()):
        record(board, "A", "B")
        await posted(server, 2)
    assert server.posted == ["A", "B"]


async def test_what_waits_at_the_end_is_posted() -> None:
    server = Server()
    board = board_of(server)
    record(board, "A", "B")
    await board.drain()
    assert (server.posted, len(board)) == (["A", "B"], 0)


async def test_an_event_that_is_refused_holds_up_no_other() -> None:
    server, idle = Server(), asyncio.Event()
    idle.set()
    board = board_of(server)
    async with running(board, idle):
        server.refuse = ApiError(403, "Forbidden", "")
        async with asyncio.timeout(5), server.asked:
            record(board, "A")
            await server.asked.wait()
        await asyncio.sleep(0)
        server.refuse = None
        record(board, "B")
        await posted(server, 1)
    assert (server.posted, server.namespaces) == (["B"], {"a"})


async def test_a_lost_lease_ends_the_board() -> None:
    server, idle = Server(), asyncio.Event()
    idle.set()
    board = board_of(server)
    server.refuse = LeaseLost("too old")
    async with running(board, idle) as task:
        record(board, "A")
        await asyncio.wait({task}, timeout=5)
        assert isinstance(task.exception(), LeaseLost)

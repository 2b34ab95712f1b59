"""The turns in which bodies are read: by tenant, one at a time, and not all of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from fleetkeeper_gateway.http.connections.reading_turns import ReadingTurns


class Readers:
    """Readers that wait for a turn, in the order in which they got it."""

    def __init__(self) -> None:
        self.turns = ReadingTurns()
        self.got: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def add(self, *owners: str) -> None:
        """Add one that waits, for each owner."""
        for owner in owners:
            self.tasks.append(asyncio.create_task(self._take(owner)))
        await settled()

    async def _take(self, owner: str) -> None:
        await self.turns.take(owner)
        self.got.append(owner)


async def settled() -> None:
    """Let all tasks go as far as they can."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def readers() -> AsyncIterator[Readers]:
    found = Readers()
    yield found
    for task in found.tasks:
        task.cancel()
    await asyncio.gather(*found.tasks, return_exceptions=True)


async def test_a_tenant_waits_for_one_turn_of_another_however_many_read(readers: Readers) -> None:
    await readers.add(*"aaaaaaaab")
    assert readers.got == ["a"]
    for _ in range(4):
        readers.turns.give_back(0.0)
        await settled()
    assert "".join(readers.got) == "aabaa"


async def test_turns_that_take_long_leave_the_loop_to_others(readers: Readers) -> None:
    loop = asyncio.get_running_loop()
    await readers.add("a", "a")
    began = loop.time()
    readers.turns.give_back(0.05)
    await readers.tasks[1]
    assert loop.time() - began >= 0.049


@pytest.mark.parametrize("has_the_turn", [False, True])
async def test_a_client_that_hangs_up_passes_its_turn_on(
    readers: Readers, has_the_turn: bool
) -> None:
    await readers.add("a", "a", "b")
    if has_the_turn:
        readers.turns.give_back(0.0)
    readers.tasks[1].cancel()
    await settled()
    if not has_the_turn:
        readers.turns.give_back(0.0)
        await settled()
    assert readers.got == ["a", "b"]
    readers.turns.give_back(0.0)
    await readers.add("c")
    assert readers.got == ["a", "b", "c"]

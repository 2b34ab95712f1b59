"""Turns of validation: whose file is read next."""

from __future__ import annotations

import asyncio

from fleetkeeper_gateway.batch.key_turns import KeyTurns


class World:
    """Work that holds a turn until the test ends it."""

    def __init__(self, places: int = 2) -> None:
        self._turns = KeyTurns(places)
        self.running: list[str] = []
        """Names in the order in which they got their turn, as long as they have it."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def start(self, *names: str) -> None:
        """Start work. The first letter of a name is its key."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._work(name))
        await asyncio.sleep(0)

    async def end(self, name: str, *, cancel: bool = False) -> None:
        """End work that has a turn, or cancel it."""
        if cancel:
            self._tasks[name].cancel()
        self._ends[name].set()
        await asyncio.wait([self._tasks[name]])
        await asyncio.sleep(0)  # who has its turn now begins

    async def _work(self, name: str) -> None:
        async with self._turns.turn(name[0]):
            self.running.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.running.remove(name)


async def test_another_key_never_waits_for_the_files_of_one() -> None:
    world = World()
    await world.start(*(f"a{number}" for number in range(10)))
    assert world.running == ["a0"]
    await world.start("b0", "b1")
    assert world.running == ["a0", "b0"]


async def test_keys_that_wait_have_their_turns_one_after_another() -> None:
    world = World()
    await world.start("a0", "b0", "a1", "a2", "a3", "c0", "d0")
    order = []
    while world.running:
        await world.end(world.running[0])
        order += [name for name in world.running if name not in order]
    assert order == ["b0", "a1", "c0", "d0", "a2", "a3"]


async def test_a_key_that_is_alone_leaves_one_turn_free() -> None:
    world = World(places=4)
    await world.start(*(f"a{number}" for number in range(10)))
    assert len(world.running) == 3
    await world.start("b0", "b1")
    assert world.running[3:] == ["b0"]


async def test_work_that_is_cancelled_gives_its_turn_to_the_next() -> None:
    world = World()
    await world.start("a0", "a1", "a2", "b0")
    await world.end("a1", cancel=True)
    assert world.running == ["a0", "b0"]
    await world.end("a0", cancel=True)
    assert world.running == ["b0", "a2"]
    await world.end("b0")
    await world.start("a3", "c0")
    assert world.running == ["a2", "c0"]


async def test_a_turn_that_is_cancelled_as_it_begins_is_not_lost() -> None:
    turns, got = KeyTurns(1), asyncio.Event()

    async def work() -> None:
        async with turns.turn("b"):
            got.set()

    async with turns.turn("a"):
        waiting = asyncio.create_task(work())
        await asyncio.sleep(0)
    # The turn is its own now, and it was not resumed since.
    waiting.cancel()
    await asyncio.wait([waiting])
    assert not got.is_set()
    async with asyncio.timeout(60), turns.turn("c"):
        pass

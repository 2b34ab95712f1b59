"""Memory that the lines of all keys share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from fleetkeeper_gateway.batch.workers.room import Room


class Holder:
    """Holds bytes until it is let go."""

    def __init__(self, room: Room, key: str, size: int) -> None:
        self.has = False
        self._let_go = asyncio.Event()
        self.task = asyncio.create_task(self._hold(room, key, size))

    async def _hold(self, room: Room, key: str, size: int) -> None:
        async with room.hold(key, size):
            self.has = True
            await self._let_go.wait()
        self.has = False

    async def let_go(self) -> None:
        self._let_go.set()
        await self.task


@pytest.fixture
def room() -> Room:
    return Room(100)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def has(*holders: Holder) -> list[bool]:
    await turns()
    return [one.has for one in holders]


async def test_a_key_may_hold_as_many_bytes_as_it_leaves_free(room: Room) -> None:
    first = [Holder(room, "a", 10) for _ in range(7)]
    assert await has(*first) == [True] * 5 + [False] * 2
    other = [Holder(room, "b", 10) for _ in range(4)]
    assert await has(*other) == [True] * 2 + [False] * 2
    third = [Holder(room, "c", 10) for _ in range(2)]
    assert await has(*third) == [True, False]
    for one in (*first, *other, *third):
        one.task.cancel()
    await turns()
    assert room._free == 100


async def test_a_large_line_is_not_starved_by_small_ones_of_its_key(room: Room) -> None:
    small = [Holder(room, "a", 10) for _ in range(5)]
    large = Holder(room, "a", 40)
    late = [Holder(room, "a", 1) for _ in range(3)]
    assert await has(large, *late) == [False] * 4
    for one in small[:4]:
        await one.let_go()
    assert await has(large, *late) == [True, False, False, False]
    await large.let_go()
    assert await has(*late) == [True] * 3


async def test_one_that_is_larger_than_its_part_goes_alone(room: Room) -> None:
    first = Holder(room, "a", 10)
    large = Holder(room, "b", 90)
    assert await has(first, large) == [True, False]
    await first.let_go()
    assert await has(large) == [True]


@pytest.mark.parametrize("when", ["waiting", "granted"])
async def test_who_gives_up_holds_nothing(room: Room, when: str) -> None:
    first = Holder(room, "a", 50)
    second, third = Holder(room, "a", 40), Holder(room, "a", 5)
    await turns()
    if when == "granted":
        first._let_go.set()
        await asyncio.sleep(0)
    second.task.cancel()
    first._let_go.set()
    assert await has(third) == [True]
    await third.let_go()
    assert room._free == 100


async def test_every_byte_comes_back(room: Room) -> None:
    async def use(key: str, size: int) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(room.hold(key, size))
            assert room._free >= 0
            await asyncio.sleep(0)

    def sizes() -> Iterator[tuple[str, int]]:
        for number in range(300):
            yield "abc"[number % 3], 1 + (number * 37) % 60

    await asyncio.gather(*(use(key, size) for key, size in sizes()))
    assert room._free == 100
    assert not room._waiting

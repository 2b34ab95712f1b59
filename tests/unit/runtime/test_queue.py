"""The queue hands out each service once, to one worker at a time, changed ones first."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.runtime.queue import (
    CALM_S,
    MAX_RETRY_S,
    PAUSE_AFTER_FAILURE_S,
    TURN_OF_MOVED,
    Key,
    KeyedQueue,
    Urgency,
)
from tests.support.operators.queue_steps import handed_out

A, B, C = (Key("ns", name) for name in "abc")


class Clock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def monotonic(self) -> float:
        return self.time_s


def queue(clock: Clock | None = None) -> KeyedQueue:
    return KeyedQueue(monotonic=(clock or Clock()).monotonic, jitter=lambda seconds: seconds)


async def test_a_key_queued_often_is_handed_out_once() -> None:
    found = queue()
    for _ in range(5):
        found.add(A)
    assert await found.get() == A
    assert len(found) == 0


async def test_a_key_that_changes_while_a_worker_has_it_comes_again_after() -> None:
    found = queue()
    found.add(A)
    key = await found.get()
    found.add(A)
    assert len(found) == 0
    assert key is not None
    found.done(key)
    assert await found.get() == A


async def test_changed_goes_before_resynced() -> None:
    found = queue()
    found.add(A, Urgency.RESYNC)
    found.add(B, Urgency.RESYNC)
    found.add(C)
    found.add(B)
    assert [await found.get() for _ in range(3)] == [C, B, A]


@pytest.mark.parametrize("urgency", Urgency)
async def test_a_thousand_keys_of_one_namespace_delay_another_by_one(urgency: Urgency) -> None:
    """Within a namespace the order stays; namespaces take turns."""
    found = queue()
    many = [Key("busy", f"s{number}") for number in range(1000)]
    for key in many:
        found.add(key, urgency)
    few = [Key("calm", "a"), Key("calm", "b")]
    for key in few:
        found.add(key, urgency)
    first = [await found.get() for _ in range(4)]
    assert first == [many[0], few[0], many[1], few[1]]
    assert [await found.get() for _ in range(998)] == many[2:]
    assert len(found) == 0


async def test_a_delayed_key_comes_at_the_earliest_moment_asked_for() -> None:
    clock = Clock()
    found = queue(clock)
    found.add_after(A, 10.0)
    found.add_after(A, 2.0)
    found.add_after(A, 30.0)
    clock.time_s = 1.9
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(found.get(), 0.05)
    clock.time_s = 2.0
    assert await found.get() == A
    assert found.waiting == 0


async def test_a_change_does_not_wait_for_a_delay() -> None:
    found = queue()
    found.add_after(A, 60.0)
    found.add(A)
    assert await found.get() == A


def test_retries_double_up_to_a_bound_and_success_forgets() -> None:
    found = queue()
    delays = [found.retry(A) for _ in range(12)]
    assert delays[:4] == [0.2, 0.4, 0.8, 1.6]
    assert delays[-1] == MAX_RETRY_S
    found.succeeded(A)
    assert found.retry(A) == 0.2


async def test_a_waiting_reader_wakes_when_something_comes() -> None:
    found = queue()
    reader = asyncio.create_task(found.get())
    await asyncio.sleep(0)
    found.add(A)
    assert await asyncio.wait_for(reader, 60) == A


async def test_a_closed_queue_hands_out_nothing() -> None:
    found = queue()
    found.add(A)
    found.close()
    assert await found.get() is None


async def test_a_forgotten_key_does_not_come() -> None:
    found = queue()
    found.add(A)
    found.add_after(A, 0.0)
    found.forget(A)
    found.add(B)
    assert await found.get() == B


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "resync", "get", "done", "after", "failed", "second"]),
        st.sampled_from([A, B, C]),
    ),
    max_size=60,
)


async def drained(found: KeyedQueue) -> set[Key]:
    """Return the keys that are handed out until there is none."""
    taken = set()
    while (key := await handed_out(found)) is not None:
        taken.add(key)
        found.done(key)
    return taken


@given(STEPS)
def test_no_change_is_lost_and_no_key_has_two_workers(steps: list[tuple[str, Key]]) -> None:
    """Whatever the order: after the last change of a key, it is handed out at least once."""

    async def run() -> None:
        clock = Clock()
        found = queue(clock)
        working: set[Key] = set()
        owed: set[Key] = set()
        for step, key in steps:
            if step in {"add", "resync"}:
                found.add(key, Urgency.CHANGED if step == "add" else Urgency.RESYNC)
                owed.add(key)
            elif step == "after":
                found.add_after(key, 1.0)
                owed.add(key)
            elif step == "second":
                clock.time_s += 1.0
            elif step in {"done", "failed"} and key in working:
                working.discard(key)
                if step == "failed":
                    found.retry(key)
                    owed.add(key)
                found.done(key)
            elif step == "get" and (taken := await handed_out(found)) is not None:
                assert taken not in working
                working.add(taken)
                owed.discard(taken)
        for key in list(working):
            found.done(key)
        clock.time_s += MAX_RETRY_S
        assert owed <= await drained(found)

    asyncio.run(run())


async def test_what_moved_waits_for_what_changed_but_not_for_ever() -> None:
    """Movements of a service that waits in line are one look; yet a burst keeps no status back."""
    clock = Clock()
    found = queue(clock)
    moved = Key("ns", "moved")
    first = [Key("ns", f"n{number}") for number in range(2 * TURN_OF_MOVED)]
    found.add(first[0])
    assert await found.get() == first[0]
    found.add_soon(moved)
    for key in first[1:]:
        found.add(key)
    clock.time_s = 1.0
    handed = []
    while len(found):
        handed.append(await found.get())
    assert sorted(filter(None, handed)) == sorted([moved, *first[1:]])
    assert 0 < handed.index(moved) < TURN_OF_MOVED


async def test_calm_is_a_pause_without_a_key_in_hand_or_in_line() -> None:
    found = KeyedQueue(monotonic=time.monotonic, jitter=lambda seconds: seconds)
    found.add(A)
    idle = asyncio.create_task(found.idle())
    key = await found.get()
    assert key is not None
    await asyncio.sleep(CALM_S / 5)
    assert not idle.done()
    found.done(key)
    ended = time.monotonic()
    async with asyncio.timeout(60):
        await idle
    assert time.monotonic() - ended >= 0.9 * CALM_S


async def test_a_key_that_comes_in_the_pause_begins_it_anew() -> None:
    found = KeyedQueue(monotonic=time.monotonic, jitter=lambda seconds: seconds)
    idle = asyncio.create_task(found.idle())
    await asyncio.sleep(CALM_S / 5)
    found.add(A)
    await asyncio.sleep(CALM_S)
    assert not idle.done()
    found.forget(A)
    async with asyncio.timeout(60):
        await idle


async def test_events_do_not_hand_out_a_failing_key_more_than_once_a_second() -> None:
    """A write whose response is lost comes back as an event, at once and each time."""
    clock = Clock()
    found = queue(clock)
    found.add(A)
    reconciles = []
    while clock.time_s < 6.0:
        found.add(A)
        if await handed_out(found) is not None:
            reconciles.append(clock.time_s)
            found.add(A)
            found.retry(A)
            found.done(A)
        clock.time_s += 0.01
    retries = 2  # 0.2 and 0.4 s after a failure: sooner than a second
    assert len(reconciles) <= 1 + retries + 6
    clock.time_s += PAUSE_AFTER_FAILURE_S
    assert await found.get() == A
    found.succeeded(A)
    found.done(A)
    found.add(A)
    assert len(found) == 1, "after a success nothing is delayed"

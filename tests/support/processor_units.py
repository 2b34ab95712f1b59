"""Processor time in units of a fixed amount of work.

Another machine, or a busy one, has the same figures: the unit is measured on the same thread, before and
after what it divides.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Final

LONGEST: Final = 60
"""Units of one turn of an event loop: 27 ms where this was written. Turns took at most 12 ms there, and 20 ms
beside four other workers. Lists in one piece took 60 ms."""
TRIES: Final = 5
"""Another guest of the host, or a move to another core, may take a try's time."""

Clock = Callable[[], float]


def unit_s(clock: Clock = time.thread_time) -> float:
    """Return the processor time of encoding a thousand small objects, about 0.5 ms."""
    document = [{"id": f"file-{number:032x}", "bytes": number} for number in range(1000)]

    def once() -> float:
        began = clock()
        json.dumps(document)
        return clock() - began

    return statistics.median(once() for _ in range(5))


def units_of(
    work: Callable[[], object],
    enough: float,
    clock: Clock = time.thread_time,
    prepare: Callable[[], object] = lambda: None,
) -> float:
    """Return the processor time of the work in units: the first one below `enough`, or the least of five.

    What `prepare` does before each try is not measured.
    """
    found = []
    for _ in range(TRIES):
        prepare()
        before = unit_s(clock)
        began = clock()
        work()
        took_s = clock() - began
        found.append(took_s / max(before, unit_s(clock)))
        if found[-1] < enough:
            break
    return min(found)


async def longest_turn(
    call: Callable[[], Awaitable[object]],
    enough: float = LONGEST,
    clock: Clock = time.thread_time,
) -> float:
    """Return the longest time of the processor between two turns of another task during a call, in units.

    It is the first one below `enough`, or the least of five calls.
    """
    found = []
    for _ in range(TRIES):
        before = unit_s(clock)
        turn_s = await _longest_turn_s(call(), clock)
        found.append(turn_s / max(before, unit_s(clock)))
        if found[-1] < enough:
            break
    return min(found)


async def _longest_turn_s(work: Awaitable[object], clock: Clock) -> float:
    task = asyncio.ensure_future(work)
    turn_s, before = 0.0, clock()
    while not task.done():
        await asyncio.sleep(0)
        now = clock()
        turn_s, before = max(turn_s, now - before), now
    await task
    return turn_s

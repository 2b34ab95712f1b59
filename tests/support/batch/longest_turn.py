"""How long work keeps an event loop at a time.

Times are those of the processor, in units of a fixed amount of work: another machine, or a busy one, has
the same figures.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Final

LONGEST: Final = 60
"""In units: 27 ms where this was written. The calls took at most 12 ms there, and 20 ms beside four other
workers. Lists in one piece took 60 ms."""


def unit_s() -> float:
    """Return the processor time of encoding a thousand small objects, about 0.5 ms."""
    document = [{"id": f"file-{number:032x}", "bytes": number} for number in range(1000)]

    def once() -> float:
        began = time.thread_time()
        json.dumps(document)
        return time.thread_time() - began

    return min(once() for _ in range(20))


async def longest_turn(call: Callable[[], Awaitable[object]]) -> float:
    """Return the longest time of the processor between two turns of another task during a call, in units.

    It is the least of five calls: the collector of Python's garbage may come in between.
    """
    longest = [0.0]
    ends = asyncio.Event()

    async def probe() -> None:
        last = time.thread_time()
        while not ends.is_set():
            await asyncio.sleep(0)
            now = time.thread_time()
            longest[-1] = max(longest[-1], now - last)
            last = now

    probing = asyncio.create_task(probe())
    await asyncio.sleep(0)  # it begins
    for _ in range(5):
        longest.append(0.0)
        await call()
        await asyncio.sleep(0)  # a call that never waited is one turn
    ends.set()
    await probing
    return min(longest[1:]) / unit_s()

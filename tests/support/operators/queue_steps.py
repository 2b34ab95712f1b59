"""Steps of a queue without a worker."""

from __future__ import annotations

import asyncio

from fleetkeeper.runtime.queue import Key, KeyedQueue


async def handed_out(queue: KeyedQueue) -> Key | None:
    """Return the key that the queue hands out now; None if there is none."""
    task = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    if task.done():
        return await task
    task.cancel()
    return None

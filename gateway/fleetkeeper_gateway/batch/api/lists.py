"""Sends lists in turns of their key, which bounds the memory that slow readers hold."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable

from fleetkeeper_gateway.batch.api.call import Stream


async def list_stream(
    turns: asyncio.Semaphore, make: Callable[[], Awaitable[deque[bytes]]]
) -> Stream:
    """Return a list, in a turn of its key, which lasts until the list was sent.

    Args:
        turns: turns of the key.
        make: returns the pieces of the list.
    """
    pieces: deque[bytes] = deque()

    async def sent() -> AsyncGenerator[bytes, None]:
        async with turns:
            pieces.extend(await make())
            while pieces:
                yield pieces.popleft()

    rest = sent()
    first = await anext(rest)
    length = len(first) + sum(map(len, pieces))
    return Stream(first, rest, length, [(b"content-type", b"application/json")])

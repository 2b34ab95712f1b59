"""The measures of the gateway's benchmark: each runs all contenders once a block, in rotating order."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from contenders import Contender
from proxy_figures import (
    CapacityCell,
    LatencyCell,
    MemoryCell,
    StreamCell,
    percentile,
    rotated,
)
from thin_client import HeldStreams, closed_loop, open_loop, streams

from fleetkeeper_local.common.report import say

Cell = TypeVar("Cell")
RATE = 200.0
LOW_RATE = 20.0
"""A rate that every contender carries."""
CLIENTS = 16
STREAMS, TOKENS_PER_S = 64, 50
WARM_S = 2.0


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    blocks: int
    seconds: float
    """Of each measurement."""
    open_streams: int


FULL_SIZE = Size(blocks=4, seconds=10.0, open_streams=1000)
QUICK_SIZE = Size(blocks=2, seconds=2.0, open_streams=50)


async def in_blocks(
    contenders: Sequence[Contender],
    blocks: int,
    measure: Callable[[Contender, int], Awaitable[Cell]],
) -> list[dict[str, Cell]]:
    """Return the cells of each block. Contenders alternate, so that all see the same machine."""
    by_name = {contender.name: contender for contender in contenders}
    found = []
    for number in range(blocks):
        order = rotated(list(by_name), number)
        say(f"{measure.__name__}: block {number + 1} of {blocks}")
        found.append({name: await measure(by_name[name], number) for name in order})
    return found


def latency(size: Size, rate: float) -> Callable[[Contender, int], Awaitable[LatencyCell]]:
    """Return the measure of requests at a rate."""

    async def latency(contender: Contender, block: int) -> LatencyCell:
        await open_loop(contender.target, rate, WARM_S, seed=-1 - block)
        before = contender.cpu_s()
        found = await open_loop(contender.target, rate, size.seconds, seed=block)
        cpu_s = contender.cpu_s() - before
        return LatencyCell(
            percentile(found.seconds, 0.5) * 1e3,
            percentile(found.seconds, 0.99) * 1e3,
            len(found.seconds),
            found.failed,
            cpu_s * 1e3 / (len(found.seconds) + found.failed),
        )

    return latency


def capacity(size: Size) -> Callable[[Contender, int], Awaitable[CapacityCell]]:
    """Return the measure of clients that send one request after another."""

    async def capacity(contender: Contender, _: int) -> CapacityCell:
        await closed_loop(contender.target, CLIENTS, WARM_S)
        before = contender.cpu_s()
        found = await closed_loop(contender.target, CLIENTS, size.seconds)
        cpu_s = contender.cpu_s() - before
        answered = len(found.seconds)
        return CapacityCell(
            answered / size.seconds, answered / cpu_s if cpu_s else math.inf, found.failed
        )

    return capacity


def stream_gaps(size: Size) -> Callable[[Contender, int], Awaitable[StreamCell]]:
    """Return the measure of streams that run at the same time."""

    async def stream_gaps(contender: Contender, _: int) -> StreamCell:
        tokens = round(size.seconds * TOKENS_PER_S)
        found = await streams(contender.target, STREAMS, tokens, 1000 // TOKENS_PER_S)
        return StreamCell(
            percentile(found.first, 0.5) * 1e3,
            percentile(found.gaps, 0.5) * 1e3,
            percentile(found.gaps, 0.99) * 1e3,
            found.failed,
        )

    return stream_gaps


async def memory(contender: Contender, size: Size) -> MemoryCell:
    """Measure the resident memory before and while streams are open.

    Raises:
        RuntimeError: a stream ended early, so fewer were open than the figure says.
    """
    say(f"memory: {contender.name}")
    await open_loop(contender.target, RATE / 4, WARM_S, seed=0)
    idle_mib = contender.rss_mib()
    open_mib: float | None = None
    try:
        async with HeldStreams(contender.target, size.open_streams) as held:
            open_mib = contender.rss_mib()
            if held.open < size.open_streams:
                ended = size.open_streams - held.open
                raise RuntimeError(f"{contender.name} ended {ended} streams")
    except TimeoutError:
        say(f"memory: {contender.name} does not begin {size.open_streams} streams in time")
    # The next contender is not to share the machine with the end of these.
    await asyncio.sleep(WARM_S)
    return MemoryCell(idle_mib, open_mib, size.open_streams)

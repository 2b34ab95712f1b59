"""The tables of the gateway's benchmark."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from measures import CLIENTS, LOW_RATE, RATE, STREAMS, TOKENS_PER_S, Size
from proxy_figures import (
    BEFORE,
    DIRECT,
    FULL,
    FULL_GOAL,
    GAP_GOAL_MS,
    OURS,
    P50_GOAL_MS,
    P99_GOAL_MS,
    CapacityCell,
    Goal,
    LatencyCell,
    MemoryCell,
    StreamCell,
    added,
    at_most,
    ratio,
    spread,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from results_page import markdown_table

Cell = TypeVar("Cell")
TITLE = "# The gateway, measured\n"
HEADING = "The gateway's own cost, before an upstream that answers at once"


@dataclass(frozen=True)
class Found:
    """The cells of every measure, by block and contender."""

    latency: list[dict[str, LatencyCell]]
    low: list[dict[str, LatencyCell]]
    capacity: list[dict[str, CapacityCell]]
    streams: list[dict[str, StreamCell]]
    memory: dict[str, MemoryCell]

    @property
    def proxies(self) -> list[str]:
        """Return the contenders that have a process."""
        return list(self.memory)

    @property
    def failed(self) -> int:
        """Return the failed requests of all contenders."""
        cells: list[LatencyCell | CapacityCell | StreamCell] = []
        for block in (*self.latency, *self.low):
            cells += block.values()
        for capacity in self.capacity:
            cells += capacity.values()
        for streams in self.streams:
            cells += streams.values()
        return sum(cell.failed for cell in cells)


def setting(redis_version: str, size: Size) -> str:
    """Return what was run, in which version and with which options."""
    return (
        f"{size.blocks} blocks, which alternate the contenders; {size.seconds:g} s for each measurement; "
        "medians over the blocks, lowest and highest in parentheses. One process each, all on the same "
        f"machine as the load and the upstream. Redis {redis_version}, one for each gateway.\n\n"
        "The gateway runs with its defaults: a key with limits of requests, tokens and concurrency in "
        "Redis, a signed grant for each request, audit log. `gateway, full` knows 1,000 services and "
        "10,000 keys."
    )


def tables(found: Found) -> str:
    """Return the goals and the figures in Markdown."""
    parts = [
        markdown_table(["goal", "measured", ""], [goal.row() for goal in goals(found)]),
        f"{found.failed} requests failed.",
        markdown_table(_head(found), list(_rows(found))),
    ]
    return "\n\n".join(parts) + "\n"


def goals(found: Found) -> Iterator[Goal]:
    """Yield the goals with what was measured for them."""
    added_p50 = added(found.latency, OURS, _p50)
    yield at_most(f"added latency P50 <= {P50_GOAL_MS} ms", added_p50, P50_GOAL_MS, 2, " ms")
    added_p99 = added(found.latency, OURS, _p99)
    yield at_most(f"added latency P99 <= {P99_GOAL_MS:g} ms", added_p99, P99_GOAL_MS, 2, " ms")
    gap = added(found.streams, OURS, lambda cell: cell.gap_p99_ms)
    yield at_most(f"added P99 gap of streams <= {GAP_GOAL_MS:g} ms", gap, GAP_GOAL_MS, 2, " ms")
    if FULL in found.memory:
        text = "1,000 services and 10,000 keys change at most 10%"
        yield at_most(f"{text}: latency P50", ratio(found.latency, FULL, OURS, _p50), FULL_GOAL, 2)
        cpu = ratio(found.capacity, OURS, FULL, lambda cell: cell.per_core_s)
        yield at_most(f"{text}: processor time of a request", cpu, FULL_GOAL, 2)
        own, full = (stream_kib(found.memory[name]) for name in (OURS, FULL))
        # A few streams may fit into memory that the process has already.
        if own is not None and full is not None and own > 0:
            growth = full / own
            yield at_most(f"{text}: memory of a stream", spread([growth]), FULL_GOAL, 2)


def stream_kib(cell: MemoryCell) -> float | None:
    """Return the resident memory of one open stream; None if not all streams began in time."""
    if cell.open_mib is None:
        return None
    return (cell.open_mib - cell.idle_mib) * 1024 / cell.streams


def _p50(cell: LatencyCell) -> float:
    return cell.p50_ms


def _p99(cell: LatencyCell) -> float:
    return cell.p99_ms


def _cpu(cell: LatencyCell) -> float:
    return cell.cpu_ms


def _per_core(cell: CapacityCell) -> float:
    return cell.per_core_s


def _per_s(cell: CapacityCell) -> float:
    return cell.per_s


def _head(found: Found) -> list[str]:
    compared = [f"{OURS} / {BEFORE}"] if BEFORE in found.memory else []
    return ["", DIRECT, *found.proxies, *compared]


def _rows(found: Found) -> Iterator[list[str]]:
    for rate, blocks in ((LOW_RATE, found.low), (RATE, found.latency)):
        for label, latency in (
            ("latency P50", _p50),
            ("latency P99", _p99),
            ("processor time of a request", _cpu),
        ):
            yield _row(found, f"{label}, {rate:g} requests/s", blocks, latency, 2, unit=" ms")
    clients = f"{CLIENTS} clients"
    for label, capacity in (
        (f"requests/s for a core of the gateway, {clients}", _per_core),
        (f"requests/s, {clients}, all on this machine", _per_s),
    ):
        yield _row(found, label, found.capacity, capacity, 0)
    streams: list[tuple[str, Callable[[StreamCell], float]]] = [
        ("first token P50", lambda cell: cell.first_p50_ms),
        ("gap P50", lambda cell: cell.gap_p50_ms),
        ("gap P99", lambda cell: cell.gap_p99_ms),
    ]
    for label, gap in streams:
        text = f"{STREAMS} streams of {TOKENS_PER_S} tokens/s: {label}"
        yield _row(found, text, found.streams, gap, 1, unit=" ms")
    count = next(iter(found.memory.values())).streams
    memory: list[tuple[str, Callable[[MemoryCell], float | None], str]] = [
        ("resident memory at rest", lambda cell: cell.idle_mib, "MiB"),
        (f"resident memory with {count:,} open streams", lambda cell: cell.open_mib, "MiB"),
        ("memory of a stream", stream_kib, "KiB"),
    ]
    for label, size, unit in memory:
        sizes = {name: size(cell) for name, cell in found.memory.items()}
        yield [label, "", *(_size(cell, unit) for cell in sizes.values()), *_compared(sizes)]


def _compared(sizes: Mapping[str, float | None]) -> list[str]:
    """Return the memory of this gateway relative to that of the other commit, if it runs."""
    if BEFORE not in sizes:
        return []
    ours, before = sizes[OURS], sizes[BEFORE]
    return [f"{ours / before:.2f}" if ours and before else ""]


def _row(
    found: Found,
    label: str,
    blocks: Sequence[Mapping[str, Cell]],
    figure: Callable[[Cell], float],
    digits: int,
    *,
    unit: str = "",
) -> list[str]:
    """Return a figure of each contender, and this gateway's relative to the other commit's, block by block."""
    cells = [
        spread(figure(block[name]) for block in blocks).text(digits, unit)
        if name in blocks[0]
        else ""
        for name in (DIRECT, *found.proxies)
    ]
    compared = [ratio(blocks, OURS, BEFORE, figure).text(2)] if BEFORE in found.memory else []
    return [label, *cells, *compared]


def _size(size: float | None, unit: str) -> str:
    return "not all began in 60 s" if size is None else f"{size:.0f} {unit}"

"""The tables of the gateway's benchmark."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from measures import CLIENTS, LOW_RATE, RATE, STREAMS, TOKENS_PER_S, Size
from proxy_figures import (
    DIRECT,
    FULL,
    FULL_GOAL,
    GAP_GOAL_MS,
    OTHER,
    OURS,
    P50_GOAL_MS,
    P99_GOAL_MS,
    PER_CORE_GOAL,
    CapacityCell,
    Goal,
    LatencyCell,
    MemoryCell,
    StreamCell,
    added,
    at_least,
    at_most,
    ratio,
    spread,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from results_page import markdown_table

Cell = TypeVar("Cell")
TITLE = "# The gateway, measured\n"
HEADING = "The proxy's own cost, before an upstream that answers at once"


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


def setting(versions: Mapping[str, str], size: Size) -> str:
    """Return what was run, in which versions and with which options."""
    text = (
        f"{size.blocks} blocks, which alternate the contenders; {size.seconds:g} s for each measurement; "
        "medians over the blocks, lowest and highest in parentheses. One process each, all on the same "
        f"machine as the load and the upstream. Redis {versions['redis']}, one for each proxy.\n\n"
        "The gateway runs with its defaults: a key with limits of requests, tokens and concurrency in "
        "Redis, a signed grant for each request, audit log. `gateway, full` knows 1,000 services and "
        "10,000 keys."
    )
    if "litellm" not in versions:
        return text
    return (
        f"{text} LiteLLM {versions['litellm']} (uvicorn {versions['uvicorn']}, FastAPI "
        f"{versions['fastapi']}) runs with one worker, its master key, and limits of requests and tokens "
        "for the deployment in Redis (`usage-based-routing-v2`). Its keys with limits of their own need a "
        "database, and it signs no grants, so it does less."
    )


def tables(found: Found) -> str:
    """Return the goals and the figures in Markdown."""
    parts = [
        markdown_table(["goal", "measured", ""], [goal.row() for goal in goals(found)]),
        f"{found.failed} requests failed.",
        markdown_table(["", *_names(found)], list(_rows(found))),
    ]
    return "\n\n".join(parts) + "\n"


def goals(found: Found) -> Iterator[Goal]:
    """Yield the goals with what was measured for them."""
    added_p50 = added(found.latency, OURS, _p50)
    yield at_most(f"added latency P50 <= {P50_GOAL_MS} ms", added_p50, P50_GOAL_MS, 2, " ms")
    added_p99 = added(found.latency, OURS, _p99)
    yield at_most(f"added latency P99 <= {P99_GOAL_MS:g} ms", added_p99, P99_GOAL_MS, 2, " ms")
    if OTHER in found.memory:
        yield at_least(
            f"requests a second per core >= {PER_CORE_GOAL:g} times LiteLLM's",
            ratio(found.capacity, OURS, OTHER, lambda cell: cell.per_core_s),
            PER_CORE_GOAL,
            1,
        )
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


def _names(found: Found) -> list[str]:
    return [DIRECT, *found.proxies]


def _rows(found: Found) -> Iterator[list[str]]:
    for rate, blocks in ((LOW_RATE, found.low), (RATE, found.latency)):
        for label, figure in (
            ("latency P50", _p50),
            ("latency P99", _p99),
            ("processor time of a request", _cpu),
        ):
            cells = (_told(blocks, name, figure, 2, " ms") for name in _names(found))
            yield [f"{label}, {rate:g} requests/s", *cells]
    yield [
        f"requests/s for a core of the proxy, {CLIENTS} clients",
        "",
        *(_told(found.capacity, n, lambda c: c.per_core_s, 0, "") for n in found.proxies),
    ]
    yield [
        f"requests/s, {CLIENTS} clients, all on this machine",
        "",
        *(_told(found.capacity, n, lambda c: c.per_s, 0, "") for n in found.proxies),
    ]
    streams: list[tuple[str, Callable[[StreamCell], float]]] = [
        ("first token P50", lambda cell: cell.first_p50_ms),
        ("gap P50", lambda cell: cell.gap_p50_ms),
        ("gap P99", lambda cell: cell.gap_p99_ms),
    ]
    for label, gap in streams:
        yield [
            f"{STREAMS} streams of {TOKENS_PER_S} tokens/s: {label}",
            *(_told(found.streams, n, gap, 1, " ms") for n in _names(found)),
        ]
    count = next(iter(found.memory.values())).streams
    yield ["resident memory at rest", "", *(f"{c.idle_mib:.0f} MiB" for c in found.memory.values())]
    yield [
        f"resident memory with {count:,} open streams",
        "",
        *(_size(c.open_mib, "MiB") for c in found.memory.values()),
    ]
    yield ["memory of a stream", "", *(_size(stream_kib(c), "KiB") for c in found.memory.values())]


def _size(size: float | None, unit: str) -> str:
    return "not all began in 60 s" if size is None else f"{size:.0f} {unit}"


def _told(
    blocks: Sequence[Mapping[str, Cell]],
    name: str,
    figure: Callable[[Cell], float],
    digits: int,
    unit: str,
) -> str:
    return spread(figure(block[name]) for block in blocks).text(digits, unit)

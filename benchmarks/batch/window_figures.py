"""Figures of the modes, and the section of the page: pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from proxy_figures import Spread, percentile, spread
from results_page import markdown_table
from window_modes import TIER, UNLIMITED

from fleetkeeper_contract.histogram_buckets import QUEUE_WAIT_EDGES_S
from fleetkeeper_local.load.open_loop import Sample
from fleetkeeper_local.load.schedule import Arrival

PROCESS = "batch process"
THROUGHPUT_GOAL = 0.9
BEFORE_SHORT, BEFORE_LONG = "0.83 (0.79 to 1.03)", "0.91 (0.91 to 1.07)"
BEFORE_WAIT = "15 ms (1 to 15)"
"""Of the process whose queue was by lines, in RESULTS.md of its time."""
WAIT_FACTOR, WAIT_MORE_S = 1.1, 0.020
TOKEN_GOAL_S = 0.050
"""The default of objectives.batchTimeMilliseconds."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One mode in one block. Latencies count from when a line was due."""

    tokens_per_s: float
    p50_s: float
    p99_s: float
    failed: int


@dataclass(frozen=True, slots=True)
class Realtime:
    """Realtime requests in one block, beside batch or alone."""

    first_p50_s: float
    """Time to first token at the client."""
    first_p99_s: float
    wait_mean_s: float
    """Queue wait as the scheduler measured it."""
    wait_p99_s: float
    """The same, interpolated within its bucket."""
    token_p50_s: float
    """Time per output token of a request, after the first."""
    token_p99_s: float
    failed: int
    lines_per_s: float = 0.0
    """Of batch, beside them."""


def cell_of(arrivals: Sequence[Arrival], samples: Sequence[Sample]) -> Cell:
    """Return the figures of a mode.

    Raises:
        ValueError: if no line was answered.
    """
    latencies = [sample.latency_s for sample in samples if sample.outcome.ok]
    tokens = sum(arrival.output_tokens for arrival in arrivals)
    failed = len(samples) - len(latencies)
    took_s = max(sample.ended_s for sample in samples)
    return Cell(
        # Tokens of lines that failed are not known. Then the figure is of no use, and failed says so.
        tokens * len(latencies) / len(samples) / took_s,
        percentile(latencies, 0.5),
        percentile(latencies, 0.99),
        failed,
    )


def bucket_p99_s(before: Sequence[int], after: Sequence[int]) -> float:
    """Return the P99 of what was counted in between, interpolated within its bucket.

    Raises:
        ValueError: if nothing was counted.
    """
    counts = [new - old for new, old in zip(after, before, strict=True)]
    rank = 0.99 * sum(counts)
    if not rank:
        raise ValueError("no realtime request was scheduled")
    seen, lower = 0, 0.0
    # What is above the highest edge counts as that edge.
    for count, edge in zip(counts, (*QUEUE_WAIT_EDGES_S, QUEUE_WAIT_EDGES_S[-1]), strict=True):
        if seen + count >= rank:
            return lower + (edge - lower) * (rank - seen) / count
        seen, lower = seen + count, edge
    return lower


@dataclass(frozen=True)
class Found:
    """All blocks."""

    offline: list[dict[str, Cell]]
    """All lines are there at the start."""
    arriving: list[dict[str, Cell]]
    """Lines arrive below the capacity."""
    realtime: list[dict[str, Realtime]]
    lines: int
    rate_per_s: list[float]
    """Of the arriving lines, in each block."""
    long: Sequence[dict[str, Cell]] = ()
    """As `offline`, with more lines."""


def page(found: Found) -> str:
    """Return the section in Markdown."""
    failed = sum(
        cell.failed
        for blocks in (found.offline, found.arriving)
        for b in blocks
        for cell in b.values()
    )
    failed += sum(cell.failed for block in found.realtime for cell in block.values())
    return "\n\n".join(
        [
            f"**{found.lines} lines that are all there at the start.** Ratios are of one block.",
            _offline(found.offline),
            _throughput_goal(found.offline),
            (
                f"**Lines that arrive** at {spread(found.rate_per_s).text(1)} a second, about 0.7 times "
                "what the unlimited client had answered. Latency counts from their arrival."
            ),
            _arriving(found.arriving),
            "**Realtime requests** without batch, and beside a full queue of the batch tier.",
            _realtime(found.realtime),
            _wait_goal(found.realtime),
            _token_goal(found.realtime),
            f"{failed} requests failed.",
        ]
    )


def process_page(found: Found) -> str:
    """Return the section about the batch process in Markdown."""
    blocks = (*found.offline, *found.long)
    failed = sum(cell.failed for block in blocks for cell in block.values())
    failed += sum(cell.failed for block in found.realtime for cell in block.values())
    return "\n\n".join(
        [
            f"**{found.lines} lines that are all there at the start.** Ratios are of one block.",
            _offline(found.offline),
            f"{_throughput_goal(found.offline)} Before: {BEFORE_SHORT}.",
            "**Long batches**, which are all there at the start.",
            _offline(found.long),
            f"{_throughput_goal(found.long)} Before: {BEFORE_LONG}.",
            "**Realtime requests** without batch, and beside a full queue of the batch tier.",
            _realtime(found.realtime),
            f"{_wait_goal(found.realtime)} Before: {BEFORE_WAIT}.",
            _token_goal(found.realtime),
            f"{failed} requests failed.",
        ]
    )


def _offline(blocks: Sequence[Mapping[str, Cell]]) -> str:
    rows = []
    for name in blocks[0]:
        share = spread(block[name].tokens_per_s / block[UNLIMITED].tokens_per_s for block in blocks)
        rows.append(
            [
                name,
                _over(blocks, name, lambda cell: cell.tokens_per_s).text(0),
                share.text(2),
                _over(blocks, name, lambda cell: cell.p50_s).text(2, " s"),
                _over(blocks, name, lambda cell: cell.p99_s).text(2, " s"),
            ]
        )
    head = ["", "tokens/s", f"of the {UNLIMITED}", "latency P50", "latency P99"]
    return markdown_table(head, rows)


def _arriving(blocks: Sequence[Mapping[str, Cell]]) -> str:
    rows = [
        [
            name,
            _over(blocks, name, lambda cell: cell.p50_s).text(2, " s"),
            _over(blocks, name, lambda cell: cell.p99_s).text(2, " s"),
            spread(block[name].p50_s / block[TIER].p50_s for block in blocks).text(2),
        ]
        for name in blocks[0]
    ]
    return markdown_table(["", "latency P50", "latency P99", f"P50 of the {TIER}"], rows)


def _realtime(blocks: Sequence[Mapping[str, Realtime]]) -> str:
    rows = []
    for name in blocks[0]:
        figures: list[tuple[Callable[[Realtime], float], int, str]] = [
            (lambda cell: cell.first_p50_s * 1e3, 0, " ms"),
            (lambda cell: cell.first_p99_s * 1e3, 0, " ms"),
            (lambda cell: cell.wait_mean_s * 1e3, 1, " ms"),
            (lambda cell: cell.wait_p99_s * 1e3, 0, " ms"),
            (lambda cell: cell.token_p50_s * 1e3, 0, " ms"),
            (lambda cell: cell.token_p99_s * 1e3, 0, " ms"),
            (lambda cell: cell.lines_per_s, 1, ""),
        ]
        rows.append(
            [
                name,
                *(
                    spread(figure(block[name]) for block in blocks).text(digits, unit)
                    for figure, digits, unit in figures
                ),
            ]
        )
    head = [
        "",
        "TTFT P50",
        "TTFT P99",
        "queue wait, mean",
        "queue wait P99",
        "TPOT P50",
        "TPOT P99",
        "batch lines/s",
    ]
    return markdown_table(head, rows)


ALONE, AGAIN, BESIDE = "realtime alone", "realtime alone, again", "realtime beside batch"


def _throughput_goal(blocks: Sequence[Mapping[str, Cell]]) -> str:
    name = PROCESS if PROCESS in blocks[0] else TIER
    share = spread(block[name].tokens_per_s / block[UNLIMITED].tokens_per_s for block in blocks)
    met = share.median >= THROUGHPUT_GOAL
    return (
        f"Goal: the {name} has at least {THROUGHPUT_GOAL} times the tokens a second of the {UNLIMITED}: "
        f"{share.text(2)}, {_judged(met=met)}."
    )


def _wait_goal(blocks: Sequence[Mapping[str, Realtime]]) -> str:
    def above(name: str) -> Spread:
        return spread(
            1e3 * (block[name].wait_p99_s - WAIT_FACTOR * block[ALONE].wait_p99_s)
            for block in blocks
        )

    over = above(BESIDE)
    met = over.median <= WAIT_MORE_S * 1e3
    return (
        f"Goal: queue wait P99 beside batch is at most {WAIT_FACTOR} times that alone and "
        f"{WAIT_MORE_S * 1e3:.0f} ms more. What is above {WAIT_FACTOR} times: {over.text(0, ' ms')}, "
        f"{_judged(met=met)}. A second run alone has {above(AGAIN).text(0, ' ms')}."
    )


def _token_goal(blocks: Sequence[Mapping[str, Realtime]]) -> str:
    beside = spread(1e3 * block[BESIDE].token_p50_s for block in blocks)
    met = beside.median <= TOKEN_GOAL_S * 1e3
    return (
        f"Goal: time per output token (TPOT) beside batch is at most {TOKEN_GOAL_S * 1e3:.0f} ms, the default of "
        f"`batchTimeMilliseconds`. Its median: {beside.text(0, ' ms')}, {_judged(met=met)}. No operator "
        "lowers the limits here."
    )


def _judged(*, met: bool) -> str:
    return "met" if met else "**missed**"


def _over(
    blocks: Sequence[Mapping[str, Cell]], name: str, figure: Callable[[Cell], float]
) -> Spread:
    return spread(figure(block[name]) for block in blocks)

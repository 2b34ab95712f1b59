"""Measured and simulated figures side by side: errors, goals, and the tables of the page. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from replayed_load import Figures
from results_page import markdown_table

THROUGHPUT_ERROR: Final = 0.15
WAIT_ERROR: Final = 0.25
WAIT_ERROR_S: Final = 0.05
"""A queue wait is close enough within either."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A load as it was measured and as it was simulated.

    `engine_ttft_s`, `engine_itl_s`: measured by the engine, without the client's part.
    """

    measured: Figures
    simulated: Figures
    engine_ttft_s: float
    engine_itl_s: float


def error_of(measured: float, simulated: float) -> float:
    """Return the relative error of the simulation with its sign; 0 if both are 0.

    >>> error_of(2.0, 1.5)
    -0.25
    """
    if measured == simulated:
        return 0.0
    return simulated / measured - 1.0 if measured else float("inf")


def throughput_met(pairs: Sequence[Pair]) -> bool:
    """Return whether the median error of requests/s and of tokens/s over the rounds is small enough."""
    return all(
        abs(_median_error(pairs, figure)) <= THROUGHPUT_ERROR
        for figure in (lambda row: row.requests_per_s, lambda row: row.tokens_per_s)
    )


def wait_met(pairs: Sequence[Pair]) -> bool:
    """Return whether the queue wait is close enough: the median over the rounds of its error."""
    relative = abs(_median_error(pairs, lambda row: row.queue_wait_s))
    return relative <= WAIT_ERROR or abs(_median_wait_error_s(pairs)) <= WAIT_ERROR_S


def _median_wait_error_s(pairs: Sequence[Pair]) -> float:
    return median(row.simulated.queue_wait_s - row.measured.queue_wait_s for row in pairs)


def _median_error(pairs: Sequence[Pair], figure: Callable[[Figures], float]) -> float:
    return median(error_of(figure(row.measured), figure(row.simulated)) for row in pairs)


Row = tuple[str, float, str, Callable[[Pair], float], Callable[[Pair], float]]
"""Name, factor to the shown unit, format, measured and simulated value."""

ROWS: Final[Sequence[Row]] = (
    (
        "requests/s",
        1.0,
        ".2f",
        lambda p: p.measured.requests_per_s,
        lambda p: p.simulated.requests_per_s,
    ),
    (
        "tokens/s",
        1.0,
        ".0f",
        lambda p: p.measured.tokens_per_s,
        lambda p: p.simulated.tokens_per_s,
    ),
    (
        "queue wait, ms",
        1e3,
        ".0f",
        lambda p: p.measured.queue_wait_s,
        lambda p: p.simulated.queue_wait_s,
    ),
    ("TTFT by client, ms", 1e3, ".0f", lambda p: p.measured.ttft_s, lambda p: p.simulated.ttft_s),
    ("TTFT by engine, ms", 1e3, ".0f", lambda p: p.engine_ttft_s, lambda p: p.simulated.ttft_s),
    ("TPOT by client, ms", 1e3, ".1f", lambda p: p.measured.tpot_s, lambda p: p.simulated.tpot_s),
    ("ITL by engine, ms", 1e3, ".1f", lambda p: p.engine_itl_s, lambda p: p.simulated.itl_s),
    (
        "batch time, ms",
        1e3,
        ".1f",
        lambda p: p.measured.batch_time_s,
        lambda p: p.simulated.batch_time_s,
    ),
    (
        "sequences per step",
        1.0,
        ".2f",
        lambda p: p.measured.sequences,
        lambda p: p.simulated.sequences,
    ),
    (
        "time in steps, %",
        100.0,
        ".0f",
        lambda p: p.measured.busy_ratio,
        lambda p: p.simulated.busy_ratio,
    ),
)


def errors_table(loads: Mapping[str, Sequence[Pair]]) -> str:
    """Return measured and simulated figures: medians over the rounds, and the errors' range."""
    rows = [
        [
            name,
            *(
                _cell(
                    [unit * measured(pair) for pair in pairs],
                    [unit * simulated(pair) for pair in pairs],
                    form,
                )
                for pairs in loads.values()
            ),
        ]
        for name, unit, form, measured, simulated in ROWS
    ]
    return markdown_table(["measured, simulated: error", *loads], rows)


def _cell(measured: Sequence[float], simulated: Sequence[float], form: str) -> str:
    """Return the medians and the median error; with several rounds, also its lowest and highest.

    >>> _cell([2.0, 4.0, 3.0], [2.0, 3.0, 3.0], ".1f")
    '3.0, 3.0: +0% (-25% to +0%)'
    """
    errors = [error_of(a, b) for a, b in zip(measured, simulated, strict=True)]
    text = f"{median(measured):{form}}, {median(simulated):{form}}: {median(errors):+.0%}"
    return text if len(errors) == 1 else f"{text} ({min(errors):+.0%} to {max(errors):+.0%})"


def goals_table(loads: Mapping[str, Sequence[Pair]]) -> str:
    """Return for each load whether the goals are met."""
    rows = [
        [
            load,
            f"{_median_error(pairs, lambda row: row.requests_per_s):+.1%}",
            f"{_median_error(pairs, lambda row: row.tokens_per_s):+.1%}",
            _verdict(throughput_met(pairs)),
            f"{_median_error(pairs, lambda row: row.queue_wait_s):+.0%}",
            f"{1e3 * _median_wait_error_s(pairs):+.0f} ms",
            _verdict(wait_met(pairs)),
        ]
        for load, pairs in loads.items()
    ]
    headings = [
        "load",
        "requests/s",
        "tokens/s",
        f"within {THROUGHPUT_ERROR:.0%}",
        "mean queue wait",
        "difference",
        f"within {WAIT_ERROR:.0%} or {1e3 * WAIT_ERROR_S:.0f} ms",
    ]
    return markdown_table(headings, rows)


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"

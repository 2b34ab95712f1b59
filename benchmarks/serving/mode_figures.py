"""Figures of the three ways to send requests, and their ratios within one round: pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from results_page import markdown_table

from fleetkeeper_local.load.summary import quantile

REFUSED = "http_429"
UNAVAILABLE = "http_503"
TIMED_OUT = "timeout"


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: times in seconds since the start of its phase. `cause` is empty if it succeeded."""

    tier: str
    intended_s: float
    ended_s: float
    cause: str

    @property
    def latency_s(self) -> float:
        """Time from the intended send to the response."""
        return self.ended_s - self.intended_s


@dataclass(frozen=True, slots=True)
class Cell:
    """One mode at one load in one round. Quantiles cover the requests that succeeded."""

    offered_per_s: float
    answered_per_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    refused_ratio: float
    unavailable_ratio: float
    timed_out_ratio: float
    other_ratio: float


def cell_of(answers: Sequence[Answer], warm_s: float, end_s: float, tier: str = "") -> Cell:
    """Return the figures of a phase, of one tier if it is named.

    Rates count what arrived, or was answered, from `warm_s` to `end_s`. Quantiles and shares cover
    the requests that were due in that time, however long they took.

    Raises:
        ValueError: no request was due in that time.
    """
    mine = [answer for answer in answers if tier in ("", answer.tier)]
    due = [answer for answer in mine if warm_s <= answer.intended_s < end_s]
    if not due:
        raise ValueError(
            f"no request{' of ' + tier if tier else ''} between {warm_s} and {end_s} s"
        )
    seconds = end_s - warm_s
    latencies = [answer.latency_s for answer in due if not answer.cause]
    causes = Counter(answer.cause for answer in due if answer.cause)
    refused, unavailable, timed_out = (
        causes.pop(cause, 0) / len(due) for cause in (REFUSED, UNAVAILABLE, TIMED_OUT)
    )
    p50, p95, p99 = (_quantile(latencies, share) for share in (0.50, 0.95, 0.99))
    return Cell(
        offered_per_s=len(due) / seconds,
        answered_per_s=sum(not row.cause and warm_s <= row.ended_s < end_s for row in mine)
        / seconds,
        p50_s=p50,
        p95_s=p95,
        p99_s=p99,
        refused_ratio=refused,
        unavailable_ratio=unavailable,
        timed_out_ratio=timed_out,
        other_ratio=sum(causes.values()) / len(due),
    )


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile; infinity if there are no values, because nobody was answered."""
    found = quantile(values, share)
    return math.inf if found is None else found


def median_cell(cells: Iterable[Cell]) -> Cell:
    """Return the median of each figure."""
    rows = list(cells)
    return Cell(*(median(getattr(row, name) for row in rows) for name in Cell.__slots__))


Rounds = Sequence[dict[str, Cell]]
"""For each round, the cell of each mode at one load."""


def ratios_of(rounds: Rounds, mode: str, base: str, figure: Callable[[Cell], float]) -> list[float]:
    """Return a figure of a mode relative to another mode, one ratio for each round."""
    return [figure(cells[mode]) / figure(cells[base]) for cells in rounds]


def spread(ratios: Sequence[float]) -> str:
    """Return the median of ratios with the lowest and the highest.

    >>> spread([1.0, 1.3, 1.1])
    '1.10 (1.00 to 1.30)'
    """
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def mode_rows(name: str, rounds: Rounds, base: str) -> list[list[str]]:
    """Return one row for each mode at a load: medians, and ratios to the mode `base`."""
    rows = []
    for mode in rounds[0]:
        cell = median_cell(cells[mode] for cells in rounds)
        rate = ratios_of(rounds, mode, base, lambda found: found.answered_per_s)
        tail = ratios_of(rounds, mode, base, lambda found: found.p99_s)
        rows.append(
            [
                name,
                mode,
                f"{cell.answered_per_s:.1f} of {cell.offered_per_s:.1f}",
                *_times(cell),
                *_failures(cell),
                *(["1", "1"] if mode == base else [spread(rate), spread(tail)]),
            ]
        )
    return rows


def _times(cell: Cell) -> list[str]:
    return [f"{1e3 * value:.0f}" for value in (cell.p50_s, cell.p95_s, cell.p99_s)]


def _failures(cell: Cell) -> list[str]:
    shares = (cell.refused_ratio, cell.unavailable_ratio, cell.timed_out_ratio, cell.other_ratio)
    return [f"{100 * share:.1f}%" if share else "0" for share in shares]


def mode_table(loads: dict[str, Rounds], base: str) -> str:
    """Return the table of all loads and modes."""
    headings = ["load", "mode", "requests/s answered", "P50 ms", "P95 ms", "P99 ms"]
    headings += ["429", "503", "timeout", "other"]
    headings += [f"requests/s, ratio to {base}", f"P99, ratio to {base}"]
    return markdown_table(
        headings, [row for name, rounds in loads.items() for row in mode_rows(name, rounds, base)]
    )


def tier_table(tiers: dict[str, Rounds]) -> str:
    """Return the table of the tiers at one load."""
    headings = ["tier", "mode", "requests/s answered", "P50 ms", "P95 ms", "P99 ms"]
    headings += ["429", "503", "timeout", "other"]
    rows = []
    for tier, rounds in tiers.items():
        for mode in rounds[0]:
            cell = median_cell(cells[mode] for cells in rounds)
            rate = f"{cell.answered_per_s:.1f} of {cell.offered_per_s:.1f}"
            rows.append([tier, mode, rate, *_times(cell), *_failures(cell)])
    return markdown_table(headings, rows)

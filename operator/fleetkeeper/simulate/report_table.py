"""The report for a terminal: tables with one row per alternative, the spread over the seeds below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fleetkeeper.simulate.comparison import Result
from fleetkeeper.simulate.report import (
    COST,
    CPU,
    LATENCY,
    SERVICE,
    Column,
    Report,
    spread_text,
    value_text,
)
from fleetkeeper.simulate.report_batch import TITLES, batch_rows

FIRST = "ALTERNATIVE"


def report_tables(report: Report) -> Group:
    """Return the whole report. A cell has the median, and below it the range over the seeds."""
    parts: list[RenderableType] = [Text(report.headline, style="bold"), Text(report.target_text)]
    parts += [Text(f"note: {note}", style="yellow") for note in report.notes]
    if report.setting.seeds > 1:
        parts.append(Text("Medians over the seeds, with min..max.", style="dim"))
    for columns in (SERVICE, COST, LATENCY):
        parts += [Text(), _table(columns, report.results)]
    if any(result.batch is not None for result in report.results):
        parts += [Text(), _batches(report.results)]
    tiers = _tiers(report.results)
    if tiers is not None:
        parts += [Text(), tiers]
    parts += [Text(), _table(CPU, report.results)]
    return Group(*parts)


def _new_table(titles: Sequence[str]) -> Table:
    """Return an empty table. Titles of two words take two lines, so that columns are narrow."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(FIRST, no_wrap=True)
    for title in titles:
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    return table


def _name(result: Result) -> str:
    """Return the name, a what-if below the autoscaler."""
    return result.name.replace(" ", "\n")


def _table(columns: Sequence[Column], results: Sequence[Result]) -> Table:
    table = _new_table([column.title for column in columns])
    for result in results:
        table.add_row(_name(result), *_cells(columns, result))
    return table


def _cells(columns: Sequence[Column], result: Result) -> Iterator[Text]:
    for column in columns:
        spread = result.figures[column.figure]
        cell = Text(value_text(spread.median, column.form))
        more = spread_text(spread, column.form)
        if more:
            cell.append(f"\n{more}", style="dim")
        yield cell


def _batches(results: Sequence[Result]) -> Table:
    """Return the end and the cost of each batch."""
    table = _new_table(tuple(TITLES))
    for number, _, cells in batch_rows(results):
        table.add_row(_name(results[number]), *cells)
    return table


def _tiers(results: Sequence[Result]) -> Table | None:
    """Return the SLO attainment and the refusals of each tier; None if there is only one tier."""
    used = [tier for tier, figures in results[0].tiers.items() if figures["requests"].most > 0]
    if len(used) < 2:
        return None
    table = _new_table(
        [f"{tier.upper()} {what}" for tier in used for what in ("ATTAINMENT", "REFUSED")]
    )
    for result in results:
        cells = []
        for tier in used:
            figures = result.tiers[tier]
            cells.append(value_text(figures["slo_attainment"].median, "percent"))
            cells.append(value_text(figures["refused"].median, "whole"))
        table.add_row(_name(result), *cells)
    return table

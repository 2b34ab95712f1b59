"""The report for a terminal: tables with the spread over the seeds below each figure."""

from __future__ import annotations

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from fleetkeeper.simulate.report.report import FleetReport, Report
from fleetkeeper.simulate.report.tables import Cell, Table, tables_of, total_table


def fleet_tables(fleet: FleetReport) -> Group:
    """Return the totals of several services, and the report of each."""
    reports = [part for report in fleet.reports for part in (Text(), report_tables(report))]
    head = Text(fleet.headline, style="bold")
    return Group(head, Text(), drawn_table(total_table(fleet.totals)), *reports)


def report_tables(report: Report) -> Group:
    """Return the whole report. A cell has the median, and below it the range over the seeds."""
    parts: list[RenderableType] = [
        Text(report.headline, style="bold"),
        Text(report.verdict, style="bold"),
        Text(report.target_text),
    ]
    parts += [Text(f"note: {note}", style="yellow") for note in report.notes]
    if report.setting.seeds > 1:
        parts.append(Text("Medians over the seeds, with min..max.", style="dim"))
    for table in tables_of(report.results):
        parts += [Text(), drawn_table(table)]
        more = len(table.rows) - len(table.rows[: table.max_rows])
        if more:
            parts.append(Text(f"and {more} more: --html and --json have all", style="dim"))
    return Group(*parts)


def drawn_table(table: Table) -> RichTable:
    """Return the table. Titles of two words take two lines, so that columns are narrow."""
    drawn = RichTable(box=None, pad_edge=False, header_style="bold")
    drawn.add_column(table.first, no_wrap=True)
    for head in table.heads:
        justify: JustifyMethod = "left" if head.is_text else "right"
        drawn.add_column(head.title.replace(" ", "\n"), justify=justify, no_wrap=not head.is_text)
    for row in table.rows[: table.max_rows]:
        # A what-if stands below the autoscaler.
        drawn.add_row(Text(row.name.replace(" ", "\n")), *map(_text, row.cells))
    return drawn


def _text(cell: Cell) -> Text:
    text = Text(cell.text, no_wrap=True, overflow="ellipsis")
    return text.append(f"\n{cell.spread}" if cell.spread else "", style="dim")

"""`fleetkeeper usage`: print the tokens that the engines counted, by key, model, tier and service."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleetkeeper.commands.fleet.top import OperatorNamespace
from fleetkeeper.commands.keys.usage_source import UsageError, read_from_cluster, read_from_url
from fleetkeeper.exit_codes import ExitCode, stop
from fleetkeeper_contract import rfc3339
from fleetkeeper_contract.usage_files import (
    COUNTS,
    BadUsageQueryError,
    Report,
    file_of,
    hours_of_files,
    lines_of,
    parse_dimensions,
)

UNITS: Final = {"m": 60, "h": 3600, "d": 86_400}
AGO: Final = re.compile(r"(\d{1,6})([mhd])")
KINDS: Final = ("unattributed", "lost")


def usage(
    *,
    since: Annotated[
        str,
        typer.Option("--since", help="Begin: 30d, 12h, or an RFC 3339 time. Whole hours count."),
    ] = "30d",
    until: Annotated[
        str, typer.Option("--until", help="End, in the same form. Default: now.")
    ] = "",
    by: Annotated[
        str, typer.Option("--by", help="Some of key, model, tier and service, comma-separated.")
    ] = "key,model",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Read a directory with files of usage instead of the cluster."),
    ] = None,
    url: Annotated[
        str,
        typer.Option("--url", help="URL of the usage process, for example of a port-forward."),
    ] = "",
    operator_namespace: OperatorNamespace = "fleetkeeper-system",
) -> None:
    """Show the tokens that engines counted, by the keys of the gateway's clients.

    Tokens of requests that came without a grant, such as those of the supervisors, are unattributed.
    Lost tokens were counted by an engine and not read in time. The three together are what the
    engines' own counters say.

    \b
    Examples:
      fleetkeeper usage --since 30d --by key,model
      fleetkeeper usage --since 7d --by key,tier --csv
      fleetkeeper usage --dir /var/lib/fleetkeeper-usage --json
    """  # noqa: D301 - \b keeps the lines of the examples apart
    now = time.time()
    if as_csv and as_json:
        stop(ExitCode.USAGE, "--csv and --json exclude each other")
    try:
        dimensions = parse_dimensions(by)
        begin, end = parse_when("since", since, now), parse_when("until", until or "0m", now)
    except BadUsageQueryError as problem:
        stop(ExitCode.USAGE, f"--{problem}")
    query = {"since": f"{begin:.0f}", "until": f"{end:.0f}", "by": ",".join(dimensions)}
    try:
        if directory is not None:
            found = read_directory(directory, begin, end, dimensions)
        elif url:
            found = read_from_url(url, query)
        else:
            found = read_from_cluster(operator_namespace, query)
    except UsageError as problem:
        stop(ExitCode.FAILED, str(problem))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif as_csv:
        typer.echo(csv_text(found, dimensions), nl=False)
    else:
        Console().print(usage_table(found, dimensions))


def parse_when(name: str, text: str, now: float) -> float:
    """Return the Unix seconds of a time: 30d ago, or in RFC 3339.

    Raises:
        BadUsageQueryError: if it is neither.
    """
    if match := AGO.fullmatch(text):
        return max(0.0, now - int(match[1]) * UNITS[match[2]])
    found = rfc3339.parse(text)
    if found is None:
        raise BadUsageQueryError(
            f"{name} is {text!r}; it must be a number of minutes, hours or days such as 30d, "
            "or a time such as 2026-11-25T23:00:00Z"
        )
    return found


def read_directory(
    directory: Path, since: float, until: float, by: tuple[str, ...]
) -> dict[str, Any]:
    """Return the usage in the files of a directory.

    Raises:
        UsageError: they cannot be read.
    """
    report = Report(since, until, by)
    try:
        for hour in hours_of_files(path.name for path in directory.iterdir()):
            with (directory / file_of(hour)).open("rb") as file:
                for line in lines_of(file):
                    report.add(line)
    except (OSError, ValueError) as problem:
        raise UsageError(f"cannot read the files of usage in {directory}: {problem}") from problem
    return report.document()


def rows_of(found: Mapping[str, Any], by: Iterable[str]) -> list[list[Any]]:
    """Return rows with their kind, the dimensions and the counts."""
    dimensions = list(by)
    rows = [
        ["attributed", *(row[name] for name in dimensions), *(row[name] for name in COUNTS)]
        for row in found["rows"]
    ]
    for kind in KINDS:
        counts = {"requests": found[kind].get("entries", 0), "aborted": 0, **found[kind]}
        rows.append([kind, *("" for _ in dimensions), *(counts[name] for name in COUNTS)])
    return rows


def csv_text(found: Mapping[str, Any], by: Iterable[str]) -> str:
    """Return the rows as CSV with a header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["kind", *by, *COUNTS])
    for row in rows_of(found, by):
        writer.writerow([_inert(cell) for cell in row])
    return text.getvalue()


def usage_table(found: Mapping[str, Any], by: Iterable[str]) -> Table:
    """Return the rows as a table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("kind", *by):
        table.add_column(name.upper(), no_wrap=True)
    for name in COUNTS:
        table.add_column(name.upper(), justify="right", no_wrap=True)
    for kind, *cells in rows_of(found, by):
        table.add_row(kind, *map(_shown, cells), style="" if kind == "attributed" else "dim")
    return table


def _shown(cell: object) -> Text:
    """Return a cell without markup and control characters: an engine may name its model so."""
    text = f"{cell:,}" if isinstance(cell, int) else str(cell)
    return Text("".join(letter if letter.isprintable() else "?" for letter in text))


def _inert(cell: object) -> object:
    """Return a cell that a spreadsheet does not take for a formula: an engine may name its model so."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in {"=", "+", "-", "@"} else cell

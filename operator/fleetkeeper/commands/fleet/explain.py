"""`fleetkeeper explain NAME`: show the last decisions for a service, with reasons and figures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleetkeeper.commands.fleet.top import MetricsUrl, OperatorNamespace
from fleetkeeper.exit_codes import ExitCode, stop
from fleetkeeper.fleet.explanation import (
    Row,
    change_rows,
    decision_rows,
    evidence_rows,
    replica_rows,
    trouble_rows,
)
from fleetkeeper.fleet.source import FleetError, FleetSource
from fleetkeeper.fleet.view import views_of


def _grid(title: str, rows: Iterator[Row]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=False, min_width=34)
    table.add_column()
    table.show_header = False
    for left, right in rows:
        table.add_row(left, Text(right))
    return table


def explain(
    name: Annotated[str, typer.Argument(help="Name of the InferenceService.")],
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="Namespace of the InferenceService.")
    ] = "default",
    operator_namespace: OperatorNamespace = "fleetkeeper-system",
    metrics: MetricsUrl = "",
) -> None:
    """Explain the last decisions for a service, with reasons and figures.

    \b
    Examples:
      fleetkeeper explain chat -n team-a
    """  # noqa: D301 - \b keeps the lines of the examples apart
    try:
        fleet = FleetSource(operator_namespace, metrics).read_fleet(namespace)
    except FleetError as problem:
        stop(ExitCode.FAILED, str(problem))
    view = next((v for v in views_of(fleet.services, fleet.gauges) if v.name == name), None)
    if view is None:
        known = ", ".join(sorted(item["metadata"]["name"] for item in fleet.services)) or "none"
        stop(
            ExitCode.FAILED,
            f"InferenceService {name} not found in namespace {namespace}; found: {known}",
        )
    console = Console()
    console.print(_grid(f"{view.title}: current state", decision_rows(view)))
    console.print(_grid("\nMeasurements", evidence_rows(view)))
    if fleet.remark:
        console.print(Text(fleet.remark, style="yellow"))
    troubles = list(trouble_rows(view))
    if troubles:
        console.print(_grid("\nProblems", iter(troubles)))
    now = time.time()
    replicas = list(replica_rows(view, now))
    if replicas:
        console.print(_grid("\nReplicas that are not ready", iter(replicas)))
    console.print(_grid("\nLast decisions, newest first", change_rows(view, now)))

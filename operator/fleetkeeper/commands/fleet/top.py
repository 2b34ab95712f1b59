"""`fleetkeeper top`: show a live overview of the fleet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fleetkeeper.exit_codes import ExitCode, stop
from fleetkeeper.fleet.source import Fleet, FleetError, FleetSource
from fleetkeeper.fleet.view import (
    Measured,
    ServiceView,
    age_in_words,
    in_milliseconds,
    latency_in_milliseconds,
    views_of,
)

Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Namespace to show. Default: all namespaces."),
]
OperatorNamespace = Annotated[
    str, typer.Option("--operator-namespace", help="Namespace of the operator.")
]
MetricsUrl = Annotated[
    str,
    typer.Option("--metrics", help="URL of the operator's metrics, if it does not run as a pod."),
]

COLUMNS = (
    "SERVICE",
    "READY/WANTED",
    "QUEUE WAIT",
    "BATCH TIME",
    "TTFT",
    "ITL",
    "SEQUENCES",
    "TOKENS",
    "BREAKER",
    "LAST DECISION",
)


def _figure(measured: Measured) -> Text:
    style = "bold red" if measured.is_broken else "green" if measured.value_s is not None else "dim"
    return Text(in_milliseconds(measured), style=style)


def _readiness(view: ServiceView) -> Text:
    is_ready = view.conditions.get("Ready", {}).get("status") == "True"
    ready = view.ready.split("/")[0]
    state = f" {view.sleep.shown_state}" if is_ready and view.sleep.state is not None else ""
    return Text(f"{ready}/{view.wanted}{state}", style="green" if is_ready else "yellow")


def _last_change(view: ServiceView, now: float) -> Text:
    if not view.changes:
        return Text("-", style="dim")
    last = view.changes[-1]
    return Text(f"{age_in_words(last.time, now)} ago: {last.in_words()}")


def fleet_table(views: Sequence[ServiceView], now: float) -> Table:
    """Return a table with one row per service. Measurements above their objective are red."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, no_wrap=column != "LAST DECISION")
    for view in views:
        closed = view.breaker.lower() in {"closed", "-"}
        table.add_row(
            view.title,
            _readiness(view),
            _figure(view.queue_wait),
            _figure(view.batch_time),
            latency_in_milliseconds(view.ttft_s),
            latency_in_milliseconds(view.itl_s),
            view.sequences,
            view.tokens,
            Text(view.breaker, style="" if closed else "bold red"),
            _last_change(view, now),
        )
    return table


def top(
    namespace: Namespace = None,
    operator_namespace: OperatorNamespace = "fleetkeeper-system",
    metrics: MetricsUrl = "",
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.5, help="Seconds between two updates.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the overview once and exit.")] = False,
) -> None:
    """Show a live overview of services: queue wait, batch time, objectives, limits, and breakers.

    TTFT (time to first token) and ITL (inter-token latency) are means of the streamed answers of
    the last half minute, of realtime and standard requests (of batch requests if there are no others).

    \b
    Examples:
      fleetkeeper top
      fleetkeeper top -n team-a --once
    """  # noqa: D301 - \b keeps the lines of the examples apart
    source = FleetSource(operator_namespace, metrics)
    console = Console()

    def rendered(fleet: Fleet, problem: str = "") -> Group:
        now = time.time()
        views = views_of(fleet.services, fleet.gauges, lambda view: fleet_table([view], now))
        table = fleet_table(views, now)
        remarks = [Text(text, style="yellow") for text in (problem, fleet.remark) if text]
        if not fleet.services:
            remarks.append(Text("no InferenceServices found", style="dim"))
        return Group(table, *remarks)

    try:
        fleet = source.read_fleet(namespace)
    except FleetError as problem:
        stop(ExitCode.FAILED, str(problem))
    if once:
        console.print(rendered(fleet))
        return
    read_s = time.time()
    with Live(rendered(fleet), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval_s)
                trouble = ""
                try:
                    fleet, read_s = source.read_fleet(namespace), time.time()
                except FleetError as problem:
                    trouble = f"{problem}; the table is {time.time() - read_s:.0f} s old"
                live.update(rendered(fleet, trouble), refresh=True)
        except KeyboardInterrupt:
            return

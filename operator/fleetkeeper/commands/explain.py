"""`fleetkeeper explain NAME`: why the fleet is as it is, with the numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleetkeeper.commands.exit_codes import ExitCode, stop
from fleetkeeper.commands.fleet_source import FleetSource
from fleetkeeper.commands.fleet_view import (
    ServiceView,
    age_in_words,
    in_milliseconds,
    views_of,
)
from fleetkeeper.commands.top import MetricsUrl, OperatorNamespace
from fleetkeeper.plan.control.fragmentation import RestartReason

Row = tuple[str, str]

SHARES = (
    ("KV cache used", "signal_kv_ratio"),
    ("Replicas that report", "signal_coverage_ratio"),
    ("Allocator unused (worst replica)", "signal_fragmentation_ratio"),
)
COUNTS = (
    ("Arrivals a second", "signal_arrivals_per_second"),
    ("Waiting", "signal_waiting"),
    ("Running", "signal_running"),
    ("A replica carries (sequences)", "model_capacity_sequences"),
    ("Pressure (1 = at an objective)", "pressure_ratio"),
)
GOOD_WHEN_FALSE = frozenset({"Degraded", "ScalingLimited", "Progressing", "Reconciling", "Stalled"})


def _decision(view: ServiceView, section: str, what: str) -> Row:
    part = view.status.get(section) or {}
    if not part:
        return what, "nothing decided yet"
    why = part.get("message") or part.get("reason") or ""
    return what, f"{part.get('reason', '')}: {why}" if why != part.get("reason") else why


def evidence_rows(view: ServiceView) -> Iterator[Row]:
    """The figures that decide, as they were at the last tick."""
    yield "Queue wait (now / objective)", in_milliseconds(view.queue_wait)
    yield "Batch time (now / objective)", in_milliseconds(view.batch_time)
    for title, name in COUNTS:
        value = view.gauge(name)
        if value is not None:
            yield title, f"{value:.4g}"
    for title, name in SHARES:
        value = view.gauge(name)
        if value is not None:
            yield title, f"{value:.0%}"


def decision_rows(view: ServiceView) -> Iterator[Row]:
    """What stands, and why."""
    yield _decision(view, "scaling", f"Replicas {view.ready} ready, {view.wanted} wanted")
    title = f"Limits {view.sequences} sequences, {view.tokens} tokens a step"
    yield _decision(view, "batching", title)
    yield from breaker_rows(view)
    yield from restart_rows(view)
    signals = view.conditions.get("MetricsAvailable") or {}
    yield "Signals", signals.get("message") or "nothing measured yet"


BREAKER_OF = {"PrometheusLost": "source", "Overload": "load"}
"""Which breaker a reason in status.breaker is of; every other one is of the control breaker."""

BREAKERS = (
    ("control", "Breaker control (protects from Fleetkeeper)"),
    ("source", "Breaker source (Prometheus)"),
    ("load", "Breaker load (protects users)"),
)


def breaker_rows(view: ServiceView) -> Iterator[Row]:
    """Each breaker with its state; the one that changed last with when and why."""
    breaker = view.status.get("breaker") or {}
    reason = breaker.get("reason", "")
    latest = BREAKER_OF.get(reason, "control") if reason else ""
    for name, title in BREAKERS:
        state = breaker.get(name) or "-"
        if isinstance(state, dict):
            state = ", ".join(f"{tier} {of_tier}" for tier, of_tier in state.items())
        if name == latest:
            since = f" since {breaker['since']}" if "since" in breaker else ""
            state += f"{since}: {reason}: {breaker.get('message', '')}"
        yield title, state


def restart_rows(view: ServiceView) -> Iterator[Row]:
    """Whether fragmented replicas are restarted, and why not now; nothing where the spec does not ask for it."""
    texts = {str(reason): reason.text for reason in RestartReason}
    for name, labels in view.gauges:
        if name == "decision_restart":
            reason = dict(labels).get("reason", "")
            yield "Restart of fragmented replicas", f"{reason}: {texts.get(reason, '')}"


def trouble_rows(view: ServiceView) -> Iterator[Row]:
    """Conditions that are not as they should be, with what to do."""
    for kind, condition in view.conditions.items():
        wanted = "False" if kind in GOOD_WHEN_FALSE else "True"
        if condition.get("status") != wanted:
            title = f"{kind} is {condition.get('status')} ({condition.get('reason')})"
            yield title, condition.get("message", "")


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
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Its namespace.")] = "default",
    operator_namespace: OperatorNamespace = "fleetkeeper-system",
    metrics: MetricsUrl = "",
) -> None:
    """Say why the last decisions on a service were taken, with the numbers.

    \b
    Examples:
      fleetkeeper explain chat -n team-a
    """  # noqa: D301 - \b keeps the lines of the examples apart
    fleet = FleetSource(operator_namespace, metrics).look(namespace)
    view = next((v for v in views_of(fleet.services, fleet.gauges) if v.name == name), None)
    if view is None:
        known = ", ".join(sorted(item["metadata"]["name"] for item in fleet.services)) or "none"
        stop(
            ExitCode.FAILED,
            f"no InferenceService {name} in namespace {namespace}; there are: {known}",
        )
    console = Console()
    console.print(_grid(f"{view.namespace}/{view.name}: what stands", decision_rows(view)))
    console.print(_grid("\nMeasured", evidence_rows(view)))
    if fleet.remark:
        console.print(Text(fleet.remark, style="yellow"))
    troubles = list(trouble_rows(view))
    if troubles:
        console.print(_grid("\nNot as it should be", iter(troubles)))
    now = time.time()
    changes = ((f"{age_in_words(c.time, now)} ago", c.in_words()) for c in view.changes[::-1])
    console.print(_grid("\nLast decisions, newest first", changes))

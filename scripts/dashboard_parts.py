"""What dashboards consist of, and the queries that several panels share.

The operator's metrics of a service have the label service_namespace; those of the engines have namespace.
No query uses a recording rule, so the dashboards work without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """A variable that is read from the labels of a series."""

    name: str
    label: str
    query: str
    multi: bool = False


@dataclass(frozen=True)
class Panel:
    """A graph over time. `queries`: {legend: query}; `unit` is Grafana's."""

    title: str
    description: str
    unit: str
    queries: Mapping[str, str]
    width: int = 8
    least: float | None = 0


@dataclass(frozen=True)
class Annotation:
    """Marks on the time axis of every panel, where a query has a result."""

    name: str
    title: str
    query: str


@dataclass(frozen=True)
class Dashboard:
    """One dashboard: rows with a title and panels."""

    name: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    annotations: tuple[Annotation, ...] = ()


BY = "service_namespace, inference_service"
SERVICE = "{{service_namespace}}/{{inference_service}}"
ENGINES = 'namespace=~"$namespace", inference_service=~".+"'
SERVICES = 'service_namespace=~"$namespace"'
ENGINE = 'namespace="$namespace", inference_service="$service"'
ONE = 'service_namespace="$namespace", inference_service="$service"'
OPERATOR = 'namespace=~"$operator"'
RATE = "$__rate_interval"


def of_service(metric: str, more: str = "") -> str:
    """Return the value that the leader has for the service."""
    return f"max(fleetkeeper_{metric}{{{ONE}{more}}})"


def rate(metric: str, by: str, which: str) -> str:
    """Return the sum of the rates of a counter."""
    return f"sum by ({by}) (rate(fleetkeeper_{metric}{{{which}}}[{RATE}]))"


def quantile(share: float, metric: str, by: str, which: str) -> str:
    """Return a quantile of a histogram."""
    le = ", ".join(filter(None, ("le", by)))
    inside = f"sum by ({le}) (rate(fleetkeeper_{metric}_bucket{{{which}}}[{RATE}]))"
    return f"histogram_quantile({share}, {inside})"


def mean(metric: str, by: str, which: str) -> str:
    """Return the mean of a histogram."""
    return f"{rate(f'{metric}_sum', by, which)} / {rate(f'{metric}_count', by, which)}"


def met(by: str, which: str) -> str:
    """Return the share of the last hour's ticks with requests that meet their objectives."""
    inside = (
        f"sum by ({by}) (increase(fleetkeeper_objective_ticks_total{{{which}{more}}}[1h]))"
        for more in (', result="met"', "")
    )
    return "{} / ({} > 0)".format(*inside)


def not_admitted(which: str) -> Panel:
    """Return the panel of refused requests. Tiers and reasons without any have no line."""
    return Panel(
        "Requests not admitted",
        "Requests that engines do not admit per second, by tier and reason. Empty if all are admitted.",
        "reqps",
        {
            "{{tier}} {{outcome}}": rate(
                "requests_total", "tier, outcome", f'{which}, outcome!="admitted"'
            )
            + " > 0"
        },
    )

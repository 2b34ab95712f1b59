"""The alerts and dashboards that the chart ships, and the series that their queries may name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml
from prometheus_client import REGISTRY, CollectorRegistry

from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper.runtime.telemetry.service_series import SERVICE_LABELS
from fleetkeeper_engine.supervisor.control_api.metric_table import METRICS
from fleetkeeper_gateway.telemetry import metrics as request_metrics
from fleetkeeper_gateway.usage import metrics as usage_metrics
from reference_gateway import metrics as gateway_metrics
from reference_metrics import SERVICE_METRICS, operator_metrics
from tests.support.chart.helm_chart import CHART

RULES: Final = CHART / "files" / "rules"
DASHBOARDS: Final = CHART / "files" / "dashboards"
SCRAPED: Final = frozenset({"namespace", "pod", "instance", "le"})
"""Labels that a scrape adds, and that of a histogram's buckets."""
SELECTOR: Final = re.compile(r"\b(?:fleetkeeper|process)_\w+(?:\{[^}]*\})?")
"""A series with its matchers, as it is in the queries."""
_NAME: Final = re.compile(r"\b(?:fleetkeeper|process)[_:][\w:]+")


def alerts() -> list[dict[str, Any]]:
    """Return every alert, in the order of the file."""
    groups = yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboards() -> dict[str, dict[str, Any]]:
    """Return every dashboard by the name of its file."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(DASHBOARDS.glob("*.json"))}
    assert found, f"no dashboard in {DASHBOARDS}"
    return found


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels that show data, not the headings of rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def variables(namespace: str, service: str, operator: str) -> dict[str, str]:
    """Return the values of Grafana's variables in the dashboards."""
    return {
        "__rate_interval": "1m",
        "namespace": namespace,
        "service": service,
        "operator": operator,
    }


def shown(values: Mapping[str, str]) -> dict[str, str]:
    """Return the query of every line of the panels, by dashboard, panel and legend."""
    return {
        f"{name}: {panel['title']}: {target['legendFormat']}": _replaced(target["expr"], values)
        for name, dashboard in dashboards().items()
        for panel in panels(dashboard)
        for target in panel["targets"]
    }


def annotated(values: Mapping[str, str]) -> dict[str, str]:
    """Return the query of every annotation, by dashboard and name."""
    return {
        f"{name}: {item['name']}": _replaced(item["expr"], values)
        for name, dashboard in dashboards().items()
        for item in dashboard["annotations"]["list"]
    }


def chosen(values: Mapping[str, str]) -> dict[str, str]:
    """Return the query of every variable, by dashboard and name."""
    return {
        f"{name}: ${item['name']}": _replaced(item["definition"], values)
        for name, dashboard in dashboards().items()
        for item in dashboard["templating"]["list"]
        if item["type"] == "query"
    }


def judged() -> dict[str, str]:
    """Return the expression of every alert."""
    return {rule["alert"]: rule["expr"] for rule in alerts()}


def _replaced(query: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        query = query.replace(f"${name}", value)
    assert "$" not in query
    return query


def used_labels(expression: str) -> set[str]:
    """Return the labels by which a query groups and selects."""
    grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
    selected = re.findall(r"(\w+)(?:=~|!=|!~|=)\"", expression)
    return {label.strip() for group in grouped for label in group.split(",")} - {""} | {*selected}


def named(expression: str) -> set[str]:
    """Return the series of Fleetkeeper that a query names."""
    return set(_NAME.findall(expression))


def exported() -> dict[str, frozenset[str]]:
    """Return the labels of every series that engines, the operator and the gateway export."""
    found: dict[str, frozenset[str]] = {}
    for metric in METRICS:
        for name in _series(metric.name, metric.type):
            found[name] = frozenset({*metric.labels, "inference_service"}) | SCRAPED
    for own in operator_metrics():
        for name in _series(own.name, own.kind):
            found[name] = frozenset(own.labels) | SCRAPED
    for name, (labels, _) in SERVICE_METRICS.items():
        found[f"fleetkeeper_{name}"] = frozenset({*labels, *SERVICE_LABELS}) | SCRAPED
    for family in OperatorMetrics().registry.collect():
        if family.name.startswith("process_"):
            for name in _series(family.name, family.type):
                found[name] = SCRAPED
    return found | _exported_by_the_gateway()


def _exported_by_the_gateway() -> dict[str, frozenset[str]]:
    return {
        name: frozenset(metric.labels) | SCRAPED
        for metric in gateway_metrics()
        for name in _series(metric.name, metric.kind)
    }


def gateway_registry() -> CollectorRegistry:
    """Return the metrics of the gateway's processes, after an answer of a service, an error, and a reading."""
    gateway_metrics()  # it imports every module, and so registers its metrics
    request_metrics.requests("team-a/chat", "standard", 200)
    request_metrics.REFUSED.labels("internal_error")
    usage_metrics.LOST_ENTRIES.labels("team-a/chat")
    return REGISTRY


def _series(name: str, kind: str) -> Iterator[str]:
    if kind == "histogram":
        yield from (f"{name}_{part}" for part in ("bucket", "sum", "count"))
    elif kind == "counter":
        yield f"{name.removesuffix('_total')}_total"
    else:
        yield name

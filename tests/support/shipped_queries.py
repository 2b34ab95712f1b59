"""The alerts that the chart ships, and the series that a query may name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import yaml

from fleetkeeper.runtime.autoscaler.metrics import SERVICE_LABELS
from fleetkeeper_engine.supervisor.control_api.metric_table import METRICS
from reference_metrics import CONTROL_GAUGES, operator_metrics
from tests.support.helm_chart import CHART

RULES: Final = CHART / "files" / "rules"
SCRAPED: Final = frozenset({"namespace", "pod", "le"})
"""Labels that a scrape adds, and that of a histogram's buckets."""
_NAME: Final = re.compile(r"\bfleetkeeper[_:][\w:]+")


def alerts() -> list[dict[str, Any]]:
    """Return every alert, in the order of the file."""
    groups = yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def named(expression: str) -> set[str]:
    """Return the series of Fleetkeeper that a query names."""
    return set(_NAME.findall(expression))


def exported() -> dict[str, frozenset[str]]:
    """Return the labels of every series that engines and the operator export."""
    found: dict[str, frozenset[str]] = {}
    for metric in METRICS:
        for name in _series(metric.name, metric.type):
            found[name] = frozenset({*metric.labels, "inference_service"}) | SCRAPED
    for own in operator_metrics():
        for name in _series(own.name, own.kind):
            found[name] = frozenset(own.labels) | SCRAPED
    for name, (labels, _) in CONTROL_GAUGES.items():
        found[f"fleetkeeper_{name}"] = frozenset({*labels, *SERVICE_LABELS}) | SCRAPED
    return found


def _series(name: str, kind: str) -> Iterator[str]:
    if kind == "histogram":
        yield from (f"{name}_{part}" for part in ("bucket", "sum", "count"))
    else:
        yield name

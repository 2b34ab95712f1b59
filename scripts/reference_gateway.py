"""The pages of the gateway's settings and metrics in docs/reference, from the programs' own classes.

Settings are every class of settings below `fleetkeeper_gateway`, metrics every one in the default registry
once all modules are imported. So a new part needs no line here.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType

from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

import fleetkeeper_gateway
from reference_pages import FOLDER, kind_of, page, row, shown_default

ENV_PREFIX = "FLEETKEEPER_GATEWAY_"
SETTINGS_MODULE = "settings"
NAMESPACE = "fleetkeeper_gateway_"
BATCH = ("fleetkeeper_batch_", f"{NAMESPACE}batch_")
"""Metrics of the batch process: of its backlog, which the operator reads, and of itself."""


def generated_files() -> dict[str, str]:
    """Return {path: text}, for scripts/generate.py."""
    return {
        f"{FOLDER}/gateway-settings.md": page(_settings()),
        f"{FOLDER}/gateway-metrics.md": page(_metrics()),
    }


# -- settings ---------------------------------------------------------------------------------------


@dataclass
class Setting:
    """A setting, and the parts that read it."""

    variable: str
    kind: str
    default: str
    description: str
    parts: list[str] = field(default_factory=list)


def settings_classes() -> list[type[BaseSettings]]:
    """Return the classes of settings of all parts, in the order of their modules' names."""
    found: list[type[BaseSettings]] = []
    for name in _modules():
        if name.rpartition(".")[2] != SETTINGS_MODULE:
            continue
        module = importlib.import_module(name)
        found += [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, BaseSettings)
            and value.__module__ == name
        ]
    return found


def settings() -> dict[str, Setting]:
    """Return every setting by its variable. Several parts may read one."""
    found: dict[str, Setting] = {}
    for part_settings in settings_classes():
        part = part_settings.__module__.split(".")[1]
        for name, info in part_settings.model_fields.items():
            made = _setting(name, info)
            setting = found.setdefault(made.variable, made)
            if part not in setting.parts:
                setting.parts.append(part)
    return found


def _setting(name: str, info: FieldInfo) -> Setting:
    return Setting(
        ENV_PREFIX + name.upper(),
        kind_of(info.annotation),
        shown_default(info),
        info.description or "",
    )


def _settings() -> Iterator[str]:
    yield "# Settings of the gateway"
    yield ""
    yield "The chart sets them from its values ([install the gateway](../gateway-install.md)). This page is for running"
    yield "the gateway without the chart, and for reading logs. The processes `fleetkeeper-gateway serve`,"
    yield "`fleetkeeper-gateway usage` and `fleetkeeper-gateway batch` read them from environment variables; each ignores"
    yield "those of the others. A wrong value ends the process at start-up with a message that names the variable, never"
    yield "the value of a secret."
    yield ""
    yield "The column *part* names the folder below `gateway/fleetkeeper_gateway` that reads the setting."
    yield ""
    yield "| variable | type | default | | part |"
    yield "| --- | --- | --- | --- | --- |"
    for setting in sorted(settings().values(), key=lambda item: (item.parts[0], item.variable)):
        parts = ", ".join(f"`{part}`" for part in setting.parts)
        yield row(
            f"`{setting.variable}`", setting.kind, setting.default, setting.description, parts
        )


# -- metrics ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A metric, as a row of the page."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def metrics() -> list[Metric]:
    """Return the gateway's metrics, by name."""
    for name in _modules():
        _register_metrics(importlib.import_module(name))
    found = []
    for collector in set(vars(REGISTRY)["_collector_to_names"]):
        for family in _families(collector):
            if family.name.startswith((NAMESPACE, *BATCH)):
                total = "_total" if family.type == "counter" else ""
                labels = vars(collector if isinstance(collector, MetricWrapperBase) else family)[
                    "_labelnames"
                ]
                name = family.name + total
                found.append(Metric(name, family.type, tuple(labels), family.documentation))
    return sorted(found, key=lambda metric: metric.name)


def _register_metrics(module: ModuleType) -> None:
    """Call the cached functions that make the metrics of a part when it first uses them."""
    if module.__name__.rpartition(".")[2] == "metrics":
        for name, make in vars(module).items():
            if name.endswith("_metrics") and hasattr(make, "cache_info"):
                make()


def _families(collector: Collector) -> Iterable[Family]:
    """Return the metrics of a collector, if it belongs to the library or the gateway."""
    if isinstance(collector, MetricWrapperBase):
        return collector.describe()
    return (
        collector.collect() if type(collector).__module__.startswith("fleetkeeper_gateway.") else ()
    )


def _metrics() -> Iterator[str]:
    yield "# Metrics of the gateway"
    yield ""
    yield "Names and labels are stable for dashboards and alerts. Times are in seconds. No label names a key and none is a"
    yield "text of a client: a cluster may have 10,000 keys. Usage by key is what `fleetkeeper usage` shows"
    yield "([usage](../gateway-usage.md)). Other metrics of the fleet are [here](metrics.md)."
    yield ""
    usage = [metric for metric in metrics() if metric.name.startswith(f"{NAMESPACE}usage_")]
    batch = [metric for metric in metrics() if metric.name.startswith(BATCH)]
    serve = [metric for metric in metrics() if metric not in (*usage, *batch)]
    yield "## Request path"
    yield ""
    yield "Port 8081 of the pods of `fleetkeeper-gateway serve`, path `/metrics`."
    yield ""
    yield from _table(serve)
    yield ""
    yield "## Usage"
    yield ""
    yield "Port 8082 of the pod of `fleetkeeper-gateway usage`, path `/metrics`."
    yield ""
    yield from _table(usage)
    yield ""
    yield "## Batches"
    yield ""
    yield "Port 8084 of the pods of `fleetkeeper-gateway batch`, path `/metrics`."
    yield ""
    yield from _table(batch)


def _table(found: Iterable[Metric]) -> Iterator[str]:
    yield "| metric | type | labels | |"
    yield "| --- | --- | --- | --- |"
    for metric in found:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        yield row(f"`{metric.name}`", metric.kind, labels, metric.meaning)


def _modules() -> list[str]:
    """Return every module of the gateway by its full name."""
    return sorted(
        item.name
        for item in pkgutil.walk_packages(
            fleetkeeper_gateway.__path__, prefix=f"{fleetkeeper_gateway.__name__}."
        )
    )

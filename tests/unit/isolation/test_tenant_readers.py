"""Each reader of tenants' data, with an error that no list foresees for one tenant: the others go on.

What fails is counted or shown. The operator's steps for each service are in test_services.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from fleetkeeper.adapters import engine
from fleetkeeper.adapters.prometheus import PodKey, PrometheusReading
from fleetkeeper.adapters.prometheus.answers import Fan
from fleetkeeper.adapters.prometheus.queries import TIMES
from fleetkeeper.api import names
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.series_map import PodSeries
from fleetkeeper.commands.bundle.archive import Archive
from fleetkeeper.commands.bundle.contents import Collector
from fleetkeeper.commands.bundle.reader import Reader
from fleetkeeper.commands.fleet import top
from fleetkeeper.console.documents import fleet_document
from fleetkeeper.console.samples import Sampler, Samples
from fleetkeeper.fleet.source import Fleet, FleetSource, load_api
from fleetkeeper.fleet.view import views_of
from fleetkeeper.runtime.autoscaler.sources import MeasuredSource
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from tests.support.autoscale.control_cases import NOW, sample
from tests.support.operators.contained import counted, new_defects
from tests.support.plane.support_cluster import Answer, Recorded, recorded_cluster
from tests.unit.isolation.test_direct_reads import ports, target

NAMES = ("bad", "good", "well")
POISON = "poison"
SERVICES = f"/apis/{names.GROUP}/{names.VERSION}/{names.PLURAL}"
DEEP = '{"f:a":' * 5000 + "{}" + "}" * 5000
"""managedFields that the API server takes from anybody, and Python cannot decode."""


def service(name: str) -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True", "message": POISON if name == "bad" else ""}
    return {
        "metadata": {
            "name": name,
            "namespace": f"team-{name}",
            "resourceVersion": "7",
            "uid": f"uid-{name}",
        },
        "spec": {"objectives": {"queueWaitMilliseconds": 500}},
        "status": {"readyReplicas": POISON if name == "bad" else 1, "conditions": [ready]},
    }


def poisoned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which raises when it gets what the tenant of `bad` wrote."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if POISON in repr(args):
            raise RuntimeError("no list foresees it")
        return function(*args, **kwargs)

    return call


def break_sink(monkeypatch: pytest.MonkeyPatch, sink: str) -> None:
    monkeypatch.setattr(f"fleetkeeper.{sink}", poisoned(resolve_name(f"fleetkeeper.{sink}")))


class Source:
    """A source of the fleet."""

    def read_fleet(self, namespace: str | None) -> Fleet:
        del namespace
        return Fleet([service(name) for name in NAMES], {})


def shown_by_top() -> dict[str, str]:
    views = views_of(
        Source().read_fleet(None).services, {}, lambda view: top.fleet_table([view], NOW)
    )
    top.fleet_table(views, NOW)
    return {view.name: view.conditions["Ready"].get("reason", "Ready") for view in views}


def shown_by_console() -> dict[str, str]:
    kept = Samples()
    Sampler(Source(), kept, None, 5.0).sample()
    document = fleet_document(kept)
    assert document["problem"] == ""
    return {row["name"]: row["ready"] for row in document["services"]}


@pytest.mark.parametrize(
    ("sink", "shown"),
    [
        ("fleet.view._changes", shown_by_top),
        ("commands.fleet.top._readiness", shown_by_top),
        ("fleet.view._changes", shown_by_console),
        ("console.samples.number", shown_by_console),
        ("console.documents._tone", shown_by_console),
    ],
)
def test_a_service_that_cannot_be_shown_hides_no_other(
    sink: str, shown: Callable[[], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown() == dict.fromkeys(NAMES, "Ready")
    break_sink(monkeypatch, sink)
    assert shown() == {"bad": "Unreadable", "good": "Ready", "well": "Ready"}


async def test_a_pod_whose_metrics_cannot_be_parsed_takes_no_sample_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    targets = [target(number) for number in range(3)]
    bad = targets[1]

    def parse(pod: str, *_: object) -> object:
        if pod == bad.pods[0].name:
            raise RuntimeError("no list foresees it")
        return sample(NOW, pod)

    monkeypatch.setattr(engine, "parse_text", parse)
    metrics = OperatorMetrics()
    defects = new_defects(metrics)
    async with ports() as (_, engines):
        source = MeasuredSource(
            *(None, engines), may_send=lambda: True, monotonic=lambda: 0.0, defects=defects
        )
        readings = await source.observe(targets, NOW)
    assert set(readings.samples) == {item.key for item in targets} - {bad.key}
    assert counted(metrics) == {"read_pod": 1.0}
    assert defects.of(bad.key) is not None


class Answers:
    """A Prometheus that knows a metric of each pod."""

    async def observe_samples(
        self, pods: Mapping[PodKey, Edges], now: float, *, step_class: str
    ) -> PrometheusReading:
        del step_class
        fan = Fan(pods)
        for name, metric in ((TIMES, "up"), ("steps", "fleetkeeper_steps_total")):
            rows = [
                {
                    "metric": {"__name__": metric, "namespace": pod[0], "pod": pod[1]},
                    "value": [now, str(now)],
                }
                for pod in pods
            ]
            fan.take(name, rows)
        return fan.reading()


async def test_series_that_cannot_be_read_take_no_sample_from_pods_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    targets = [target(number) for number in range(3)]
    bad = targets[1]
    add = PodSeries.add

    def fail(series: PodSeries, name: str, labels: Mapping[str, str], value: float) -> None:
        if labels["pod"] == bad.pods[0].name:
            raise RuntimeError("no list foresees it")
        add(series, name, labels, value)

    metrics = OperatorMetrics()
    prometheus: Any = Answers()
    source = MeasuredSource(
        *(prometheus, None),
        may_send=lambda: True,
        monotonic=lambda: 0.0,
        defects=new_defects(metrics),
    )
    assert len((await source.observe(targets, NOW)).samples) == 3
    monkeypatch.setattr(PodSeries, "add", fail)
    readings = await source.observe(targets, NOW)
    assert set(readings.samples) == {item.key for item in targets} - {bad.key}
    assert readings.lost == {bad.key}
    assert counted(metrics) == {"read_series": 1.0}


class Paged(Recorded):
    """An API server whose list of services has pages, one of them with what cannot be decoded."""

    def answer(self, target: str) -> Answer | None:
        parts = urlsplit(target)
        if parts.path != SERVICES:
            return super().answer(target)
        query = dict(parse_qsl(parts.query))
        begin, limit = int(query.get("continue", 0)), int(query["limit"])
        items = [self._item(name) for name in NAMES][begin : begin + limit]
        more = f'"continue":"{begin + limit}",' if begin + limit < len(NAMES) else ""
        return 200, (
            f'{{"apiVersion":"v","items":[{",".join(items)}],"kind":"L",'
            f'"metadata":{{{more}"resourceVersion":"70"}}}}\n'
        ).encode()

    def _item(self, name: str) -> str:
        live = service(name)
        fields = [{"fieldsV1": "DEEP"}] if name == "bad" and self.answers else []
        live["metadata"] = {"managedFields": fields, **live["metadata"]}
        text = json.dumps({**live, "status": {}}, separators=(",", ":"))
        return text.replace('"DEEP"', DEEP)


def bundle_of(recorded: Recorded, folder: Path) -> Archive:
    archive = Archive()
    with recorded_cluster(recorded, folder) as kubeconfig:
        reader = Reader(load_api(str(kubeconfig)))
        Collector(reader, archive, "fleetkeeper-system", lambda _: None).collect(None, None)
    return archive


def kept_of(archive: Archive, name: str) -> set[str]:
    folder = f"services/team-{name}/{name}/"
    return {row["path"] for row in archive.index({})["files"] if row["path"].startswith(folder)}


@pytest.mark.parametrize("sink", ["contents.view_of", "contents.explained", "archive.redact"])
def test_a_service_that_cannot_be_bundled_leaves_the_others_whole(
    sink: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded({SERVICES: [service(name) for name in NAMES]})
    break_sink(monkeypatch, f"commands.bundle.{sink}")
    archive = bundle_of(recorded, tmp_path)
    for name in ("good", "well"):
        folder = f"services/team-{name}/{name}"
        assert kept_of(archive, name) == {
            f"{folder}/explain.txt",
            f"{folder}/inferenceservice.json",
        }
    (missing,) = (
        row for row in archive.missing if "bad" in row["what"] and "404" not in row["reason"]
    )
    assert missing["reason"] == "RuntimeError: no list foresees it"


def test_a_service_that_cannot_be_decoded_hides_no_other(tmp_path: Path) -> None:
    with recorded_cluster(Paged({"deep": True}), tmp_path) as kubeconfig:
        fleet = FleetSource("fleetkeeper-system", kubeconfig=str(kubeconfig)).read_fleet(None)
    views = {view.name: view for view in views_of(fleet.services, fleet.gauges)}
    assert set(views) == set(NAMES)
    assert views["bad"].conditions["Ready"]["reason"] == "Unreadable"
    assert "cannot be decoded" in views["bad"].conditions["Ready"]["message"]


def test_a_bundle_has_all_services_but_one_that_cannot_be_decoded(tmp_path: Path) -> None:
    archive = bundle_of(Paged({"deep": True}), tmp_path)
    assert all(len(kept_of(archive, name)) == 2 for name in NAMES)

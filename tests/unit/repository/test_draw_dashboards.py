"""The pictures of the dashboards: every panel, with names, units and gaps, without a Grafana."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from dashboard_panels import DASHBOARDS
from draw_dashboards import Record, draw, load_dashboards, main, panels_of, replaced
from panel_text import SCALES, series_name, value_text

VALUES = {
    "__rate_interval": "1m",
    "namespace": "team-a",
    "service": "chat",
    "operator": "fleetkeeper-system",
}
PODS = ("chat-0", "chat-1")


def _record(dashboard: dict[str, Any]) -> Record:
    """Two pods everywhere; a sample is missing in the middle."""
    times = [0, 10, 20, 40, 50, 60]
    answer = [
        {"metric": {"pod": pod}, "values": [[at, str(at / 10 + 1)] for at in times]} for pod in PODS
    ]
    queries = [target["expr"] for panel in panels_of(dashboard) for target in panel["targets"]]
    return Record(0, 60, 10, VALUES, {replaced(query, VALUES): answer for query in queries})


@pytest.fixture(scope="module")
def service() -> Figure:
    """The dashboard of a service."""
    dashboard = load_dashboards()["service"]
    return draw(dashboard, _record(dashboard))


def test_every_panel_is_drawn_with_its_series(service: Figure) -> None:
    dashboard = load_dashboards()["service"]
    shown = list(panels_of(dashboard))
    page, *axes = service.axes
    assert {panel["title"] for panel in shown} <= {text.get_text() for text in page.texts}
    assert [len(axis.lines) for axis in axes] == [2 * len(panel["targets"]) for panel in shown]
    memory = axes[[panel["title"] for panel in shown].index("Memory")]
    legend = memory.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [*PODS, "cap", "cap"]


def test_a_missing_sample_is_a_gap(service: Figure) -> None:
    (values,) = {tuple(map(str, line.get_ydata())) for line in service.axes[1].lines}
    assert values == ("1.0", "2.0", "3.0", "nan", "5.0", "6.0", "7.0")


def test_no_panel_lies_over_another(service: Figure) -> None:
    boxes = [axis.get_position() for axis in service.axes[1:]]
    for index, box in enumerate(boxes):
        assert 0 < box.x0 < box.x1 < 1
        assert 0 < box.y0 < box.y1 < 1
        assert not any(box.overlaps(other) for other in boxes[index + 1 :])


def test_a_panel_without_data_says_so() -> None:
    dashboard = load_dashboards()["fleet"]
    _, *axes = draw(dashboard, Record(0, 60, 10, VALUES, {})).axes
    assert {tuple(text.get_text() for text in axis.texts) for axis in axes} == {("No data",)}


def test_a_record_becomes_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dashboard = load_dashboards()["fleet"]
    file = tmp_path / "record.json"
    file.write_text(json.dumps(asdict(_record(dashboard))))
    monkeypatch.setattr("draw_dashboards.load_dashboards", lambda: {"fleet": dashboard})
    monkeypatch.setattr("sys.argv", ["draw", f"--record={file}", f"--out={tmp_path / 'img'}"])
    main()
    height, width, _ = imread(tmp_path / "img" / "dashboard-fleet.png").shape
    assert width > height > 500


def test_every_unit_of_the_dashboards_has_its_scales() -> None:
    used = {
        panel.unit for dashboard in DASHBOARDS for _, panels in dashboard.rows for panel in panels
    }
    assert used == set(SCALES)


@pytest.mark.parametrize(
    ("value", "unit", "largest", "text"),
    [
        (0.25, "s", 0.5, "250 ms"),
        (90.0, "s", 180.0, "1.5 min"),
        (0.8, "percentunit", 1.0, "80%"),
        (3 * 2.0**20, "bytes", 9 * 2.0**20, "3 MiB"),
        (4000.0, "none", 8000.0, "4 k"),
        (1.5, "reqps", 3.0, "1.5 req/s"),
        (0.0, "none", 1.0, "0"),
    ],
)
def test_values_have_the_scale_of_the_axis(
    value: float, unit: str, largest: float, text: str
) -> None:
    assert value_text(value, unit, largest) == text


def test_a_series_has_the_name_that_its_legend_makes() -> None:
    assert series_name("p95 {{tier}}", {"tier": "batch", "pod": "chat-0"}) == "p95 batch"
    assert series_name("{{verb}} {{kind}}", {"verb": "apply"}) == "apply"


def test_a_variable_without_a_value_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no value"):
        replaced("rate(x[$__rate_interval])", {"namespace": "team-a"})

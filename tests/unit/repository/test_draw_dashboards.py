"""The pictures of the dashboards: every panel, with names, units and gaps, without a Grafana."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.image import imread

from dashboards import DASHBOARDS
from draw_dashboards import Record, draw, load_dashboards, main, panels_of, replaced
from panel_text import SCALES, scale_of, series_name
from tests.support.shipped_queries import variables

VALUES = variables("team-a", "chat", "fleetkeeper-system")
PODS = ("chat-0", "chat-1")


def _record(dashboard: dict[str, Any], factor: float = 1.0) -> Record:
    """Two pods everywhere, with 1 to 7 of something; a sample is missing in the middle."""
    times = [0, 10, 20, 40, 50, 60]
    answer = [
        {"metric": {"pod": pod}, "values": [[at, str(factor * (at / 10 + 1))] for at in times]}
        for pod in PODS
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
    (values,) = {str(np.asarray(line.get_ydata()).tolist()) for line in service.axes[1].lines}
    assert values == str([1.0, 2.0, 3.0, float("nan"), 5.0, 6.0, 7.0])


def test_a_decision_is_marked_in_every_panel_when_it_begins() -> None:
    dashboard = load_dashboards()["service"]
    (annotation,) = dashboard["annotations"]["list"]
    values = [[at, "1"] for at in (10, 20, 30, 50, 60)]
    query = replaced(annotation["expr"], VALUES)
    data = Record(0, 60, 10, VALUES, {query: [{"metric": {}, "values": values}]})
    for axis in draw(dashboard, data).axes[1:]:
        (marks,) = axis.collections
        assert isinstance(marks, LineCollection)
        assert [vertices[0][0] * 86_400 for vertices in marks.get_segments()] == [10, 50]


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
    assert width > 1000
    assert height > 500


def test_every_unit_of_the_dashboards_has_its_scales() -> None:
    used = {
        panel.unit for dashboard in DASHBOARDS for _, panels in dashboard.rows for panel in panels
    }
    assert used == set(SCALES)


@pytest.mark.parametrize(
    ("largest", "unit", "name"),
    [
        (0.5, "s", " ms"),
        (1e-9, "s", " µs"),
        (180.0, "s", " min"),
        (0.001, "percentunit", "%"),
        (9 * 2.0**20, "bytes", " MiB"),
        (8000.0, "none", " k"),
        (3.0, "reqps", " req/s"),
    ],
)
def test_an_axis_has_the_scale_of_its_largest_value(largest: float, unit: str, name: str) -> None:
    assert scale_of(unit, largest)[1] == name


def test_the_marks_of_an_axis_are_round_in_its_scale() -> None:
    dashboard = load_dashboards()["operator"]
    titles = [panel["title"] for panel in panels_of(dashboard)]
    figure = draw(dashboard, _record(dashboard, factor=2.0**20))
    memory = figure.axes[1 + titles.index("Memory")]
    assert [mark.get_text() for mark in memory.get_yticklabels()] == [
        "0 MiB",
        "2 MiB",
        "4 MiB",
        "6 MiB",
    ]


def test_a_series_has_the_name_that_its_legend_makes() -> None:
    assert series_name("p95 {{tier}}", {"tier": "batch", "pod": "chat-0"}) == "p95 batch"
    assert series_name("{{verb}} {{kind}}", {"verb": "apply"}) == "apply"


def test_a_variable_without_a_value_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no value"):
        replaced("rate(x[$__rate_interval])", {"namespace": "team-a"})

"""Every dashboard is well-formed, complete, and queries series that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.support.chart.shipped_queries import dashboards, exported, named, panels, used_labels
from tests.support.docs_commands import ROOT

DASHBOARDS = dashboards()
PANELS = [(name, panel) for name, dashboard in DASHBOARDS.items() for panel in panels(dashboard)]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
ALL = {"text": "All", "value": "$__all"}
UNITS = {"none", "s", "bytes", "percentunit", "reqps", "ops"}
"""Of Grafana. It shows an unknown unit as text behind the number."""


def _cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    """The cells of the grid that a panel covers."""
    place = panel["gridPos"]
    return {
        (place["x"] + column, place["y"] + line)
        for column in range(place["w"])
        for line in range(place["h"])
    }


def _sources(value: object) -> Iterator[object]:
    """Yield every data source that a part of a dashboard names."""
    if isinstance(value, dict):
        yield from (source for key, source in value.items() if key == "datasource")
        yield from (source for inner in value.values() for source in _sources(inner))
    elif isinstance(value, list):
        yield from (source for inner in value for source in _sources(inner))


def test_there_are_three_dashboards_with_addresses_of_their_own() -> None:
    """Each links to the others by their tag."""
    assert set(DASHBOARDS) == {"fleet", "service", "operator"}
    for name, dashboard in DASHBOARDS.items():
        assert panels(dashboard), name
        assert dashboard["uid"] == f"fleetkeeper-{name}"
        assert dashboard["tags"] == ["fleetkeeper"], name
        assert [link["tags"] for link in dashboard["links"]] == [["fleetkeeper"]], name


def test_panels_have_their_own_number_and_place() -> None:
    """No two overlap, none is wider than the grid, and none is inside a collapsed row."""
    for name in DASHBOARDS:
        shown = DASHBOARDS[name]["panels"]
        assert len({panel["id"] for panel in shown}) == len(shown), name
        taken = set[tuple[int, int]]()
        for panel in shown:
            cells = _cells(panel)
            assert not cells & taken, panel["title"]
            assert max(x for x, _ in cells) < 24, panel["title"]
            assert not panel.get("panels"), f"{name}: expand the row {panel['title']}"
            taken |= cells


def test_the_data_source_is_a_variable() -> None:
    for name, dashboard in DASHBOARDS.items():
        source, *variables = dashboard["templating"]["list"]
        assert (source["name"], source["type"]) == ("datasource", "datasource"), name
        assert source["query"] == "prometheus", name
        assert [each for each in _sources(dashboard) if each != SOURCE] == [], name
        for variable in variables:
            assert variable["query"]["query"] == variable["definition"], name
            assert named(variable["definition"]), name
            assert named(variable["definition"]) <= exported().keys(), name


def test_no_variable_has_a_value_of_the_cluster_where_it_was_edited() -> None:
    for name, dashboard in DASHBOARDS.items():
        for variable in dashboard["templating"]["list"]:
            assert variable.get("current", ALL) == ALL, f"{name}: ${variable['name']}"


def test_a_panel_says_what_it_shows_and_in_which_unit() -> None:
    for name, panel in PANELS:
        assert panel["title"], panel
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["datasource"] == SOURCE, panel["title"]
        titles = [other["title"] for other in panels(DASHBOARDS[name])]
        assert titles.count(panel["title"]) == 1, panel["title"]


def test_a_panel_queries_series_that_are_exported() -> None:
    """By labels that they have, with variables that the dashboard has, and legends of the result."""
    known = exported()
    for name, panel in PANELS:
        variables = {item["name"] for item in DASHBOARDS[name]["templating"]["list"]}
        assert panel["targets"], panel["title"]
        for key in ("refId", "legendFormat"):
            assert len({target[key] for target in panel["targets"]}) == len(panel["targets"]), (
                panel["title"]
            )
        for target in panel["targets"]:
            series = named(target["expr"])
            assert series, panel["title"]
            assert series <= known.keys(), panel["title"]
            assert used_labels(target["expr"]) <= {
                label for one in series for label in known[one]
            }, panel["title"]
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}, (
                panel["title"]
            )
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= used_labels(
                target["expr"]
            ), panel["title"]


def test_the_page_lists_the_dashboards() -> None:
    text = (ROOT / "docs" / "dashboards.md").read_text()
    for dashboard in DASHBOARDS.values():
        assert f"| {dashboard['title']} | " in text

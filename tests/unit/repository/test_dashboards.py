"""Every dashboard is well-formed, complete, and queries series that exist."""

from __future__ import annotations

import re
from typing import Any

from tests.support.docs_commands import ROOT
from tests.support.shipped_queries import dashboards, exported, named, panels, used_labels

DASHBOARDS = dashboards()
PANELS = [(name, panel) for name, dashboard in DASHBOARDS.items() for panel in panels(dashboard)]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    """The cells of the grid that a panel covers."""
    place = panel["gridPos"]
    return {
        (place["x"] + column, place["y"] + line)
        for column in range(place["w"])
        for line in range(place["h"])
    }


def test_there_are_three_dashboards_with_addresses_of_their_own() -> None:
    assert set(DASHBOARDS) == {"fleet", "service", "operator"}
    assert len({dashboard["uid"] for dashboard in DASHBOARDS.values()}) == 3


def test_panels_have_their_own_number_and_place() -> None:
    """No two overlap, and none is wider than the grid."""
    for name in DASHBOARDS:
        shown = DASHBOARDS[name]["panels"]
        assert len({panel["id"] for panel in shown}) == len(shown), name
        taken = set[tuple[int, int]]()
        for panel in shown:
            cells = _cells(panel)
            assert not cells & taken, panel["title"]
            assert max(x for x, _ in cells) < 24, panel["title"]
            taken |= cells


def test_the_data_source_is_a_variable() -> None:
    for name in DASHBOARDS:
        variables = {item["name"]: item for item in DASHBOARDS[name]["templating"]["list"]}
        assert variables["datasource"]["type"] == "datasource", name
        assert variables["datasource"]["query"] == "prometheus", name
        for variable in variables.values():
            if variable["type"] == "query":
                assert variable["datasource"] == SOURCE, name
                assert named(variable["definition"]) <= exported().keys(), name


def test_a_panel_says_what_it_shows_and_in_which_unit() -> None:
    for name, panel in PANELS:
        assert panel["title"], panel
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == SOURCE, panel["title"]
        titles = [other["title"] for other in panels(DASHBOARDS[name])]
        assert titles.count(panel["title"]) == 1, panel["title"]


def test_a_panel_queries_series_that_are_exported() -> None:
    """By labels that they have, with variables that the dashboard has, and legends of the result."""
    known = exported()
    for name, panel in PANELS:
        variables = {item["name"] for item in DASHBOARDS[name]["templating"]["list"]}
        assert panel["targets"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]), (
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

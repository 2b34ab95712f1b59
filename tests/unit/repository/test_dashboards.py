"""Every dashboard is well-formed, complete, and queries series that exist."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.docs_commands import ROOT
from tests.support.shipped_queries import dashboards, exported, named, panels, used_labels

DASHBOARDS = dashboards()
PANELS = [
    pytest.param(name, panel, id=f"{name}-{panel['title']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in panels(dashboard)
]
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


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_have_their_own_number_and_place(name: str) -> None:
    """No two overlap, and none is wider than the grid."""
    shown = DASHBOARDS[name]["panels"]
    assert len({panel["id"] for panel in shown}) == len(shown)
    taken = set[tuple[int, int]]()
    for panel in shown:
        cells = _cells(panel)
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_data_source_is_a_variable(name: str) -> None:
    variables = {item["name"]: item for item in DASHBOARDS[name]["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for variable in variables.values():
        if variable["type"] == "query":
            assert variable["datasource"] == SOURCE
            assert named(variable["definition"]) <= exported().keys()


@pytest.mark.parametrize(("name", "panel"), PANELS)
def test_a_panel_says_what_it_shows_and_in_which_unit(name: str, panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == SOURCE
    titles = [other["title"] for other in panels(DASHBOARDS[name])]
    assert titles.count(panel["title"]) == 1


@pytest.mark.parametrize(("name", "panel"), PANELS)
def test_a_panel_queries_series_that_are_exported(name: str, panel: dict[str, Any]) -> None:
    """By labels that they have, with variables that the dashboard has, and legends of the result."""
    known = exported()
    variables = {item["name"] for item in DASHBOARDS[name]["templating"]["list"]}
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for target in panel["targets"]:
        series = named(target["expr"])
        assert series
        assert series <= known.keys()
        assert used_labels(target["expr"]) <= {label for one in series for label in known[one]}
        assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= used_labels(target["expr"])


def test_the_page_lists_the_dashboards() -> None:
    text = (ROOT / "docs" / "dashboards.md").read_text()
    for dashboard in DASHBOARDS.values():
        assert f"| {dashboard['title']} | " in text

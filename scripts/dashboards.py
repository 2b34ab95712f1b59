"""The Grafana dashboards of the chart, from short definitions (scripts/dashboard_fleet.py, ..._service.py, ..._operator.py).

Every panel of a row has the same height; a row of 24 columns wraps as needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dashboard_fleet import FLEET
from dashboard_operator import OF_OPERATOR
from dashboard_parts import Annotation, Dashboard, Panel
from dashboard_service import ONE_SERVICE

DASHBOARDS = (FLEET, ONE_SERVICE, OF_OPERATOR)
FOLDER = "charts/fleetkeeper/files/dashboards"
COLUMNS = 24
HEIGHT = 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def generated_files() -> dict[str, str]:
    """Return {path: text}, for scripts/generate.py."""
    return {
        f"{FOLDER}/{dashboard.name}.json": json.dumps(_dashboard(dashboard), indent=1) + "\n"
        for dashboard in DASHBOARDS
    }


def _dashboard(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": f"fleetkeeper-{dashboard.name}",
        "title": f"Fleetkeeper / {dashboard.title}",
        "description": dashboard.description,
        "tags": ["fleetkeeper"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {
                "title": "Fleetkeeper",
                "type": "dashboards",
                "tags": ["fleetkeeper"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "annotations": {"list": [_annotation(each) for each in dashboard.annotations]},
        "templating": {"list": [_source_variable(), *_variables(dashboard)]},
        "panels": list(_panels(dashboard)),
    }


def _annotation(annotation: Annotation) -> dict[str, Any]:
    return {
        "name": annotation.name,
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "blue",
        "expr": annotation.query,
        "step": "15s",
        "titleFormat": annotation.title,
    }


def _source_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    }


def _variables(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    for variable in dashboard.variables:
        yield {
            "name": variable.name,
            "label": variable.label,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": variable.query, "refId": variable.name},
            "definition": variable.query,
            "refresh": 2,
            "sort": 1,
            "multi": variable.multi,
            "includeAll": variable.multi,
            **(
                {"allValue": ".*", "current": {"text": "All", "value": "$__all"}}
                if variable.multi
                else {}
            ),
        }


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for title, panels in dashboard.rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
            "panels": [],
        }
        x, y = 0, y + 1
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + HEIGHT
            number += 1
            yield _panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": HEIGHT})
            x += panel.width
        y += HEIGHT


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                **({} if panel.least is None else {"min": panel.least}),
                "custom": {"fillOpacity": 10, "showPoints": "never"},
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
            }
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }

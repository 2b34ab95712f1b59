"""Every alert is complete, names metrics that exist, and has its row and section in docs/alerts.md."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.docs_commands import ROOT
from tests.support.shipped_queries import alerts, exported, named, used_labels

PAGE = ROOT / "docs" / "alerts.md"
ALERTS = alerts()
NAMES = [alert["alert"] for alert in ALERTS]
GATEWAY_PAGE = ROOT / "docs" / "gateway.md"
NO_FAULT_OF_THE_GATEWAY = {
    "draining",
    "loop_detected",
    "request_timeout",
    "service_unavailable",
    "upstream_failed",
}
"""Errors 5xx that a service causes, a rollout, or a wrong address of a service."""
AT_ONCE = {"FleetkeeperDefect", "FleetkeeperUsageLost"}
"""Alerts on an event, which is over when it is seen."""


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_an_alert_is_complete(alert: dict[str, Any]) -> None:
    assert alert["labels"].keys() == {"severity"}
    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert ("for" in alert) == (alert["alert"] not in AT_ONCE)
    assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
    summary, description = alert["annotations"]["summary"], alert["annotations"]["description"]
    assert "{{" not in summary, "the page shows it as it is"
    assert summary.endswith(".")
    assert len(description.split(". ")) >= 2, "what and where, then what to do"


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_an_alert_names_series_that_are_exported(alert: dict[str, Any]) -> None:
    """And groups and selects by labels that one of them has."""
    known = exported()
    series = named(alert["expr"])
    assert series
    assert series <= known.keys()
    labels = {label for name in series for label in known[name]}
    assert used_labels(alert["expr"]) <= labels


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_a_description_uses_labels_of_the_result(alert: dict[str, Any]) -> None:
    """Another one would be empty in the notification."""
    used = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["description"]))
    first = re.search(r"\bby \(([^)]*)\)", alert["expr"])
    assert used <= ({label.strip() for label in first[1].split(",")} if first else set())


def test_the_page_has_a_row_and_a_section_for_each_alert() -> None:
    """In the order of the file, and none for an alert that does not exist."""
    text = PAGE.read_text()
    rows = [
        f"| [{alert['alert']}](#{alert['alert'].lower()}) | {alert['labels']['severity']} "
        f"| {alert.get('for', '0m')} | {alert['annotations']['summary']} |"
        for alert in ALERTS
    ]
    assert re.findall(r"^\| \[Fleetkeeper.*$", text, re.MULTILINE) == rows
    assert re.findall(r"^## (Fleetkeeper\w+)$", text, re.MULTILINE) == NAMES


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_a_runbook_link_leads_to_the_section_of_the_alert(alert: dict[str, Any]) -> None:
    path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert ROOT / path == PAGE
    assert anchor == alert["alert"].lower()


def test_the_alert_on_errors_of_the_gateway_knows_every_code() -> None:
    """And the page says what to do for each."""
    rows = re.findall(r"^\| 5\d\d \| (.*?) \|", GATEWAY_PAGE.read_text(), re.MULTILINE)
    made = {code for row in rows for code in re.findall(r"`(\w+)`", row)}
    (alert,) = (item for item in ALERTS if item["alert"] == "FleetkeeperGatewayErrors")
    (listed,) = re.findall(r'code=~"([^"]*)"', alert["expr"])
    codes = listed.split("|")
    assert made > NO_FAULT_OF_THE_GATEWAY
    assert codes == sorted(made - NO_FAULT_OF_THE_GATEWAY)
    section = PAGE.read_text().split("## FleetkeeperGatewayErrors")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == codes

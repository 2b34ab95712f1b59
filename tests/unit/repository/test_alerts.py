"""Every alert is complete, names metrics that exist, and has its row and section in docs/alerts.md."""

from __future__ import annotations

import re

from tests.support.chart.shipped_queries import alerts, exported, named, used_labels
from tests.support.docs_commands import ROOT

PAGE = ROOT / "docs" / "alerts.md"
ALERTS = alerts()
NAMES = [alert["alert"] for alert in ALERTS]
GATEWAY_PAGE = ROOT / "docs" / "gateway.md"
NO_FAULT_OF_THE_GATEWAY = {
    "draining",
    "hold_full",
    "loop_detected",
    "request_timeout",
    "service_asleep",
    "service_unavailable",
    "service_waking",
    "upstream_failed",
    "wake_failed",
}
"""Errors 5xx that a service causes, its sleep, a rollout, or a wrong address of a service."""
AT_ONCE = {"FleetkeeperDefect", "FleetkeeperUsageLost"}
"""Alerts on an event, which is over when it is seen."""


def test_an_alert_is_complete() -> None:
    for alert in ALERTS:
        name = alert["alert"]
        assert alert["labels"].keys() == {"severity"}, name
        assert alert["labels"]["severity"] in {"critical", "warning"}, name
        assert ("for" in alert) == (name not in AT_ONCE), name
        assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}, name
        summary, description = alert["annotations"]["summary"], alert["annotations"]["description"]
        assert "{{" not in summary, f"{name}: the page shows it as it is"
        assert summary.endswith("."), name
        assert len(description.split(". ")) >= 2, f"{name}: what and where, then what to do"


def test_an_alert_names_series_that_are_exported() -> None:
    """And groups and selects by labels that one of them has."""
    known = exported()
    for alert in ALERTS:
        series = named(alert["expr"])
        assert series, alert["alert"]
        assert series <= known.keys(), alert["alert"]
        labels = {label for name in series for label in known[name]}
        assert used_labels(alert["expr"]) <= labels, alert["alert"]


def test_a_description_uses_labels_of_the_result() -> None:
    """Another one would be empty in the notification."""
    for alert in ALERTS:
        used = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["description"]))
        first = re.search(r"\bby \(([^)]*)\)", alert["expr"])
        assert used <= ({label.strip() for label in first[1].split(",")} if first else set()), (
            alert["alert"]
        )


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


def test_a_runbook_link_leads_to_the_section_of_the_alert() -> None:
    for alert in ALERTS:
        path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert ROOT / path == PAGE, alert["alert"]
        assert anchor == alert["alert"].lower(), alert["alert"]


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

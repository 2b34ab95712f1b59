"""The generated pages name every command, setting, metric and reason that needs a person."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping

import pytest
from pydantic import SecretStr

from fleetkeeper.api.conditions import ConditionType, Reason
from fleetkeeper.autoscale.arbitrate import Allocation
from fleetkeeper.autoscale.gauges import counts_of
from fleetkeeper.autoscale.report import build_report
from fleetkeeper.autoscale.signals.backlog import Backlog
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.cli import app
from fleetkeeper.reconcile.status.gauges import gauges_of_service
from fleetkeeper.runtime.settings import Settings, load_settings
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from reference_metrics import (
    CONTROL_COUNTERS,
    CONTROL_GAUGES,
    NOTHING_TO_DO,
    STATE_GAUGES,
    STEP_MODEL,
)
from reference_metrics import generated_files as metric_pages
from reference_pages import generated_files as program_pages
from reference_pages import settings_rows
from tests.support.autoscale.control_cases import Loop
from tests.support.autoscale.exporters import SPEC, STATUS
from tests.support.docs_commands import ROOT

PAGES = {**program_pages(), **metric_pages()}
RUNBOOKS = ROOT / "docs" / "runbooks"
NEEDS_A_PAGE = sorted(reason for reason in Reason if reason not in NOTHING_TO_DO)
PARTS = [
    "What it means.",
    "How to confirm.",
    "What Fleetkeeper does.",
    "What to do.",
    "When it clears.",
]
"""The parts of a runbook, in order."""


EXAMPLES = {
    "prometheusUrl": "http://prometheus.monitoring:9090",
    "prometheusSelector": 'job="engines"',
    "prometheusBatchSelector": 'namespace="fleetkeeper-system"',
    "router.cpu": "2",
    "router.memory": "2Gi",
}
"""Texts of settings that do not take every text."""


def test_every_command_has_a_section() -> None:
    page = PAGES["docs/reference/cli.md"]
    for command in app.registered_commands:
        name = command.name or str(command.callback.__name__ if command.callback else "")
        assert f"## fleetkeeper {name.replace('_', '-')}\n" in page


def test_every_setting_can_be_set_by_the_variable_that_its_row_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shown by those whose value is a text: the operator's setting takes the variable's value."""
    names = {row.name for row in settings_rows()}
    assert {"namespaces", "router.roleKind", "leader.durationS"} <= names
    assert len(names) >= len(Settings.model_fields)
    for variable in list(os.environ):
        if variable.startswith("FLEETKEEPER_"):
            monkeypatch.delenv(variable)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("POD_UID", raising=False)
    for row in settings_rows():
        if row.kind != "text":
            continue
        variable = row.variable.strip("`").split("` `")[0]
        text = EXAMPLES.get(row.name, "text")
        with monkeypatch.context() as patch:
            patch.setenv(variable, text)
            value: object = load_settings()
            for part in row.name.split("."):
                value = getattr(value, re.sub(r"([A-Z])", r"_\1", part).lower())
            assert value in (text, SecretStr(text)), row.name


def test_every_metric_of_the_engines_contract_is_on_the_page() -> None:
    page = PAGES["docs/reference/metrics.md"]
    contract = json.loads((ROOT / "engine_image/schemas/metrics.json").read_text())
    for metric in contract["metrics"]:
        if not metric["name"].startswith(STEP_MODEL):
            assert f"| `{metric['name']}` | {metric['type']} |" in page
    assert f"`{STEP_MODEL}*_total`" in page


def test_every_metric_of_the_operator_is_on_the_page() -> None:
    page = PAGES["docs/reference/metrics.md"]
    for family in OperatorMetrics().registry.collect():
        if family.name.startswith("fleetkeeper"):
            assert f"`{family.name}" in page


def test_the_control_loops_gauges_are_those_of_the_page() -> None:
    """Names and labels, as a tick over a service makes them."""
    loop = Loop(settings=ControlSettings(restart_fragmented=True))
    loop.steady(6)
    backlog = Backlog(1e6, loop.now + 3600.0, 300.0, loop.now)
    decision = loop.tick(loop.samples(), backlog=backlog)
    report, _ = build_report(decision, Allocation(2), loop.memory, loop.now)
    assert _labels(report.metrics) == _listed(CONTROL_GAUGES)
    counters = {name.removesuffix("_total"): row for name, row in CONTROL_COUNTERS.items()}
    assert _labels(counts_of(decision, ())) == _listed(counters)


def test_the_gauges_of_a_services_state_are_those_of_the_page() -> None:
    status = {**STATUS, "engine": {"simulated": True}, "sleep": {"number": 1}}
    assert _labels(gauges_of_service(SPEC, status, 1)) == _listed(STATE_GAUGES)


def _labels(
    gauges: Iterable[tuple[str, tuple[tuple[str, str], ...], float]],
) -> dict[str, set[str]]:
    made: dict[str, set[str]] = {}
    for name, labels, _ in gauges:
        made.setdefault(name, set()).update(label for label, _ in labels)
    return made


def _listed(rows: Mapping[str, tuple[tuple[str, ...], str]]) -> dict[str, set[str]]:
    return {name: set(labels) for name, (labels, _) in rows.items()}


def test_a_reason_that_needs_a_person_has_a_page() -> None:
    """With its meaning, where it is seen, how to confirm it, what to do and when it clears."""
    for reason in NEEDS_A_PAGE:
        text = (RUNBOOKS / f"{reason}.md").read_text()
        assert text.startswith(f"# {reason}\n\n> {reason.text}\n"), reason
        assert re.findall(r"^\*\*(.+?)\*\*", text, re.MULTILINE) == PARTS, reason
        seen = re.findall(r"`(\w+)`", text.split("Seen in: ")[1].split("\n")[0])
        assert seen, reason
        assert set(seen) <= {str(kind) for kind in ConditionType}, reason


def test_no_page_is_about_a_reason_that_is_none() -> None:
    assert {file.stem for file in RUNBOOKS.glob("*.md")} == {*NEEDS_A_PAGE, "README"}


def test_every_reason_is_in_the_index() -> None:
    index = (RUNBOOKS / "README.md").read_text()
    for reason in Reason:
        assert f"| `{reason}` | {reason.text} |" in index

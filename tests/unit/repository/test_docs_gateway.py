"""The pages of the gateway name every setting, metric and error code of its processes, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from fleetkeeper_contract import batch_metrics
from fleetkeeper_gateway.http.paths import INFERENCE
from fleetkeeper_gateway.http.settings import ServeSettings
from reference_gateway import ENV_PREFIX, generated_files, metrics, settings, settings_classes
from tests.support.chart.shipped_queries import exported
from tests.support.docs_commands import ROOT

PAGE = ROOT / "docs/gateway.md"
PACKAGE = ROOT / "gateway/fleetkeeper_gateway"
CODE = re.compile(r"[a-z]+(_[a-z]+)+|draining|starting")
KINDS = {"Counter", "Gauge", "Histogram", "Summary"}
REFUSALS = {
    "Refusal": 1,
    "RefusedBodyError": 1,
    "unavailable": 0,
    "KeyRefused": 0,
    "HoldRefused": 0,
    "end_all": 0,
    "_refused": 0,
}
"""Where a call that makes an error body has its code."""


def test_every_setting_is_on_its_page_once() -> None:
    page = generated_files()["docs/reference/gateway-settings.md"]
    assert len(settings_classes()) >= 5
    named = re.findall(rf"^\| `({ENV_PREFIX}\w+)` \|", page, re.MULTILINE)
    assert len(named) == len(set(named))
    for one in settings_classes():
        assert {ENV_PREFIX + name.upper() for name in one.model_fields} <= set(named)


def test_settings_of_one_name_mean_the_same_to_all_parts() -> None:
    """Two processes get the same environment; one that reads a name otherwise would surprise."""
    by_name: dict[str, set[tuple[str, str]]] = {}
    for one in settings_classes():
        for name, info in one.model_fields.items():
            default = str(info.get_default(call_default_factory=True))
            by_name.setdefault(name, set()).add((str(info.annotation), default))
    assert {name: found for name, found in by_name.items() if len(found) > 1} == {}


def test_every_setting_has_a_description() -> None:
    assert [one.variable for one in settings().values() if not one.description.endswith(".")] == []


def test_every_metric_has_the_prefix_and_a_sentence_and_none_a_label_for_keys() -> None:
    found = metrics()
    assert len(found) > 20
    for metric in found:
        assert metric.meaning.endswith("."), metric
        assert not {"key", "key_id", "model", "client"} & set(metric.labels), metric


def test_metrics_in_the_source_are_those_of_the_page() -> None:
    """So none is made where the generator does not see it."""
    named = set()
    for path in PACKAGE.rglob("*.py"):
        if "prometheus_client" not in path.read_text():  # a Counter of collections is no metric
            continue
        for call in _calls(path):
            if _name(call).removesuffix("MetricFamily") in KINDS and call.args:
                first = call.args[0]
                if isinstance(first, ast.Name):  # the operator reads it by this name too
                    first = ast.Constant(vars(batch_metrics)[first.id])
                assert isinstance(first, ast.Constant), path
                named.add(str(first.value).removesuffix("_total"))
    assert named == {metric.name.removesuffix("_total") for metric in metrics()}


def test_pages_name_metrics_that_are_exported() -> None:
    """Of any program, in the prose and the tables of the guides."""
    known = exported()
    pages = [*(ROOT / "docs").glob("*.md")]
    assert PAGE in pages
    for page in pages:
        named = re.findall(
            r"`(fleetkeeper_(?:batch|gateway|grants?|usage)_\w+)[`{]", page.read_text()
        )
        wrong = {name for name in named if not {name, f"{name}_bucket"} & known.keys()}
        assert not wrong, f"{page.name} names metrics that nothing exports"


def test_the_page_names_every_error_code() -> None:
    told = {
        code
        for line in PAGE.read_text().split("## Errors")[1].splitlines()
        if re.match(r"\| \d{3}", line)
        for code in re.findall(r"`([a-z_]+)`", line.split("|")[2])
    }
    assert told
    assert told == _codes()


def test_the_page_names_settings_that_exist() -> None:
    known = {variable.removeprefix(ENV_PREFIX) for variable in settings()}
    told = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", PAGE.read_text()))
    assert told
    assert told <= known
    assert {name.upper() for name in ServeSettings.model_fields} & told


def test_the_page_promises_no_path_that_is_not_served() -> None:
    paths = re.findall(r"GATEWAY(/v1/[a-z/]+)", PAGE.read_text())
    assert paths
    for path in paths:
        assert path in INFERENCE | {"/v1/models"}, path


def _codes() -> set[str]:
    """Return the codes of all errors that the request path makes, from its source."""
    folders = (
        *(PACKAGE / name for name in ("http", "keys", "hold")),
        ROOT / "contract/fleetkeeper_contract/bodies",
    )
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    trees = [ast.parse(path.read_text()) for path in paths]
    constants = {name: value for tree in trees for name, value in _constants(tree)}
    found = {code for tree in trees for code in _aborts(tree)}
    for call in (call for path in paths for call in _calls(path)):
        place = REFUSALS.get(_name(call), len(call.args))
        for code in call.args[place : place + 1]:
            if isinstance(code, ast.Constant):
                found.add(str(code.value))
            elif isinstance(code, ast.Name):
                found.add(constants.get(code.id, ""))
    return {code for code in found if CODE.fullmatch(code)}


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            yield from (
                (t.id, str(node.value.value)) for t in node.targets if isinstance(t, ast.Name)
            )


def _aborts(tree: ast.Module) -> Iterator[str]:
    """Yield the codes in the table of aborts that are answered: status, code, message, type."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple) and len(node.elts) == 4:
            status, code = node.elts[:2]
            if isinstance(status, ast.Constant) and isinstance(code, ast.Constant):
                yield str(code.value)


def _calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")

"""`fleetkeeper simulate-pool`: its report, its JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fleetkeeper import cli

pytestmark = pytest.mark.slow

SERVICE = """\
apiVersion: fleetkeeper.io/v1alpha1
kind: InferenceService
metadata: {name: rare, namespace: team-a}
spec:
  model: {source: pvc://models/llama-3.1-8b}
  access: Gateway
  scaling: {sleep: {afterIdleSeconds: 60, minAwakeSeconds: 60}}
"""
POOL = ("--hardware", "h100-8b", "--max-accelerators", "2", "--hours", "1", "--seeds", "1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "rare.yaml").write_text(SERVICE)
    return tmp_path


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["simulate-pool", "-f", "rare.yaml", *arguments])


def test_the_report_has_all_alternatives() -> None:
    what_if = ("--what-if", "scaling.sleep.afterIdleSeconds=300")
    done = simulate(*POOL, "--models", "12", "--requests-per-day", "2000", *what_if)
    assert done.exit_code == 0, done.output
    for words in ("12 services", "2 GPUs", "2000 requests a day", "keda", "always-on", "GIVEN"):
        assert words in done.stdout
    assert "scaling.sleep.afterIdleSeconds=300" in done.stdout
    assert done.stderr == ""


def test_json_has_the_figures_of_each_copy() -> None:
    done = simulate(*POOL, "--models", "12", "--zipf", "2", "--json")
    report = json.loads(done.stdout)
    assert [row["name"] for row in report["alternatives"]] == ["fleetkeeper", "keda", "always-on"]
    ours, _, always_on = report["alternatives"]
    assert list(ours["services"])[::11] == ["rare-01", "rare-12"]
    assert ours["figures"]["peak_gpus"]["median"] <= 2
    assert always_on["figures"]["gpu_hours"]["median"] == 12.0
    assert always_on["figures"]["budget_wait"]["median"] is None
    assert report["max_accelerators"] == 2


def test_the_services_of_a_file_are_played_as_they_are(folder: Path) -> None:
    other = SERVICE.replace("rare,", "other,").replace("60, min", "300, min")
    (folder / "rare.yaml").write_text(f"{SERVICE}---\n{other}")
    report = json.loads(simulate(*POOL, "--json").stdout)
    assert list(report["alternatives"][0]["services"]) == ["rare", "other"]
    done = simulate(*POOL, "--models", "3")
    assert done.exit_code == 2
    assert "--models" in done.output
    assert "there are 2" in done.output


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("  access: Gateway\n", ""), ("rare.yaml:", "spec.access is not Gateway")),
        ((", minAwakeSeconds: 60}", ", minAwakeSeconds: 60}, mode: Advisory"), ("spec.scaling.mode",)),
        (("sleep: {afterIdleSeconds: 60, minAwakeSeconds: 60}", ""), ("add scaling.sleep",)),
    ],
)  # fmt: skip
def test_a_service_that_never_sleeps_is_refused(
    folder: Path, changed: tuple[str, str], words: tuple[str, ...]
) -> None:
    (folder / "rare.yaml").write_text(SERVICE.replace(*changed))
    done = simulate(*POOL)
    assert done.exit_code == 64
    for each in ("team-a/rare", *words):
        assert each in done.output


def test_a_budget_that_wakes_nothing_is_refused(folder: Path) -> None:
    (folder / "rare.yaml").write_text(SERVICE.replace("{sleep:", "{minReplicas: 3, sleep:"))
    done = simulate(*POOL)
    assert done.exit_code == 2
    assert "2 is less than team-a/rare needs while it is awake (3)" in done.output

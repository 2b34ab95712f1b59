"""A simulated service is not mistaken for a real one: `check`, `top`, `explain`, `simulate`, the console."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fleetkeeper import cli
from fleetkeeper.api.profiles.defaults import simulated_catalog
from fleetkeeper.api.profiles.simulation import Simulation
from fleetkeeper.commands.fleet.top import fleet_table
from fleetkeeper.console.documents import fleet_document
from fleetkeeper.console.samples import Samples
from fleetkeeper.fleet.explanation import explained
from fleetkeeper.fleet.source import Fleet
from fleetkeeper.fleet.view import view_of
from fleetkeeper.simulate.service_model import SIMULATED_START_S, simulated_hardware
from fleetkeeper_steps.hardware import known_hardware
from tests.unit.fleet.test_fleet_view import NOW, printed, service

ENGINE = {"profile": "simulated-0.32.0-1", "requested": "simulated", "version": "0.32.0"}
LOAD = ("--pattern", "constant", "--rate", "2", "--minutes", "2", "--seeds", "1", "--json")


def _file(directory: Path, *, source: str = "hf://example/llama", **spec: Any) -> str:
    model = {"source": source, **({"revision": "a" * 40} if source.startswith("hf") else {})}
    manifest = {
        "apiVersion": "fleetkeeper.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "chat"},
        "spec": {"model": model, "engine": {"profile": "simulated"}, **spec},
    }
    file = directory / "chat.yaml"
    file.write_text(json.dumps(manifest))
    return str(file)


def _settings(directory: Path, simulation: dict[str, Any]) -> str:
    """Write the operator's settings with a simulated profile of this content."""
    catalog = simulated_catalog().to_manifest()
    catalog["profiles"][-1]["simulation"] = simulation
    profiles, settings = directory / "profiles.yaml", directory / "settings.yaml"
    profiles.write_text(yaml.safe_dump(catalog))
    settings.write_text(yaml.safe_dump({"profilesFile": str(profiles)}))
    return str(settings)


def _ran(*words: str) -> str:
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("source", ["hf://example/llama", "pvc://models/x"])
def test_check_says_that_no_model_answers(tmp_path: Path, source: str) -> None:
    """And gives no advice about a model that is not read."""
    said = _ran("check", "-f", _file(tmp_path, source=source))
    assert "engine       simulated (step times of h100-8b, speed 1), profile simulated" in said
    assert "no model answers" in said
    assert "model.cache" not in said
    assert "  accelerators " not in said


def test_check_names_what_the_profile_simulates(tmp_path: Path) -> None:
    settings = _settings(
        tmp_path, {"hardware": "h200-8b", "speed": 2.5, "faults": [{"kind": "Crash"}]}
    )
    said = _ran("check", "-f", _file(tmp_path), "--settings", settings)
    assert "simulated (step times of h200-8b, speed 2.5, faults Crash)" in said


def test_a_service_of_another_profile_is_not_called_simulated(tmp_path: Path) -> None:
    said = _ran("check", "-f", _file(tmp_path, engine={"profile": "cpu"}))
    assert "simulated" not in said
    view = view_of(service(engine={**ENGINE, "profile": "cuda-0.32.0-1"}), {})
    assert "simulated" not in printed(fleet_table([view], NOW))
    assert "simulated" not in explained(view, NOW).replace("simulated-0.32.0-1", "")


def test_top_and_explain_mark_a_simulated_service() -> None:
    view = view_of(service(engine={**ENGINE, "simulated": True}), {})
    assert "team-a/chat (simulated)" in printed(fleet_table([view], NOW))
    said = explained(view, NOW)
    assert said.startswith("team-a/chat (simulated): current state")
    assert "Engine: simulated (profile simulated-0.32.0-1): no model answers" in said


def test_simulate_takes_the_hardware_of_the_profile(tmp_path: Path) -> None:
    """A replica has no accelerator, which is no mistake here."""
    file, settings = _file(tmp_path), _settings(tmp_path, {"hardware": "a100-8b"})
    of_profile = json.loads(_ran("simulate", "-f", file, "--settings", settings, *LOAD))
    given = json.loads(_ran("simulate", "-f", file, "--hardware", "a100-8b", *LOAD))
    assert of_profile["hardware"]["name"] == given["hardware"]["name"] == "a100-8b"


def test_simulate_still_asks_for_the_hardware_of_other_profiles(tmp_path: Path) -> None:
    words = ["simulate", "-f", _file(tmp_path, engine={"profile": "cpu"}), *LOAD]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 2
    assert "--hardware" in done.output


def test_the_default_simulation_is_the_fit_of_the_package() -> None:
    found, fit = simulated_hardware(Simulation()), known_hardware()["h100-8b"]
    assert replace(found, cold_start_s=fit.cold_start_s) == fit
    assert found.cold_start_s == SIMULATED_START_S


def test_steps_take_their_time_divided_by_the_speed() -> None:
    slow = simulated_hardware(Simulation())
    fast = simulated_hardware(Simulation(speed=4.0, kv_capacity_tokens=1000))
    for step in ((0, 1, 0), (512, 30, 9000, 4e5, 2)):
        assert fast.step_time_s(*step) == pytest.approx(slow.step_time_s(*step) / 4.0)
    assert fast.kv_capacity_tokens == 1000


def test_own_costs_replace_those_of_the_hardware() -> None:
    costs = dict.fromkeys(("t0", "w", "g", "b", "c", "q", "request"), 0.0)
    simulation = Simulation.model_validate(
        {
            "costs": {f"{name}Seconds": value for name, value in {**costs, "t0": 0.01}.items()},
            "startSeconds": {"weights": 10, "load": 5, "warmUp": 1},
        }
    )
    found = simulated_hardware(simulation)
    assert found.step_time_s(512, 30, 9000, 4e5, 2) == pytest.approx(0.01)
    assert found.cold_start_s == SIMULATED_START_S + 16


def test_the_console_marks_a_simulated_service() -> None:
    samples = Samples()
    for is_simulated in (True, False):
        status = {"engine": {**ENGINE, **({"simulated": True} if is_simulated else {})}}
        samples.add(Fleet([service(**status)], {}), NOW)
        (row,) = fleet_document(samples)["services"]
        assert row["simulated"] is is_simulated

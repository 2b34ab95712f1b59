"""The start of a simulated engine: vLLM's arguments, and nothing that needs a model or a device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fleetkeeper_contract.exit_codes import DeathClass
from fleetkeeper_engine.devices.cpu import PodMemory
from fleetkeeper_engine.simulated.options import parse_options
from fleetkeeper_engine.simulated.simulation_settings import (
    ENVIRONMENT,
    SimulationSettings,
    TimedFault,
)
from fleetkeeper_engine.spec import InvalidDocumentError, parse_document
from fleetkeeper_engine.supervisor.launch.errors import StartRefusedError
from fleetkeeper_engine.supervisor.launch.prepare import prepare
from fleetkeeper_engine.supervisor.launch.prepared import Prepared
from fleetkeeper_steps.hardware import known_hardware

GIB = 1024**3


async def forbidden(*_: object) -> NoReturn:
    raise AssertionError("a simulated engine needs no other process")


def text_of(simulation: dict[str, Any], **more: Any) -> str:
    document = {
        "contract": 1,
        "accelerator": "cpu",
        "model": {
            "source": "org/no-such-model",
            "servedName": "chat",
            "adapters": [{"name": "poet", "path": "org/poet"}],
        },
        "engine": {"maxModelLength": 4096, "tensorParallelSize": 4},
        "memory": {"limitBytes": GIB},
        "simulation": simulation,
        **more,
    }
    return json.dumps(document)


async def prepared(simulation: dict[str, Any], directory: Path) -> Prepared:
    return await prepare(
        parse_document(text_of(simulation)), {"PATH": "/bin"}, directory, forbidden
    )


async def test_the_child_gets_vllms_arguments(tmp_path: Path) -> None:
    found = await prepared({}, tmp_path)
    assert found.argv[:3] == [sys.executable, "-m", "fleetkeeper_engine.simulated"]
    options = parse_options(found.argv[3:])
    assert (options.model, options.max_model_len) == ("org/no-such-model", 4096)
    assert options.served_model_names == ("chat",)
    assert options.adapters == {"poet": "org/poet"}
    assert found.features.vllm_version.startswith("simulated-")
    assert isinstance(found.devices, PodMemory)
    assert found.plan.kv_cache_bytes is None


@pytest.mark.parametrize("name", ["h100-8b", "h100-70b"])
async def test_the_hardwares_fit_is_resolved(name: str, tmp_path: Path) -> None:
    found = await prepared({"hardware": name, "speed": 2.5}, tmp_path)
    settings = SimulationSettings.of_environment(found.environment)
    hardware = known_hardware()[name]
    assert settings.costs == tuple(hardware.costs)
    assert settings.kv_capacity_tokens == hardware.kv_capacity_tokens
    assert settings.speed == 2.5


async def test_own_coefficients_stages_and_faults_reach_the_child(tmp_path: Path) -> None:
    costs = {f"{name}Seconds": 0.001 * place for place, name in enumerate("twgbcq")}
    costs["t0Seconds"] = costs.pop("tSeconds")
    found = await prepared(
        {
            "costs": costs,
            "kvCapacityTokens": 1600,
            "seed": 9,
            "startSeconds": {"weights": 1.5, "warmUp": 2},
            "faults": [{"kind": "Freeze", "afterSeconds": 3.5}, {"kind": "Crash"}],
        },
        tmp_path,
    )
    assert SimulationSettings.of_environment(found.environment) == SimulationSettings(
        costs=(0.0, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0),
        kv_capacity_tokens=1600,
        seed=9,
        weights_s=1.5,
        warm_up_s=2.0,
        faults=(TimedFault("Freeze", 3.5), TimedFault("Crash", 0.0)),
    )


async def test_an_unknown_hardware_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(StartRefusedError, match="h100-8b") as refused:
        await prepared({"hardware": "h900-8b"}, tmp_path)
    assert refused.value.death is DeathClass.BAD_ENGINE_OPTION


@pytest.mark.parametrize(
    ("simulation", "named"),
    [
        ({"speed": 0}, "simulation.speed"),
        ({"speed": 1001}, "simulation.speed"),
        ({"faults": [{"kind": "Fire"}]}, "simulation.faults.0.kind"),
        ({"faults": [{"kind": "Crash"}] * 9}, "simulation.faults"),
        ({"startSeconds": {"load": 3601}}, "simulation.startSeconds.load"),
        ({"costs": {"t0Seconds": 0.1}}, "simulation.costs.wSeconds"),
        ({"kvCapacityTokens": 1}, "simulation.kvCapacityTokens"),
        ({"model": "x"}, "simulation.model"),
    ],
)
def test_a_wrong_simulation_is_named(simulation: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidDocumentError, match=named):
        parse_document(text_of(simulation))


def test_a_simulated_engine_has_no_cuda_device() -> None:
    with pytest.raises(InvalidDocumentError, match="accelerator cpu"):
        parse_document(text_of({}, accelerator="cuda"))


async def test_a_process_without_settings_says_who_starts_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fleetkeeper-engine"):
        SimulationSettings.of_environment({})
    found = await prepared({}, tmp_path)
    assert ENVIRONMENT in found.environment

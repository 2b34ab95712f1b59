"""A memory cap above 80%: the profile allows it, and every part uses the same number."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from fleetkeeper import cli
from fleetkeeper.api.parse import parse_service
from fleetkeeper.api.profiles.errors import profile_errors
from fleetkeeper.api.profiles.profile import EngineProfile, ProfileCatalog
from fleetkeeper.autoscale.memory import ControlMemory
from fleetkeeper.common.values import Remedy
from fleetkeeper.reconcile.context import PlanContext, default_context
from fleetkeeper.reconcile.manifests.engine_pod import desired_engine_template
from fleetkeeper.runtime.autoscaler.inputs import read_settings
from fleetkeeper_engine.spec import parse_document
from fleetkeeper_engine.supervisor.launch.argv import desired_argv, desired_vllm_settings
from fleetkeeper_engine.supervisor.launch.memory_plan import CpuNeeds, plan_cpu, plan_device
from tests.support.reconcile.plan_cluster import settle
from tests.support.reconcile.plan_world import new_world, service
from tests.unit.engine.test_argv import LAUNCH

GIB = 1024**3
CPU_90: dict[str, Any] = {
    "name": "cpu-0.32.0-2",
    "accelerator": "cpu",
    "vllmVersion": "0.32.0",
    "delivery": "baked",
    "image": "fleetkeeper-engine-cpu:0.1.0",
    "resources": {"cpu": "4", "memory": "16Gi", "sharedMemory": "1Gi"},
    "maxCapPercent": 90,
}


def with_profile() -> PlanContext:
    """The default settings with a profile that allows 90%."""
    default = default_context()
    catalog = ProfileCatalog(
        profiles=(*default.catalog.profiles, EngineProfile.model_validate(CPU_90)),
        aliases=default.catalog.aliases,
    )
    return replace(default, catalog=catalog)


def asking(percent: int, profile: str = "cpu-0.32.0-2") -> dict[str, Any]:
    return service(engine={"profile": profile}, memory={"capPercent": percent})


@pytest.mark.parametrize("percent", [79, 96, 100])
def test_a_profile_allows_from_80_to_95_percent(percent: int) -> None:
    with pytest.raises(ValidationError, match="maxCapPercent"):
        EngineProfile.model_validate({**CPU_90, "maxCapPercent": percent})
    assert EngineProfile.model_validate({**CPU_90, "maxCapPercent": 95}).max_cap_percent == 95


def test_a_service_can_ask_for_at_most_what_its_profile_allows() -> None:
    context = with_profile()
    allowed = context.catalog.resolve("cpu-0.32.0-2")
    assert profile_errors(parse_service(asking(90)).spec, allowed) == []
    (error,) = profile_errors(parse_service(asking(91)).spec, allowed)
    assert error.path == "spec.memory.capPercent"
    assert "is 91" in error.message
    assert "cpu-0.32.0-2 allows at most 90" in error.message
    (default,) = profile_errors(parse_service(asking(81)).spec, context.catalog.resolve("cpu"))
    assert "at most 80" in default.message


def test_the_controller_refuses_more_than_the_profile_allows_in_the_status() -> None:
    refused = settle(replace(new_world(), resource=asking(91), context=with_profile()))
    assert refused.condition("Ready") == ("False", "InvalidSpec")
    (ready,) = [item for item in refused.status["conditions"] if item["type"] == "Ready"]
    assert "spec.memory.capPercent" in ready["message"]
    assert "at most 90" in ready["message"]
    assert not refused.children


def test_plan_allocator_and_measurement_use_the_number_of_the_spec() -> None:
    """The document, both plans, the plugin's settings, and the control loop's settings."""
    context = with_profile()
    chat = parse_service(asking(90))
    profile = context.catalog.resolve("cpu-0.32.0-2")
    (engine,) = desired_engine_template(chat, profile, context)["spec"]["containers"]
    variables = {entry["name"]: entry.get("value", "") for entry in engine["env"]}
    document = parse_document(variables["FLEETKEEPER_ENGINE"])
    percent = document.memory.cap_percent
    assert percent == 90
    assert desired_vllm_settings(document, "token").cap_percent == 90
    cpu = plan_cpu(limit_bytes=10 * GIB, cap_percent=percent, needs=CpuNeeds(GIB, GIB, 1, 8 * GIB))
    assert cpu.cap_bytes == 9 * GIB
    assert cpu.kv_cache_bytes == 7 * GIB
    cuda = plan_device(
        total_bytes=80 * GIB, cap_percent=percent, reserve_bytes=GIB, weights_bytes_per_rank=GIB
    )
    assert "--gpu-memory-utilization=0.8875" in desired_argv(document, cuda, LAUNCH)
    assert read_settings(chat, ControlMemory(), context.catalog).cap_percent == 90


@pytest.mark.parametrize("known", ["cpu-0.32.0-2", None])
def test_the_control_loop_measures_a_refused_spec_with_what_the_profile_allows(
    known: str | None,
) -> None:
    """Engines with 90% keep running while the spec asks for 95%, which the profile refuses."""
    resource = asking(95)
    if known:
        resource["status"] = {"engine": {"profile": known, "requested": known}}
    catalog = with_profile().catalog
    assert read_settings(parse_service(resource), ControlMemory(), catalog).cap_percent == 90
    unknown = parse_service(asking(95, "gone"))
    assert read_settings(unknown, ControlMemory(), catalog).cap_percent == 95


def test_a_remedy_lowers_a_raised_cap() -> None:
    chat = parse_service(asking(90))
    memory = ControlMemory(remedy=Remedy("CUDAOutOfMemory", 128, 85, 3, 1, 0.0))
    assert read_settings(chat, memory, with_profile().catalog).cap_percent == 85


def test_check_refuses_and_shows_the_number_that_holds(tmp_path: Path) -> None:
    """`fleetkeeper check --settings` with the operator's profiles, without a cluster."""
    profiles = tmp_path / "profiles.yaml"
    profiles.write_text(yaml.safe_dump({"profiles": [CPU_90], "aliases": {}}))
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump({"profilesFile": str(profiles)}))
    file = tmp_path / "chat.yaml"

    def check(percent: int) -> Any:
        file.write_text(json.dumps(asking(percent)))
        words = ["check", "-f", str(file), "--settings", str(settings)]
        return CliRunner().invoke(cli.app, words)

    assert "90% x 16.0 GiB = 14.4 GiB" in check(90).output
    refused = check(91)
    assert refused.exit_code != 0
    assert "spec.memory.capPercent: is 91" in refused.output

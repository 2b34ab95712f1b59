"""Arguments of vLLM that an engine profile adds, from the profile to the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from fleetkeeper import cli
from fleetkeeper.api.parse import parse_service
from fleetkeeper.api.profiles.errors import profile_errors
from fleetkeeper.api.profiles.profile import EngineProfile, ProfileCatalog
from fleetkeeper.reconcile.context import PlanContext, default_context
from fleetkeeper.reconcile.manifests.engine_document import EngineOptionRefused
from fleetkeeper.reconcile.manifests.engine_pod import desired_engine_template
from fleetkeeper_contract.extra_arguments import MAX_LENGTH, argument_errors
from fleetkeeper_contract.vllm_options import RESERVED, Setter
from fleetkeeper_engine.spec import EngineDocument, parse_document
from fleetkeeper_engine.supervisor.launch.argv import desired_argv
from tests.support.reconcile.plan_cluster import settle
from tests.support.reconcile.plan_world import new_world, service
from tests.unit.engine.test_argv import LAUNCH, PLAN

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = ROOT / "engine_image" / "schemas" / "engine-document.schema.json"
NAME = "cpu-0.32.0-2"
PROFILE: dict[str, Any] = {
    "name": NAME,
    "accelerator": "cpu",
    "vllmVersion": "0.32.0",
    "delivery": "baked",
    "image": "fleetkeeper-engine-cpu:0.1.0",
    "resources": {"cpu": "4", "memory": "16Gi", "sharedMemory": "1Gi"},
}
ARGUMENTS = [
    '--kv-transfer-config={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}',
    "--compilation_config.mode=3",
    "--no-enable-chunked-prefill",
    "--tool-call-parser=hermes",
]


def a_profile(*arguments: str) -> EngineProfile:
    return EngineProfile.model_validate({**PROFILE, "extraArguments": list(arguments)})


def with_profile(*arguments: str) -> PlanContext:
    """The default settings with a profile that adds these arguments."""
    default = default_context()
    catalog = ProfileCatalog(
        profiles=(*default.catalog.profiles, a_profile(*arguments)),
        aliases=default.catalog.aliases,
    )
    return replace(default, catalog=catalog)


def chat(**options: str) -> dict[str, Any]:
    named = {name.replace("_", "-"): value for name, value in options.items()}
    return service(engine={"profile": NAME, "options": named})


def written(text: dict[str, Any], profile: EngineProfile) -> tuple[dict[str, Any], EngineDocument]:
    """The engine document as JSON and as the engine reads it."""
    template = desired_engine_template(parse_service(text), profile, default_context())
    (engine,) = template["spec"]["containers"]
    value = next(entry["value"] for entry in engine["env"] if entry["name"] == "FLEETKEEPER_ENGINE")
    return json.loads(value), parse_document(value)


def test_arguments_arrive_on_the_command_line_as_written_and_before_fleetkeepers() -> None:
    raw, document = written(chat(seed="7"), a_profile(*ARGUMENTS))
    jsonschema.validate(raw, json.loads(SCHEMA.read_text()))
    assert raw["engine"]["profile"] == {"name": NAME, "extraArguments": ARGUMENTS}
    command = desired_argv(document, PLAN, LAUNCH)
    assert command[3 : 3 + len(ARGUMENTS)] == ARGUMENTS
    assert command[3 + len(ARGUMENTS)] == "--model=/models/m"
    assert command[-1] == "--seed=7"


def test_a_profile_without_arguments_leaves_the_document_as_it_was() -> None:
    """An upgrade restarts nothing: golden files pin the whole template."""
    raw, document = written(chat(), EngineProfile.model_validate(PROFILE))
    assert "profile" not in raw["engine"]
    assert document.engine.profile is None


def test_a_profile_that_decides_about_compilation_is_not_overruled() -> None:
    launch = replace(LAUNCH, eager=True)
    _, document = written(chat(), a_profile("--no-enforce-eager"))
    command = desired_argv(document, PLAN, launch)
    assert "--no-enforce-eager" in command
    assert "--enforce-eager" not in command


@pytest.mark.promise("no-data-parallel")
@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--max-num-seqs=8", "is set by batching.maxSequences of services"),
        ("--max_num_seqs=8", "is set by batching.maxSequences of services"),
        ("--max-num-se=8", "can mean --max-num-seqs"),
        ("--gpu-memory-utilization.x=1", "is set by memory.capPercent"),
        ("--no-enable-prefix-caching", "is set by engine.prefixCaching"),
        ("--no-enable_prefix", "can mean --enable-prefix-caching"),
        ("--sched", "can mean --scheduler-cls"),
        ("--ssl-keyfile=/k", "that Fleetkeeper manages"),
        ("--ss=/k", "can mean --ssl-"),
        ("--data-parallel-size=2", "that Fleetkeeper manages"),
        ("--spec-tokens=3", "is set by engine.options"),
        ("--enable-sleep-mode", "would bypass the memory cap"),
        ("--config=/etc/x.yaml", "reads options from a file"),
        ("--con=/etc/x.yaml", "can mean --config"),
        ("--trust-remote-code", "runs the code of any model"),
        ("--help", "starts no engine"),
        ("--enforce", "abbreviates --enforce-eager"),
        ("--compilation-config.mode", "needs a value"),
        ("--seed=$(SEED)", "Kubernetes would replace"),
        ("--seed=1\n", "printable"),
        ("--seed 1", "is malformed"),
        ("-tp=2", "extraArguments"),
        ("seed=1", "extraArguments"),
        ("--Seed=1", "extraArguments"),
        (f"--seed={'1' * MAX_LENGTH}", "2048"),
    ],
)
def test_a_catalog_with_an_argument_that_cannot_be_added_is_refused(
    argument: str, says: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        a_profile(argument)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--seed=1", "--seed=2"),
        ("--enforce-eager", "--no-enforce_eager"),
        ("--compilation-config={}", "--compilation_config.mode=3"),
        ("--compilation-config.mode=3", "--compilation-config={}"),
        ("--compilation-config.mode=3", "--compilation-config.mode=2"),
    ],
)
def test_an_option_that_is_set_twice_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError, match="is set twice"):
        a_profile(*arguments)


def test_fields_of_one_option_and_options_that_services_cannot_set_are_accepted() -> None:
    accepted = (
        "--compilation-config.mode=3",
        "--compilation-config.pass_config.fuse_norm_quant=true",
        "--chat-template=/templates/chat.jinja",
        "--tokenizer=/models/tokenizer",
        "--model-impl=transformers",
        "--cpu-offload-gb=4",
        "--config-format=hf",
    )
    assert a_profile(*accepted).extra_arguments == accepted


@given(
    name=st.sampled_from([key for key in RESERVED if Setter.PROFILE not in RESERVED[key].setters]),
    cut=st.integers(1, 60),
    negated=st.booleans(),
    underscores=st.booleans(),
    end=st.sampled_from(["", "=1", ".a=1", ".a.b+=1"]),
)
def test_no_spelling_of_a_reserved_option_is_accepted(
    name: str, cut: int, negated: bool, underscores: bool, end: str
) -> None:
    short = name[:cut].rstrip("-")
    spelled = short.replace("-", "_") if underscores else short
    assert argument_errors([f"--{'no-' * negated}{spelled}{end}"])


def test_a_service_cannot_set_what_its_profile_sets() -> None:
    profile = a_profile("--no-enable-chunked-prefill", "--tool_call_parser=hermes")
    spec = parse_service(chat(enable_chunked_prefill="true")).spec
    (error,) = profile_errors(spec, profile)
    assert error.path == "spec.engine.options.enable-chunked-prefill"
    assert f"is set by the engine profile {NAME}" in error.message
    with pytest.raises(EngineOptionRefused, match=NAME):
        written(chat(tool_call_parser="hermes"), profile)


def test_the_profile_can_set_the_option_that_a_services_option_requires() -> None:
    spec = parse_service(chat(enable_auto_tool_choice="true")).spec
    assert profile_errors(spec, a_profile("--tool-call-parser=hermes")) == []
    (error,) = profile_errors(spec, EngineProfile.model_validate(PROFILE))
    assert "requires the option tool-call-parser" in error.message


def test_the_controller_names_the_profile_in_the_status() -> None:
    world = replace(new_world(), resource=chat(seed="1"), context=with_profile("--seed=2"))
    refused = settle(world)
    assert refused.condition("Ready") == ("False", "BadEngineOption")
    (ready,) = [item for item in refused.status["conditions"] if item["type"] == "Ready"]
    assert f"spec.engine.options.seed: is set by the engine profile {NAME}" in ready["message"]
    assert not refused.children


def check(tmp_path: Path, argument: str, **options: str) -> Any:
    """`fleetkeeper check --settings` with a profile that adds this argument."""
    profiles, settings, file = (tmp_path / name for name in ("p.yaml", "s.yaml", "chat.yaml"))
    profiles.write_text(
        yaml.safe_dump({"profiles": [{**PROFILE, "extraArguments": [argument]}], "aliases": {}})
    )
    settings.write_text(yaml.safe_dump({"profilesFile": str(profiles)}))
    file.write_text(json.dumps(chat(**options)))
    return CliRunner().invoke(cli.app, ["check", "-f", str(file), "--settings", str(settings)])


def test_check_refuses_a_catalog_and_a_service(tmp_path: Path) -> None:
    assert check(tmp_path, "--seed=2").exit_code == 0
    conflict = check(tmp_path, "--seed=2", seed="1")
    assert conflict.exit_code != 0
    assert f"spec.engine.options.seed: is set by the engine profile {NAME}" in conflict.output
    catalog = check(tmp_path, "--host=::")
    assert catalog.exit_code != 0
    assert "--host is set by Fleetkeeper" in catalog.output

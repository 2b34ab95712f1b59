"""What the outside sees of the engine package, held against accidental change.

vLLM, Kubernetes, the operator, pip and users of the command line know these names. A test here fails
when one of them changes, so a change of it is made on purpose.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetkeeper_contract.exit_codes import EXIT_CODES, DeathClass
from fleetkeeper_contract.tiers import TIER_LABELS
from fleetkeeper_engine import cli
from fleetkeeper_engine.cli import DEFAULT_RUN, DEFAULT_TERMINATION, RUN_ENVIRONMENT
from fleetkeeper_engine.cli import TERMINATION_ENVIRONMENT as TERMINATION
from fleetkeeper_engine.in_vllm.vllm_settings import ENVIRONMENT as SETTINGS
from fleetkeeper_engine.in_vllm.vllm_settings import (
    INTERNAL_HEADER,
    MIDDLEWARE,
    SCHEDULER_FACTORY,
    TRACED_MIDDLEWARE,
)
from fleetkeeper_engine.shm.region import ENVIRONMENT as REGION
from fleetkeeper_engine.spec import ENVIRONMENT as DOCUMENT
from fleetkeeper_engine.supervisor.control_api.auth import KEYS_FILE
from fleetkeeper_engine.supervisor.control_api.metric_table import METRICS
from fleetkeeper_engine.supervisor.drain_socket import DRAIN_SOCKET
from fleetkeeper_engine.supervisor.launch import fetch
from fleetkeeper_engine.supervisor.launch.downloads import PACKAGE_PATH
from fleetkeeper_engine.supervisor.limits_requests import LimitsRequest
from fleetkeeper_engine.supervisor.policy_file import POLICY_FILE
from fleetkeeper_engine.supervisor.termination import Death
from fleetkeeper_engine.tools.install import LAUNCHER

ROOT = Path(__file__).resolve().parents[3]
CONTRACT = ROOT / "engine_image" / "schemas"

NAMED_TO_OTHERS = {
    "console script": "fleetkeeper_engine.cli:main",
    "vLLM plugin": "fleetkeeper_engine.in_vllm.plugin:register",
    "--scheduler-cls": "fleetkeeper_engine.in_vllm.scheduler.live_scheduler",
    "--middleware": "fleetkeeper_engine.in_vllm.http.middleware.TierMiddleware",
    "--middleware with tracing": "fleetkeeper_engine.in_vllm.http.tracing.TracedTierMiddleware",
}
"""Dotted paths that pip and vLLM resolve. This is the one place that spells them out."""

RUN_AS_MODULES = (
    "fleetkeeper_engine.cli",
    "fleetkeeper_engine.supervisor.launch.fetch",
    "fleetkeeper_engine.supervisor.launch.cpu_probe",
)
"""Started with `python -m`."""

METRIC_FAMILIES = """
fleetkeeper_arrivals_squared_total counter tier
fleetkeeper_arrivals_total counter tier
fleetkeeper_batch_sequences histogram
fleetkeeper_batch_time_seconds histogram
fleetkeeper_batch_tokens histogram
fleetkeeper_control_keys gauge kid
fleetkeeper_control_requests_total counter code
fleetkeeper_draining gauge
fleetkeeper_engine_info gauge vllm_version accelerator contract
fleetkeeper_engine_metrics_up gauge
fleetkeeper_generation_tokens_total counter
fleetkeeper_grants_demanded gauge
fleetkeeper_grants_refused_total counter reason
fleetkeeper_hung gauge
fleetkeeper_idle_seconds gauge
fleetkeeper_inter_token_latency_seconds histogram tier
fleetkeeper_kv_capacity_tokens gauge
fleetkeeper_kv_resident_tokens gauge
fleetkeeper_limit_generation gauge kind
fleetkeeper_limit_lease_seconds gauge
fleetkeeper_limit_sequences gauge kind
fleetkeeper_limit_tokens gauge kind
fleetkeeper_live_limits_supported gauge
fleetkeeper_log_dropped_bytes_total counter
fleetkeeper_memory_cap_ratio gauge
fleetkeeper_memory_fragmentation_ratio gauge
fleetkeeper_memory_over_cap gauge
fleetkeeper_memory_own gauge
fleetkeeper_memory_peak_ratio gauge
fleetkeeper_memory_used_ratio gauge
fleetkeeper_oldest_wait_seconds gauge tier
fleetkeeper_preemptions_total counter
fleetkeeper_prompt_tokens_total counter
fleetkeeper_queue_wait_seconds histogram tier
fleetkeeper_rejected_total counter
fleetkeeper_requests_total counter tier outcome
fleetkeeper_running gauge tier
fleetkeeper_schedule_calls_total counter
fleetkeeper_stalled_seconds gauge
fleetkeeper_start_seconds gauge stage
fleetkeeper_step_model_kv_kv_total counter step_class
fleetkeeper_step_model_kv_seconds_total counter step_class
fleetkeeper_step_model_kv_total counter step_class
fleetkeeper_step_model_prefill_kv_total counter step_class
fleetkeeper_step_model_prefill_prefill_total counter step_class
fleetkeeper_step_model_prefill_seconds_total counter step_class
fleetkeeper_step_model_prefill_sequences_total counter step_class
fleetkeeper_step_model_prefill_total counter step_class
fleetkeeper_step_model_seconds_seconds_total counter step_class
fleetkeeper_step_model_seconds_total counter step_class
fleetkeeper_step_model_sequences_kv_total counter step_class
fleetkeeper_step_model_sequences_seconds_total counter step_class
fleetkeeper_step_model_sequences_sequences_total counter step_class
fleetkeeper_step_model_sequences_total counter step_class
fleetkeeper_step_model_steps_total counter step_class
fleetkeeper_steps_total counter
fleetkeeper_time_to_first_token_seconds histogram tier
fleetkeeper_unauthorized_total counter
fleetkeeper_waiting gauge tier
"""

DOCUMENT_FIELDS = """
accelerator
batching.maxSequences batching.maxTokens batching.minSequences batching.minTokens
contract
control.issuer control.keysDirectory
drain.noticeSeconds drain.seconds
engine.dtype engine.maxModelLength engine.mediaDomains[] engine.options engine.prefixCaching engine.quantization
engine.profile.extraArguments[] engine.profile.name
engine.speculativeTokens engine.tensorParallelSize
health.stallSeconds health.startupSeconds
memory.capPercent memory.limitBytes
model.adapters[].name model.adapters[].path model.adapters[].revision
model.revision model.servedName model.source
objectives.batchTimeMilliseconds objectives.queueWaitMilliseconds
ports.control ports.host ports.serving
simulation.costs.bSeconds simulation.costs.cSeconds simulation.costs.gSeconds simulation.costs.qSeconds
simulation.costs.requestSeconds simulation.costs.t0Seconds simulation.costs.wSeconds
simulation.faults[].afterSeconds simulation.faults[].kind simulation.hardware simulation.kvCapacityTokens
simulation.seed simulation.speed
simulation.startSeconds.load simulation.startSeconds.warmUp simulation.startSeconds.weights
tiers.batch.floorPercent tiers.batch.queueLimit tiers.batch.sharePercent
tiers.realtime.queueLimit tiers.standard.queueLimit
tracing.endpoint tracing.namespace tracing.protocol tracing.sampleRatio tracing.service
"""


def test_entry_points_name_what_is_there() -> None:
    project = tomllib.loads((ROOT / "engine_image" / "pyproject.toml").read_text())["project"]
    plugins = project["entry-points"]["vllm.general_plugins"]
    assert project["scripts"] == {"fleetkeeper-engine": NAMED_TO_OTHERS["console script"]}
    assert plugins == {"fleetkeeper": NAMED_TO_OTHERS["vLLM plugin"]}
    assert (
        NAMED_TO_OTHERS["--scheduler-cls"],
        NAMED_TO_OTHERS["--middleware"],
        NAMED_TO_OTHERS["--middleware with tracing"],
    ) == (SCHEDULER_FACTORY, MIDDLEWARE, TRACED_MIDDLEWARE)
    for path in NAMED_TO_OTHERS.values():
        module, _, name = path.replace(":", ".").rpartition(".")
        assert callable(getattr(importlib.import_module(module), name)), path


@pytest.mark.parametrize("module", RUN_AS_MODULES)
def test_modules_that_are_run_can_be_run(module: str) -> None:
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    assert 'if __name__ == "__main__":' in Path(found.origin).read_text()


def test_the_fetch_is_started_by_its_module_name() -> None:
    assert fetch.__name__ in RUN_AS_MODULES


def test_the_package_path_and_the_launcher_lead_to_the_package() -> None:
    assert (Path(PACKAGE_PATH) / "fleetkeeper_engine" / "cli.py").exists()
    assert "from fleetkeeper_engine.cli import main" in LAUNCHER


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("run", ()),
        (
            "serve",
            (
                *("--model", "--name", "--accelerator", "--dtype", "--max-model-length"),
                *("--memory-limit", "--cap-percent", "--max-sequences", "--max-tokens", "--port"),
                *("--control-port", "--host", "--control-keys", "--option"),
            ),
        ),
        ("drain", ()),
        ("doctor", ("--model", "--option")),
        ("install", ("directory",)),
        ("keys", ("directory",)),
        (
            "limits",
            (
                *("--keys", "--sequences", "--tokens", "--lease-seconds", "--control"),
                *("--pod-uid", "--issuer"),
            ),
        ),
    ],
)
def test_the_command_line_has_its_commands(
    command: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    shown = capsys.readouterr().out
    assert [option for option in options if option not in shown] == []


def test_names_that_processes_and_pods_agree_on() -> None:
    assert (DOCUMENT, RUN_ENVIRONMENT) == ("FLEETKEEPER_ENGINE", "FLEETKEEPER_RUN")
    assert (REGION, SETTINGS) == (
        "FLEETKEEPER_SHARED_MEMORY",
        "FLEETKEEPER_VLLM_SETTINGS",
    )
    assert TERMINATION == "FLEETKEEPER_TERMINATION_LOG"
    assert INTERNAL_HEADER == "x-fleetkeeper-internal"
    assert (DEFAULT_RUN, DEFAULT_TERMINATION) == ("/dev/shm/fleetkeeper", "/dev/termination-log")
    assert (DRAIN_SOCKET, POLICY_FILE, KEYS_FILE) == ("drain.sock", "policy.json", "jwks.json")


def test_exit_codes_and_the_termination_line() -> None:
    assert {str(death): code for death, code in EXIT_CODES.items()} == {
        "BadEngineOption": 64,
        "ModelNotFound": 66,
        "UnsupportedArchitecture": 69,
        "Unknown": 70,
        "HostOutOfMemory": 71,
        "CUDAOutOfMemory": 72,
        "Hung": 75,
        "ModelNotReadable": 77,
    }
    line = json.loads(Death(DeathClass.HUNG, "it hangs", "serve", "last line").termination_line())
    assert line == {
        "class": "Hung",
        "code": 75,
        "phase": "serve",
        "message": "it hangs",
        "detail": "last line",
    }


def test_metric_families_keep_their_names_types_and_labels() -> None:
    found = {" ".join((metric.name, metric.type, *metric.labels)) for metric in METRICS}
    assert found == set(METRIC_FAMILIES.split("\n")) - {""}


def test_the_document_keeps_its_fields() -> None:
    schema = json.loads((CONTRACT / "engine-document.schema.json").read_text())
    assert set(_fields(schema, schema)) == set(DOCUMENT_FIELDS.split())


def test_a_request_for_limits_keeps_its_fields() -> None:
    schema = LimitsRequest.model_json_schema(by_alias=True)
    assert set(_fields(schema, schema)) == {
        *("sequences", "tokens", "leaseSeconds", "generation"),
        *(f"{part}.{tier}" for part in ("admit", "shares") for tier in TIER_LABELS),
    }


def _fields(schema: dict[str, Any], whole: dict[str, Any], path: str = "") -> Iterator[str]:
    """Dotted names of a schema's fields; an item of a list is `[]`."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from _fields(whole["$defs"][name], whole, path)
    elif "properties" in schema:
        for name, value in schema["properties"].items():
            yield from _fields(value, whole, f"{path}.{name}" if path else name)
    elif "items" in schema:
        yield from _fields(schema["items"], whole, f"{path}[]")
    elif "anyOf" in schema:
        for choice in schema["anyOf"]:
            if choice.get("type") != "null":
                yield from _fields(choice, whole, path)
    else:
        yield path

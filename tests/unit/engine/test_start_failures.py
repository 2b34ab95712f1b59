"""A start that fails ends the supervisor with its class, a termination line and an exit code.

The supervisor is the real one, in a process of its own; vLLM is a module that ends as vLLM does.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleetkeeper_engine.supervisor.launch.argv import desired_argv
from fleetkeeper_engine.supervisor.launch.errors import StartRefusedError
from fleetkeeper_engine.supervisor.launch.features import NEEDED_OPTIONS, find_features
from tests.support.engine.engine_documents import a_document
from tests.support.engine.engine_environment import ROOT, free_port
from tests.unit.engine.test_argv import LAUNCH, PLAN

pytestmark = pytest.mark.slow

PACKAGE = "entrypoints/openai/api_server.py"


def a_model(directory: Path) -> Path:
    """A model whose files are whole."""
    directory.mkdir()
    shape = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    (directory / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 64}))
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    weights = struct.pack("<Q", len(header)) + header + bytes(4)
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def install_vllm(site: Path, version: str, options: Iterable[str] | None = None) -> None:
    """The metadata of a vLLM, and the class with its engine's options if there are any."""
    metadata = site / f"vllm-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    if options is not None:
        fields = [f"    {option.replace('-', '_')}: object = None" for option in options]
        file = site / "vllm" / "engine" / "arg_utils.py"
        file.parent.mkdir(parents=True)
        file.write_text("\n".join(["class EngineArgs:", *fields]))


def ended(
    directory: Path, source: Path, program: str = "raise SystemExit(0)", **sections: Any
) -> tuple[int, dict[str, Any]]:
    """The exit code and the termination line of a supervisor with this vLLM."""
    entry = directory / "site" / "vllm" / PACKAGE
    entry.parent.mkdir(parents=True)
    for folder in (entry.parent, entry.parents[1], entry.parents[2]):
        (folder / "__init__.py").touch()
    entry.write_text(program)
    install_vllm(directory / "site", "0.32.0")
    document = {
        "contract": 1,
        "accelerator": "cpu",
        "model": {"source": str(source), "servedName": "tiny"},
        "engine": {"dtype": "float32"},
        "memory": {"limitBytes": 4 * 1024**3},
        "ports": {"host": "127.0.0.1", "serving": free_port(), "control": free_port()},
        **sections,
    }
    environment = {
        **os.environ,
        "PYTHONPATH": f"{directory / 'site'}:{ROOT / 'engine_image'}",
        "FLEETKEEPER_ENGINE": json.dumps(document),
        "FLEETKEEPER_RUN": str(directory / "run"),
        "FLEETKEEPER_TERMINATION_LOG": str(directory / "termination"),
    }
    argv = [sys.executable, "-m", "fleetkeeper_engine.cli"]
    done = subprocess.run(argv, env=environment, capture_output=True, check=False, timeout=60)
    (line,) = (directory / "termination").read_text().splitlines()
    return done.returncode, json.loads(line)


def test_a_missing_model(tmp_path: Path) -> None:
    code, line = ended(tmp_path, tmp_path / "absent")
    assert (code, line["class"], line["phase"]) == (66, "ModelNotFound", "plan")
    assert str(tmp_path / "absent") in line["message"]


def test_weights_that_were_cut_off(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model")
    os.truncate(model / "model.safetensors", 20)
    code, line = ended(tmp_path, model)
    assert (code, line["class"]) == (77, "ModelNotReadable")
    assert "model.safetensors" in line["message"]


def test_a_bad_document_is_one_line_that_names_each_field(tmp_path: Path) -> None:
    code, line = ended(tmp_path, tmp_path, memory={"capPercent": 96}, surprise=True)
    assert (code, line["class"], line["phase"]) == (64, "BadEngineOption", "document")
    assert "memory.capPercent" in line["message"]
    assert "surprise" in line["message"]


@pytest.mark.parametrize(
    ("program", "code", "death", "says"),
    [
        (
            "import sys; sys.exit(f'api_server.py: error: unrecognized arguments: {sys.argv[-1]}')",
            64,
            "BadEngineOption",
            "no-such-option",
        ),
        (
            "raise SystemExit(\"Value error, Model architectures ['NoSuch'] are not supported for now.\")",
            69,
            "UnsupportedArchitecture",
            "NoSuch",
        ),
    ],
    ids=["unknown option", "unknown architecture"],
)
def test_what_vllm_refuses(tmp_path: Path, program: str, code: int, death: str, says: str) -> None:
    """By the last lines of its output."""
    engine = {"dtype": "float32", "options": {"no-such-option": "1"}}
    got, line = ended(tmp_path, a_model(tmp_path / "model"), program, engine=engine)
    assert (got, line["class"], line["phase"]) == (code, death, "start")
    assert says in line["message"]


def test_an_argument_of_the_engine_profile_that_vllm_refuses(tmp_path: Path) -> None:
    """The owner of the service cannot correct it, so the message names the profile."""
    program = "import sys; sys.exit(f'api_server.py: error: unrecognized arguments: {sys.argv[1]}')"
    profile = {"name": "cpu-0.32.0-2", "extraArguments": ["--no-such-option=1"]}
    engine = {"dtype": "float32", "profile": profile}
    code, line = ended(tmp_path, a_model(tmp_path / "model"), program, engine=engine)
    assert (code, line["class"], line["phase"]) == (64, "BadEngineOption", "start")
    assert (
        "--no-such-option=1 (the engine profile cpu-0.32.0-2 sets --no-such-option)"
        in line["message"]
    )


def test_a_reserved_argument_of_the_engine_profile(tmp_path: Path) -> None:
    """The engine checks what the operator checked."""
    profile = {"name": "cpu-0.32.0-2", "extraArguments": ["--host=::"]}
    code, line = ended(tmp_path, tmp_path / "absent", engine={"profile": profile})
    assert (code, line["class"], line["phase"]) == (64, "BadEngineOption", "document")
    assert "engine profile cpu-0.32.0-2: --host is set by Fleetkeeper" in line["message"]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of packages with the server of a vLLM."""
    server = tmp_path / "site" / "vllm" / PACKAGE
    server.parent.mkdir(parents=True)
    server.touch()
    (tmp_path / "site" / "vllm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "1.0.0"])
def test_a_vllm_with_the_options_that_fleetkeeper_sets_starts(site: Path, version: str) -> None:
    """Its version does not matter."""
    install_vllm(site, version, NEEDED_OPTIONS)
    features = find_features()
    assert (features.vllm_version, features.package) == (version, site / "vllm")


def test_a_vllm_that_lacks_options_is_refused_with_their_names(site: Path) -> None:
    lacking = {"scheduler-cls", "shutdown-timeout"}
    install_vllm(site, "0.32.0", [name for name in NEEDED_OPTIONS if name not in lacking])
    with pytest.raises(StartRefusedError) as refused:
        find_features()
    assert refused.value.death == "BadEngineOption"
    assert "vLLM 0.32.0 lacks --scheduler-cls, --shutdown-timeout; use" in str(refused.value)


def test_a_vllm_whose_options_are_elsewhere_is_left_to_its_own_parser(site: Path) -> None:
    install_vllm(site, "0.32.0", [])
    assert find_features().vllm_version == "0.32.0"


def test_the_options_that_are_looked_for_are_those_of_the_command_line() -> None:
    document = a_document(engine={"quantization": "awq", "maxModelLength": 64})
    plan = replace(PLAN, gpu_memory_utilization=0.5)
    names = {
        item.partition("=")[0].removeprefix("--") for item in desired_argv(document, plan, LAUNCH)
    }
    of_the_server = {
        "host",
        "port",
        "middleware",
        "api-server-count",
        "disable-access-log-for-endpoints",
    }
    assert names - of_the_server - {LAUNCH.python, LAUNCH.entry, "-m"} == set(NEEDED_OPTIONS)

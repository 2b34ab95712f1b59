"""A start that fails ends the supervisor with its class, a termination line and an exit code.

The supervisor is the real one, in a process of its own; vLLM is a module that ends as vLLM does.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_environment import ROOT, free_port

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


def ended(
    directory: Path, source: Path, program: str = "raise SystemExit(0)", **sections: Any
) -> tuple[int, dict[str, Any]]:
    """The exit code and the termination line of a supervisor with this vLLM."""
    entry = directory / "site" / "vllm" / PACKAGE
    entry.parent.mkdir(parents=True)
    for folder in (entry.parent, entry.parents[1], entry.parents[2]):
        (folder / "__init__.py").touch()
    entry.write_text(program)
    version = directory / "site" / "vllm-0.32.0.dist-info"
    version.mkdir()
    (version / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
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

"""The environment with vLLM, the tiny model with an adapter, and a free port, for tests that start engines."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
from array import array
from pathlib import Path

from fleetkeeper_local.control_plane.ports import free_ports

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = ROOT / os.environ.get("FLEETKEEPER_TEST_ENGINE", ".venv-engine")
"""The environment under test. `make test-engine-previous` names the one with the previous vLLM."""
PYTHON = ENVIRONMENT / "bin" / "python"
STOCK_PYTHON = ENVIRONMENT / "base" / "bin" / "python"
"""The environment with vLLM and nothing of ours: what a stock vLLM image looks like."""

ADAPTER_LAYERS = 4
ADAPTED = {"q_proj": 256, "v_proj": 128}
"""The adapted projections of the tiny model and what each gives; both take 256 values."""
ADAPTER_INPUTS = 256


def free_port() -> int:
    """A TCP port that nobody listens on now, and that no outgoing connection gets."""
    return free_ports(1)[0]


def make_tiny_model(directory: Path, layers: int = 4) -> Path:
    """The tiny model, made once in a directory; with more layers its steps take longer."""
    if not (directory / "tokenizer_config.json").exists():
        script = ROOT / "scripts" / "tiny_model.py"
        subprocess.run([STOCK_PYTHON, script, directory, f"--layers={layers}"], check=True)
    return directory


def make_tiny_adapter(directory: Path, *, rank: int = 8, seed: int = 7) -> Path:
    """Write a LoRA adapter for the tiny model as PEFT does, and return its directory.

    Its weights are large: greedy answers change.
    """
    draw = random.Random(seed)
    header: dict[str, object] = {}
    data = array("f")
    for layer in range(ADAPTER_LAYERS):
        for name, out in ADAPTED.items():
            for part, shape in (("lora_A", (rank, ADAPTER_INPUTS)), ("lora_B", (out, rank))):
                start = data.itemsize * len(data)
                data.extend(draw.gauss(0.0, 0.5) for _ in range(shape[0] * shape[1]))
                tensor = f"base_model.model.model.layers.{layer}.self_attn.{name}.{part}.weight"
                offsets = [start, data.itemsize * len(data)]
                header[tensor] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(ADAPTED),
    }
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    head = json.dumps(header).encode()
    (directory / "adapter_model.safetensors").write_bytes(
        struct.pack("<Q", len(head)) + head + data.tobytes()
    )
    return directory

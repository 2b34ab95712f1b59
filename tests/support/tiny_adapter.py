"""A small real LoRA adapter for the tiny model: same files and tensor names as PEFT writes."""

from __future__ import annotations

import json
import random
import struct
from array import array
from pathlib import Path

LAYERS = 4
OUT = {"q_proj": 256, "v_proj": 128}
"""The adapted projections of the tiny model and what each gives; both take 256 values."""
IN = 256


def make_tiny_adapter(directory: Path, *, rank: int = 8, seed: int = 7) -> Path:
    """Writes the adapter; returns its directory. Its weights are large: greedy answers change."""
    draw = random.Random(seed)
    header: dict[str, object] = {}
    data = array("f")
    for layer in range(LAYERS):
        for name, out in OUT.items():
            for part, shape in (("lora_A", (rank, IN)), ("lora_B", (out, rank))):
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
        "target_modules": list(OUT),
    }
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    told = json.dumps(header).encode()
    (directory / "adapter_model.safetensors").write_bytes(
        struct.pack("<Q", len(told)) + told + data.tobytes()
    )
    return directory

"""vLLM inspects the class of a model in our forking server, without a process of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.engine.engine_environment import PYTHON, ROOT

SCRIPT = """
import subprocess
from fleetkeeper_engine.in_vllm.api_server import prepare_fork

prepare_fork()
from vllm.model_executor.models import registry

def another_process(*_, **__):
    raise SystemExit("vLLM starts a process of its own")

subprocess.run = another_process
model = registry.ModelRegistry.models["LlamaForCausalLM"]
assert model.inspect_model_cls().is_text_generation_model
print("inspected")
"""


@pytest.mark.exhaustive
def test_the_class_of_a_model_is_inspected_in_the_server(tmp_path: Path) -> None:
    """With an empty cache: vLLM has no earlier answer."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'engine_image'}:{ROOT / 'contract'}",
        "VLLM_CACHE_ROOT": str(tmp_path),
    }
    done = subprocess.run(
        [PYTHON, "-c", SCRIPT], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout.strip().endswith("inspected"), done.stderr

"""vLLM goes by the answers that an image brings, and asks a class only where none was brought."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.engine_environment import PYTHON, ROOT

SCRIPT = """
import os, sys
from pathlib import Path
from fleetkeeper_engine.tools.inspect_models import ARCHITECTURES, inspect_all
from fleetkeeper_engine.supervisor.launch.model_info_cache import FOLDER, install_answers

image, home = map(Path, sys.argv[1:])
inspect_all(image)
assert all(file.stat().st_mode & 0o004 for file in (image / FOLDER).iterdir()), "for any user"
os.environ.pop("VLLM_CACHE_ROOT")
os.environ["HOME"] = str(home)
assert install_answers(os.environ, image / FOLDER) == len(ARCHITECTURES)

from vllm.model_executor.models import registry

def another_process(ask):
    raise SystemExit("vLLM asks a process of its own")

registry._run_in_subprocess = another_process
for name in ARCHITECTURES:
    assert registry.ModelRegistry.models[name].inspect_model_cls().is_text_generation_model
print("all from the image", flush=True)
registry.ModelRegistry.models["BloomForCausalLM"].inspect_model_cls()
"""


@pytest.mark.exhaustive
def test_answers_of_an_image_spare_a_process(tmp_path: Path) -> None:
    """The last class was not asked before: there vLLM starts its process, as the test notices."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "engine_image"),
        "HOME": str(tmp_path / "nobody"),
    }
    done = subprocess.run(
        [PYTHON, "-c", SCRIPT, tmp_path / "image", tmp_path / "home"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.stdout.strip().endswith("all from the image"), done.stderr
    assert done.returncode == 1
    assert done.stderr.strip().endswith("vLLM asks a process of its own")

"""`python -m fleetkeeper_engine.tools.inspect_models DIR`: cache vLLM's model information for an image.

Run it where vLLM is installed, during an image build; see `model_info_cache`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ARCHITECTURES = (
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GPT2LMHeadModel",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "OPTForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
"""Models that fit a CPU. Any other works as well, but its first start takes longer."""


def inspect_all(directory: Path) -> None:
    """Have vLLM inspect every class and write the answers into `directory`/modelinfos.

    Raises:
        ImportError, AttributeError: if this vLLM differs from the expected one.
        RuntimeError: if vLLM does not know an architecture, or wrote no answer for it.
    """
    os.environ["VLLM_CACHE_ROOT"] = str(directory)
    # vLLM can be imported only where it is installed, and reads the variable then.
    from vllm.model_executor.models import registry  # noqa: PLC0415

    def in_this_process(ask: Callable[[], T]) -> T:
        # vLLM uses a process for each to keep a CUDA context out of the server. Nothing is served
        # here.
        return ask()

    models: dict[str, Any] = registry.ModelRegistry.models
    registry._run_in_subprocess = in_this_process  # noqa: SLF001 - of a pinned vLLM; elsewhere it only takes longer
    for name in ARCHITECTURES:
        if name not in models:
            raise RuntimeError(f"this vLLM has no architecture {name}")
        models[name].inspect_model_cls()
    written = list((directory / "modelinfos").glob("*.json"))
    if len(written) < len({models[name].module_name for name in ARCHITECTURES}):
        raise RuntimeError(f"vLLM wrote {len(written)} answers for {len(ARCHITECTURES)} classes")
    for file in written:
        # vLLM makes its files private, and the image runs as another user than its build.
        file.chmod(0o644)


if __name__ == "__main__":
    inspect_all(Path(sys.argv[1]))

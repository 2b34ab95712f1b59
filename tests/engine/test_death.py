"""Ways to die that depend on vLLM's own texts. The others: tests/unit/engine/test_start_failures.py."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.support.engine.supervised_engine import GIB, StartEngine, desired_document, with_config

pytestmark = [pytest.mark.timeout(1200), pytest.mark.exhaustive]


def test_an_option_that_vllm_does_not_know_is_named(
    start: StartEngine, tiny_model: Path, tmp_path: Path
) -> None:
    document = desired_document(
        tiny_model, tmp_path, engine={"options": {"no-such-option": "1", "enforce-eager": "true"}}
    )
    engine = start(document)
    assert engine.wait_end(240) == 64
    line = engine.termination()
    assert (line["class"], line["phase"]) == ("BadEngineOption", "start")
    assert "no-such-option" in line["message"]


def test_an_unknown_architecture_is_told(
    start: StartEngine, tiny_model: Path, tmp_path: Path
) -> None:
    model = with_config(
        tiny_model,
        tmp_path / "model",
        architectures=["NoSuchForCausalLM"],
        model_type="nosuch",
    )
    engine = start(desired_document(model, tmp_path))
    assert engine.wait_end(240) == 69
    assert engine.termination()["class"] == "UnsupportedArchitecture"


def test_an_engine_that_the_kernel_kills_for_memory_is_out_of_memory(start: StartEngine) -> None:
    """The pod's limit is lowered to 700 MiB once vLLM is on its way: the kernel kills it."""
    engine = start(pod_bytes=4 * GIB)
    if engine.cgroup is None:
        pytest.skip("needs the right to make a memory cgroup")
    engine.wait_for(lambda: "starting vLLM" in engine.log, "the start of vLLM")
    v1 = engine.cgroup / "memory.limit_in_bytes"
    limit = v1 if v1.exists() else engine.cgroup / "memory.max"
    limit.write_text(str(700 * 1024**2))
    assert engine.wait_end(240) == 71
    line = engine.termination()
    assert (line["class"], line["phase"]) == ("HostOutOfMemory", "start")
    assert "OOM-killed" in line["message"]


@pytest.mark.parametrize(
    ("title", "ending"),
    [("Worker", "status 0"), ("EngineCore", "status 0"), ("APIServer", "signal SIGKILL")],
)
def test_the_end_of_any_process_of_vllm_ends_all_of_them(
    start: StartEngine, title: str, ending: str
) -> None:
    """A process that is left would hold memory, and a forked one the pipes of those that ended."""
    engine = start()
    engine.wait_ready()
    family = psutil.Process(engine.process.pid).children(recursive=True)
    engine.vllm_process(title).kill()
    assert engine.wait_end(240) == 70
    line = engine.termination()
    assert (line["class"], line["phase"]) == ("Unknown", "serve")
    assert line["message"] == f"vLLM ended with {ending}"
    assert psutil.wait_procs(family, timeout=300)[1] == []

"""Each way to die: its class, its termination line, its exit code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.supervised_engine import GIB, StartEngine, desired_document, with_config

pytestmark = pytest.mark.timeout(1200)


def test_a_missing_model_is_told_at_once(start: StartEngine, tmp_path: Path) -> None:
    engine = start(desired_document(tmp_path / "absent", tmp_path))
    assert engine.wait_end(60) == 66
    line = engine.termination()
    assert (line["class"], line["phase"]) == ("ModelNotFound", "plan")
    assert str(tmp_path / "absent") in line["message"]


def test_an_unreadable_model_is_told_at_once(
    start: StartEngine, tiny_model: Path, tmp_path: Path
) -> None:
    """The kubelet's user reads everything here, so the file is damaged instead of forbidden."""
    model = with_config(tiny_model, tmp_path / "model")
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    engine = start(desired_document(model, tmp_path))
    assert engine.wait_end(60) == 77
    line = engine.termination()
    assert line["class"] == "ModelNotReadable"
    assert "model.safetensors" in line["message"]


def test_a_bad_document_is_one_line_and_64(start: StartEngine, tmp_path: Path) -> None:
    document = desired_document(tmp_path, tmp_path, memory={"capPercent": 90})
    engine = start({**document, "surprise": True})
    assert engine.wait_end(60) == 64
    line = engine.termination()
    assert (line["class"], line["phase"]) == ("BadEngineOption", "document")
    assert "memory.capPercent" in line["message"]
    assert "surprise" in line["message"]


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
def test_an_engine_that_the_kernel_kills_for_memory_is_out_of_memory(start: StartEngine) -> None:
    """The pod's limit is lowered to 700 MiB once vLLM is on its way: the kernel kills it."""
    engine = start(pod_bytes=4 * GIB)
    if engine.cgroup is None:
        pytest.skip("needs the right to make a memory cgroup")
    engine.wait_for(lambda: "starting vLLM" in engine.log, "the start of vLLM", 60)
    v1 = engine.cgroup / "memory.limit_in_bytes"
    limit = v1 if v1.exists() else engine.cgroup / "memory.max"
    limit.write_text(str(700 * 1024**2))
    assert engine.wait_end(240) == 71
    line = engine.termination()
    assert (line["class"], line["phase"]) == ("HostOutOfMemory", "start")
    assert "OOM-killed" in line["message"]

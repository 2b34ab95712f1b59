"""A model in object storage: streamed into a real vLLM with the environment of a service's own pod."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.engine.engine_environment import STOCK_PYTHON, free_port
from tests.support.engine.supervised_engine import (
    GIB,
    RunningEngine,
    StartEngine,
    assert_within_cap,
)
from tests.support.services.object_storage import ACCESS_KEY, BUCKET, PREFIX, Storage

pytestmark = pytest.mark.timeout(1200)
WEIGHTS = f"/{BUCKET}/{PREFIX}/model.safetensors"


def test_the_weights_are_streamed_and_the_answers_are_those_of_the_same_model_on_disk(
    pod: RunningEngine, engine: RunningEngine, storage: Storage, tiny_model: Path
) -> None:
    answer = pod.complete(16, temperature=0)
    assert answer.status_code == 200
    expected = engine.complete(16, temperature=0).json()["choices"][0]["text"]
    assert answer.json()["choices"][0]["text"] == expected

    words = pod.vllm_process("APIServer").cmdline()
    assert {f"--model=s3://{BUCKET}/{PREFIX}", "--load-format=runai_streamer"} <= set(words)
    environment = pod.vllm_process("APIServer").environ()
    assert 0 < int(environment["RUNAI_STREAMER_MEMORY_LIMIT"]) <= 6 * GIB * 80 // 100
    assert_within_cap(pod, 6)
    ranges = re.findall(rf'GET \S*{WEIGHTS} HTTP/1\.1\S*" 206', storage.log)
    assert len(ranges) > 2, "two for the supervisor, the others for vLLM"

    on_disk = sum(file.stat().st_blocks * 512 for file in Path(environment["HOME"]).rglob("*"))
    assert on_disk < (tiny_model / "model.safetensors").stat().st_size, "no weights on disk"
    for secret in ACCESS_KEY.values():
        assert secret not in pod.log


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("s3://absent/tiny", (66, "ModelNotFound", "NoSuchBucket")),
        pytest.param(
            f"s3://{BUCKET}/tiny",
            (66, "ModelNotFound", "no config.json"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_what_object_storage_lacks_is_told_by_its_class(
    start_pod: StartEngine, storage: Storage, source: str, told: tuple[int, str, str]
) -> None:
    found = start_pod(storage.endpoint, source)
    code, death, words = told
    assert found.wait_end() == code
    line = found.termination()
    assert (line["code"], line["class"]) == (code, death)
    assert source in line["message"]
    assert words in line["message"]


@pytest.mark.exhaustive
def test_an_endpoint_that_nobody_answers_is_named(start_pod: StartEngine) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    found = start_pod(endpoint, f"s3://{BUCKET}/{PREFIX}")
    assert found.wait_end(300) == 77
    assert endpoint in found.termination()["message"]


@pytest.mark.exhaustive
def test_an_image_without_the_streamer_is_refused_in_words(
    start_pod: StartEngine, storage: Storage, installed: Path
) -> None:
    """The stock environment has vLLM and nothing else; the supervisor is injected."""
    found = start_pod(
        storage.endpoint,
        f"s3://{BUCKET}/{PREFIX}",
        python=STOCK_PYTHON,
        launcher=installed / "bin" / "fleetkeeper-engine",
    )
    assert found.wait_end() == 64
    message = found.termination()["message"]
    assert "runai_model_streamer_s3" in message
    assert "profile" in message

"""A model in object storage: streamed into a real vLLM with the environment of a service's own pod."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fleetkeeper.api.object_storage import ObjectStorage
from fleetkeeper.api.parse import parse_service
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.manifests.engine_pod import desired_engine_template
from tests.support.engine_environment import PYTHON, STOCK_PYTHON, free_port
from tests.support.object_storage import (
    ACCESS_KEY,
    BUCKET,
    PREFIX,
    REGION,
    Storage,
    object_storage,
)
from tests.support.random_specs import service_manifest
from tests.support.signer import Signer
from tests.support.supervised_engine import GIB, RunningEngine, StartEngine, assert_within_cap

pytestmark = pytest.mark.timeout(1200)
SECRET = "s3-reader"
WEIGHTS = f"/{BUCKET}/{PREFIX}/model.safetensors"


@pytest.fixture(scope="module")
def storage(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    log = tmp_path_factory.mktemp("storage") / "log"
    with object_storage(tiny_model, log) as found:
        yield found


def pod_environment(endpoint: str, source: str) -> dict[str, str]:
    """The environment of a service's engine container, as the kubelet would resolve it."""
    spec = {
        "model": {"source": source, "credentialsSecret": SECRET},
        "engine": {
            "profile": "cpu",
            "dtype": "float32",
            "maxModelLength": 2048,
            "options": {"enforce-eager": "true"},
        },
        "resources": {"memory": "4Gi", "sharedMemory": "1Gi"},
        "batching": {"maxSequences": 64, "minSequences": 1, "maxTokens": 2048},
    }
    service = parse_service(service_manifest(spec, name="tiny"))
    context = default_context()
    profile = context.catalog.resolve("cpu").model_copy(
        update={"object_storage": ObjectStorage(endpoint=endpoint, region=REGION, path_style=True)}
    )
    template = desired_engine_template(service, profile, context)
    (container,) = template["spec"]["containers"]
    return {
        item["name"]: _resolved(item)
        for item in container["env"]
        if item["name"] not in {"POD_UID", "USER"}
    }


def _resolved(item: Mapping[str, Any]) -> str:
    if "valueFrom" not in item:
        return str(item.get("value", ""))
    reference = item["valueFrom"]["secretKeyRef"]
    assert reference["name"] == SECRET
    return ACCESS_KEY[reference["key"]]


@pytest.fixture
def start_pod(start: StartEngine, tmp_path: Path) -> StartEngine:
    """Start the engine of a service on this machine: only addresses and directories differ."""

    def started(endpoint: str, source: str, **more: Any) -> RunningEngine:
        environment = pod_environment(endpoint, source)
        document = json.loads(environment.pop("FLEETKEEPER_ENGINE"))
        document["ports"] = {
            "host": "127.0.0.1",
            "serving": free_port(),
            "control": free_port(),
        }
        signer = Signer(tmp_path / "keys")
        document["control"]["keysDirectory"] = str(signer.directory)
        return start(
            document,
            environment={**environment, "HOME": str(tmp_path / "home")},
            **more,
        )

    return started


def test_the_weights_are_streamed_and_the_answers_are_those_of_the_same_model_on_disk(
    start_pod: StartEngine,
    engine: RunningEngine,
    storage: Storage,
    tmp_path: Path,
    tiny_model: Path,
) -> None:
    streamed = start_pod(storage.endpoint, f"s3://{BUCKET}/{PREFIX}", pod_bytes=4 * GIB)
    streamed.wait_ready()
    answer = streamed.complete(16, temperature=0)
    assert answer.status_code == 200
    expected = engine.complete(16, temperature=0).json()["choices"][0]["text"]
    assert answer.json()["choices"][0]["text"] == expected

    words = streamed.vllm_process("APIServer").cmdline()
    assert {f"--model=s3://{BUCKET}/{PREFIX}", "--load-format=runai_streamer"} <= set(words)
    buffer = streamed.vllm_process("APIServer").environ()["RUNAI_STREAMER_MEMORY_LIMIT"]
    assert 0 < int(buffer) <= 4 * GIB * 80 // 100
    assert_within_cap(streamed, 4)
    ranges = re.findall(rf'GET \S*{WEIGHTS} HTTP/1\.1\S*" 206', storage.log)
    assert len(ranges) > 2, "two for the supervisor, the others for vLLM"

    on_disk = sum(file.stat().st_blocks * 512 for file in (tmp_path / "home").rglob("*"))
    assert on_disk < (tiny_model / "model.safetensors").stat().st_size, "no weights on disk"
    for secret in ACCESS_KEY.values():
        assert secret not in streamed.log


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("s3://absent/tiny", (66, "ModelNotFound", "NoSuchBucket")),
        (f"s3://{BUCKET}/tiny", (66, "ModelNotFound", "no config.json")),
    ],
)
def test_what_object_storage_lacks_is_told_by_its_class(
    start_pod: StartEngine, storage: Storage, source: str, told: tuple[int, str, str]
) -> None:
    found = start_pod(storage.endpoint, source)
    code, death, words = told
    assert found.wait_end(120) == code
    line = found.termination()
    assert (line["code"], line["class"]) == (code, death)
    assert source in line["message"]
    assert words in line["message"]


def test_an_endpoint_that_nobody_answers_is_named(start_pod: StartEngine) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    found = start_pod(endpoint, f"s3://{BUCKET}/{PREFIX}")
    assert found.wait_end(300) == 77
    assert endpoint in found.termination()["message"]


def test_an_image_without_the_streamer_is_refused_in_words(
    start_pod: StartEngine, storage: Storage, tmp_path: Path
) -> None:
    """The stock environment has vLLM and nothing else; the supervisor is injected."""
    installed = tmp_path / "fleetkeeper"
    subprocess.run([PYTHON, "-m", "fleetkeeper_engine.cli", "install", installed], check=True)
    found = start_pod(
        storage.endpoint,
        f"s3://{BUCKET}/{PREFIX}",
        python=STOCK_PYTHON,
        launcher=installed / "bin" / "fleetkeeper-engine",
    )
    assert found.wait_end(120) == 64
    message = found.termination()["message"]
    assert "runai_model_streamer_s3" in message
    assert "profile" in message

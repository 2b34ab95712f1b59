"""`fleetkeeper-engine fetch` downloads the models of a document into the cache, and starts no engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.engine_environment import PYTHON
from tests.support.engine.supervised_engine import desired_document
from tests.support.services.model_hub import COMMIT, TOKEN, ModelHub, model_hub

WEIGHTS = b"weights of a model"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelHub]:
    """A hub with some files, open as fleet/tiny and with a token as fleet/gated."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(WEIGHTS)
    (directory / "model.bin").write_bytes(b"the same again")
    with model_hub(directory, name="fleet/tiny", gated="fleet/gated") as found:
        yield found


class Fetching:
    """A run of the command with a cache and a termination log of its own."""

    def __init__(self, directory: Path, hub_url: str) -> None:
        self.cache = directory / "cache"
        self.log = directory / "termination"
        self._url = hub_url
        self._directory = directory

    def start(self, *, token: str = "", **model: Any) -> subprocess.Popen[str]:
        """Start the command for this model."""
        document = desired_document(Path("/none"), self._directory, model=model)
        variables = {
            **os.environ,
            "FLEETKEEPER_ENGINE": json.dumps(document),
            "FLEETKEEPER_TERMINATION_LOG": str(self.log),
            "HF_ENDPOINT": self._url,
            "HF_HOME": str(self.cache),
            "HF_TOKEN": token,
        }
        argv = [str(PYTHON), "-m", "fleetkeeper_engine.cli", "fetch"]
        return subprocess.Popen(
            argv, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, **model: Any) -> int:
        """Return the exit code for this model."""
        process = self.start(**model)
        output, _ = process.communicate(timeout=300)
        print(output)
        return process.returncode

    def snapshot(self, name: str) -> Path:
        """The directory of a downloaded model."""
        return self.cache / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT

    def termination(self) -> dict[str, Any]:
        """The termination line."""
        found: dict[str, Any] = json.loads(self.log.read_text())
        return found


@pytest.fixture
def fetching(tmp_path: Path, hub: ModelHub) -> Fetching:
    return Fetching(tmp_path, hub.url)


def test_a_model_and_its_adapters_are_in_the_cache(fetching: Fetching) -> None:
    """Of the files of a repository those that vLLM loads."""
    adapters = [
        {"name": "of-the-hub", "path": "fleet/gated", "revision": COMMIT},
        {"name": "of-a-claim", "path": "/models/adapter"},
    ]
    code = fetching.run(source="fleet/tiny", revision=COMMIT, adapters=adapters, token=TOKEN)
    assert code == 0
    assert not fetching.log.exists()
    for name in ("fleet/tiny", "fleet/gated"):
        found = fetching.snapshot(name)
        assert (found / "model.safetensors").read_bytes() == WEIGHTS
        assert {path.name for path in found.iterdir()} == {"config.json", "model.safetensors"}


def test_a_second_run_downloads_no_file_again(fetching: Fetching, hub: ModelHub) -> None:
    """As an engine that starts after the Job."""
    assert fetching.run(source="fleet/tiny", revision=COMMIT) == 0
    mark = len(hub.asked)
    assert fetching.run(source="fleet/tiny", revision=COMMIT) == 0
    assert not [
        asked for asked in hub.asked[mark:] if asked.startswith("GET") and "resolve" in asked
    ]


@pytest.mark.parametrize(
    ("model", "token", "told"),
    [
        ({"source": "fleet/absent"}, "", (66, "ModelNotFound")),
        ({"source": "fleet/tiny", "revision": "f" * 40}, "", (66, "ModelNotFound")),
        ({"source": "fleet/gated"}, "", (77, "ModelNotReadable")),
        ({"source": "no-repository"}, "", (66, "ModelNotFound")),
        ({"source": 5}, "", (64, "BadEngineOption")),
    ],
    ids=str,
)
def test_a_failure_is_told_by_its_class(
    fetching: Fetching, model: dict[str, Any], token: str, told: tuple[int, str]
) -> None:
    assert (fetching.run(token=token, **model), fetching.termination()["class"]) == told
    assert fetching.termination()["message"]


def test_a_model_that_needs_no_download_needs_no_hub(fetching: Fetching, hub: ModelHub) -> None:
    mark = len(hub.asked)
    assert fetching.run(source="/models/llama") == 0
    assert fetching.run(source="s3://models/llama") == 0
    assert len(hub.asked) == mark


def test_it_ends_at_once_when_its_pod_does(tmp_path: Path) -> None:
    """Pid 1 of a container gets SIGTERM; a hub that is silent must not delay the end."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = Fetching(tmp_path, url).start(source="fleet/tiny", revision=COMMIT)
        silent.settimeout(120)
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM

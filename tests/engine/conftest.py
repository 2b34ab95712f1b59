"""Whole engines for the tests of this folder: a supervisor and a real vLLM on the tiny model.

A start takes half a minute of two cores. `make test` starts three: the supervised `engine` and the
engine inside of `tests/support/engine/shared_engine.py`, which tests leave as they found them, and the
`pod` that streams its model from object storage, which the test of the drain ends. Each supervised
engine gets a cgroup of its own with the pod's memory limit, as a kubelet would make it.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.engine_environment import (
    PYTHON,
    STOCK_PYTHON,
    free_port,
    make_tiny_adapter,
    make_tiny_model,
)
from tests.support.engine.shared_engine import end_shared_engine
from tests.support.engine.signer import Signer
from tests.support.engine.supervised_engine import (
    COMPILED,
    EXTRA_ARGUMENT,
    GIB,
    Document,
    OutputPipe,
    RunningEngine,
    StartEngine,
    desired_document,
    start_engine,
)
from tests.support.services.model_hub import COMMIT, TOKEN, ModelHub, model_hub
from tests.support.services.object_storage import (
    BUCKET,
    PREFIX,
    Storage,
    object_storage,
    pod_environment,
)
from tests.support.services.trace_collector import Collector


class PodCgroup:
    """A memory cgroup (v1 or v2) with a limit."""

    def __init__(self, limit_bytes: int) -> None:
        v1 = Path("/sys/fs/cgroup/memory")
        self._v1 = v1.is_dir()
        parent = v1 if self._v1 else Path("/sys/fs/cgroup")
        self.directory = parent / f"fleetkeeper-test-{secrets.token_hex(4)}"
        self.directory.mkdir()
        name = "memory.limit_in_bytes" if self._v1 else "memory.max"
        (self.directory / name).write_text(str(limit_bytes))

    def enter(self) -> None:
        """Moves the calling process into it."""
        (self.directory / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Removes it; its processes must have ended."""
        with suppress(OSError):
            self.directory.rmdir()


def a_cgroup(limit_bytes: int) -> PodCgroup | None:
    """A cgroup, or None where this user cannot make one: then memory is measured by process."""
    try:
        return PodCgroup(limit_bytes)
    except OSError:
        return None


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's directory."""
    return make_tiny_model(tmp_path_factory.mktemp("model"))


Running = list[tuple[RunningEngine, PodCgroup | None]]
_RUNNING = pytest.StashKey[Running]()
_FOLDER = Path(__file__).parent


def _end(running: Running) -> None:
    while running:
        engine, group = running.pop()
        engine.stop()
        if group is not None:
            group.remove()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """With the last test of this folder its engines end: what follows gets the whole machine."""
    if nextitem is None or not nextitem.path.is_relative_to(_FOLDER):
        _end(item.config.stash.get(_RUNNING, []))
        end_shared_engine(item.config)


@pytest.fixture(scope="session")
def _starter(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[StartEngine]:
    running = pytestconfig.stash.setdefault(_RUNNING, [])

    def start(
        document: Document | None = None,
        *,
        pod_bytes: int | None = None,
        sections: dict[str, Any] | None = None,
        piped: bool = False,
        fresh: bool = False,
        **more: Any,
    ) -> RunningEngine:
        directory = tmp_path_factory.mktemp("engine")
        signer = Signer(directory / "keys")
        if document is None:
            document = desired_document(tiny_model, signer.directory, **(sections or {}))
        group = a_cgroup(pod_bytes) if pod_bytes else None
        if group is not None:
            more["before_exec"] = group.enter
        if piped:
            more["output"] = OutputPipe(directory / "log")
        if fresh:
            compiled = {"TORCHINDUCTOR_CACHE_DIR": str(directory / COMPILED)}
            more["environment"] = {**more.get("environment", {}), **compiled}
        engine = start_engine(document, signer, directory, **more)
        engine.cgroup = group.directory if group else None
        running.append((engine, group))
        return engine

    yield start
    _end(running)


@pytest.fixture
def start(_starter: StartEngine) -> StartEngine:
    """Starts an engine of the test's own: `start(sections={...}, pod_bytes=...)`. Ended with the session."""
    return _starter


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory that `install` filled, as an init container does."""
    directory = tmp_path_factory.mktemp("injected") / "fleetkeeper"
    subprocess.run([PYTHON, "-m", "fleetkeeper_engine.cli", "install", directory], check=True)
    return directory


@pytest.fixture(scope="session")
def hub(tiny_model: Path) -> Iterator[ModelHub]:
    """Serve the tiny model as a hub does: open as fleet/tiny, with a token as fleet/gated."""
    with model_hub(tiny_model, name="fleet/tiny", gated="fleet/gated") as found:
        yield found


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Collect the spans of the shared engine over gRPC."""
    found = Collector("grpc")
    yield found
    found.stop()


@pytest.fixture(scope="session")
def engine(
    _starter: StartEngine,
    installed: Path,
    hub: ModelHub,
    collector: Collector,
    tmp_path_factory: pytest.TempPathFactory,
) -> RunningEngine:
    """Return a ready engine in a pod of 4 GiB, hung after 60 s; shared: leave it as you found it.

    Delivery `inject`: the installed copy supervises the stock vLLM. It has a gated model of a hub, a
    LoRA adapter, an argument of the engine profile, and spans for requests whose client asks for them.
    """
    adapter = make_tiny_adapter(tmp_path_factory.mktemp("adapters") / "pirate", rank=12)
    home = tmp_path_factory.mktemp("hub-cache")
    sections: dict[str, Document] = {
        "health": {"stallSeconds": 60},
        "engine": {"profile": {"name": "cpu-0.32.0-1", "extraArguments": [EXTRA_ARGUMENT]}},
        "model": {
            "source": "fleet/gated",
            "revision": COMMIT,
            "adapters": [{"name": "pirate", "path": str(adapter)}],
        },
        "tracing": {
            "endpoint": collector.endpoint,
            "sampleRatio": 0,
            "service": "tiny-service",
            "namespace": "team-a",
        },
    }
    found = _starter(
        sections=sections,
        pod_bytes=4 * GIB,
        piped=True,
        python=STOCK_PYTHON,
        launcher=installed / "bin" / "fleetkeeper-engine",
        environment={
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_TOKEN": TOKEN,
            # The slow grammar of test_hang.py takes 3 s of a core; a busy machine exceeds vLLM's 5.
            "VLLM_REGEX_COMPILATION_TIMEOUT_S": "600",
        },
    )
    found.wait_ready()
    return found


@pytest.fixture(scope="session")
def storage(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    """Serve the tiny model from object storage."""
    log = tmp_path_factory.mktemp("storage") / "log"
    with object_storage(tiny_model, log) as found:
        yield found


@pytest.fixture(scope="session")
def start_pod(_starter: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> StartEngine:
    """Start the engine of a service on this machine: only addresses and directories differ."""

    def started(
        endpoint: str, source: str, *, sections: dict[str, Any] | None = None, **more: Any
    ) -> RunningEngine:
        environment = pod_environment(endpoint, source)
        document = json.loads(environment.pop("FLEETKEEPER_ENGINE"))
        document["ports"] = {"host": "127.0.0.1", "serving": free_port(), "control": free_port()}
        for name, section in (sections or {}).items():
            document[name] = {**document.get(name, {}), **section}
        directory = tmp_path_factory.mktemp("pod")
        signer = Signer(directory / "keys")
        document["control"]["keysDirectory"] = str(signer.directory)
        return _starter(
            document,
            environment={**environment, "HOME": str(directory / "home")},
            **more,
        )

    return started


@pytest.fixture(scope="session")
def pod(start_pod: StartEngine, storage: Storage) -> RunningEngine:
    """Return a ready engine in a pod of 6 GiB that streamed its model, for prompts of 16,000 tokens.

    The test of the drain ends it (tests/conftest.py runs that test last).
    """
    found = start_pod(
        storage.endpoint,
        f"s3://{BUCKET}/{PREFIX}",
        sections={
            "engine": {"maxModelLength": 16_384},
            "batching": {"maxTokens": 16_640, "maxSequences": 64},
            "drain": {"seconds": 600, "noticeSeconds": 15},
            "memory": {"limitBytes": 6 * GIB},
        },
        pod_bytes=6 * GIB,
    )
    found.wait_ready()
    return found

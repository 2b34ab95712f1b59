"""Whole engines for the tests of this folder: a supervisor and a real vLLM on the tiny model.

A start takes half a minute of two cores, so engines are shared where the tests leave them as they
found them; the last test of the others ends them. Each engine gets a cgroup of its own with the pod's memory limit, as a kubelet would make it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_environment import make_tiny_model
from tests.support.shared_engine import end_shared_engine
from tests.support.signer import Signer
from tests.support.supervised_engine import (
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
            compiled = str(directory / COMPILED)
            more["environment"] = {"TORCHINDUCTOR_CACHE_DIR": compiled}
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
def engine(_starter: StartEngine) -> RunningEngine:
    """A ready engine in a pod of 4 GiB, hung after 60 s; shared: leave it as you found it.

    It starts with nothing compiled, as in a new pod, and with an argument of the engine profile.
    """
    sections: dict[str, Document] = {
        "health": {"stallSeconds": 60},
        "engine": {"profile": {"name": "cpu-0.32.0-1", "extraArguments": [EXTRA_ARGUMENT]}},
    }
    found = _starter(sections=sections, pod_bytes=4 * GIB, piped=True, fresh=True)
    found.wait_ready()
    return found

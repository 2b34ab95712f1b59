"""Simulated engines under the real supervisor. They need no vLLM, so these tests run anywhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.signer import Signer
from tests.support.engine.supervised_engine import (
    Document,
    RunningEngine,
    desired_document,
    start_engine,
)

MIB = 1024**2
OPTIONS = {"enable-prompt-tokens-details": "false"}

StartSimulated = Callable[..., RunningEngine]
"""`start(wait=True, environment=None, **sections)`: an engine whose document has these sections."""


def simulated_document(keys: Path, /, **sections: Document) -> Document:
    """A document like that of the other engines of tests, for a simulated one."""
    defaults: dict[str, Document] = {
        "simulation": {"hardware": "h100-8b"},
        "engine": {"options": {}},
        "memory": {"limitBytes": 256 * MIB},
    }
    for name, section in sections.items():
        defaults[name] = {**defaults.get(name, {}), **section}
    document = desired_document(Path("/no/model"), keys, **defaults)
    document["engine"]["options"] = defaults["engine"].get("options", {})
    return document


def _starter(directories: pytest.TempPathFactory, ends: ExitStack) -> StartSimulated:
    def start(
        *, wait: bool = True, environment: dict[str, str] | None = None, **sections: Any
    ) -> RunningEngine:
        directory = directories.mktemp("simulated")
        signer = Signer(directory / "keys")
        engine = start_engine(
            simulated_document(signer.directory, **sections),
            signer,
            directory,
            python=Path(sys.executable),
            environment=environment,
        )
        ends.callback(engine.stop)
        if wait:
            engine.wait_ready()
        return engine

    return start


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartSimulated]:
    """Starts engines of the test's own, which end with it."""
    with ExitStack() as ends:
        yield _starter(tmp_path_factory, ends)


@contextmanager
def simulated_engine(directories: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """Yield a ready engine."""
    with ExitStack() as ends:
        yield _starter(directories, ends)()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """A ready engine, shared by a module: leave it as you found it."""
    with simulated_engine(tmp_path_factory) as engine:
        yield engine


@pytest.fixture
def own_engine(start: StartSimulated) -> RunningEngine:
    """A ready engine of the test's own, which it may end."""
    return start()

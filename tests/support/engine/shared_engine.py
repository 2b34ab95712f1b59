"""One vLLM with our code inside for all tests of a run, and a fault in its scheduler on demand."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.support.engine.inside_engine import InsideEngine

_SHARED = pytest.StashKey[InsideEngine | BaseException]()
LAYERS = 12
"""Steps as long as those of a model of some size: with 4 layers they are shorter than an HTTP request."""
FAULT_FILE = "FLEETKEEPER_TEST_FAULT"
FAULT_ON_DEMAND = f"""
import os
from fleetkeeper_engine.in_vllm.stats import SchedulerRecord

real, file = SchedulerRecord.count, os.environ["{FAULT_FILE}"]

def count(self):
    if os.path.exists(file):
        raise RuntimeError("a fault on purpose")
    real(self)

SchedulerRecord.count = count
"""


def fault_file(directory: Path) -> Path:
    """Return the file with which the shared engine's scheduler fails."""
    return directory / "fault"


def shared_engine(config: pytest.Config) -> InsideEngine:
    """Return the one engine for all tests of a run. A start that failed is not tried again.

    Its scheduler fails once the file `fault_file` exists; that ends its live limits for good.
    """
    if _SHARED not in config.stash:
        directory = Path(tempfile.mkdtemp(prefix="fleetkeeper-inside-"))
        (directory / "sitecustomize.py").write_text(FAULT_ON_DEMAND)
        environment = {"PYTHONPATH": str(directory), FAULT_FILE: str(fault_file(directory))}
        try:
            engine = InsideEngine(directory, environment=environment, layers=LAYERS)
        except BaseException as error:
            config.stash[_SHARED] = error
            raise
        config.stash[_SHARED] = engine
        config.add_cleanup(engine.stop)
    found = config.stash[_SHARED]
    if isinstance(found, BaseException):
        # What was kept is the failure of an earlier start, not a wrong type.
        raise RuntimeError("vLLM did not start before in this run") from found  # noqa: TRY004
    return found


def end_shared_engine(config: pytest.Config) -> None:
    """End the shared engine before the run ends; it may never have started."""
    found = config.stash.get(_SHARED, None)
    if isinstance(found, InsideEngine):
        found.stop()
        del config.stash[_SHARED]

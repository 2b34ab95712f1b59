"""The parts of benchmarks/, which are no packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from fleetkeeper_local.common.paths import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
FOLDERS = ("", "batch", "control", "engine", "evaluation", "gateway", "serving", "simulated")


@pytest.fixture(scope="module")
def part() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a part of a benchmark by its name."""
    added = [str(BENCHMARKS / folder) for folder in FOLDERS]
    sys.path[:0] = added
    yield importlib.import_module
    for folder in added:
        sys.path.remove(folder)

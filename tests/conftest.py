"""What holds for every test: how properties are judged, which tests may run side by side."""

from __future__ import annotations

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from fleetkeeper_local.control_plane import ports
from lanes import plugin
from tests.support.lanes import EXAMPLES, USUAL, share_of_ports
from tests.support.plane import plane_fixtures

for profile, examples in EXAMPLES.items():
    # Properties are judged by what they find, never by how long it took.
    settings.register_profile(
        profile,
        max_examples=examples,
        deadline=None,
        # A failure of `make test` is of the change that it tests; `make test-all` looks for new ones.
        derandomize=profile == USUAL,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(USUAL)

# Else each worker compiles all tests again in each run: half of the time that collecting them takes.
sys.dont_write_bytecode = False

STAGES: Final = ("e2e", "engine", "fault", "cluster", "gateway", "router", "simulated", "unit")
"""In the order they begin: most of tests/cluster waits, so tests/unit runs beside it and after it."""
ROWS: Final = ("e2e", "engine")
"""Each is one worker's, and both begin before all others: they are the longest, and mostly wait.

There is one node a machine, and the tests of tests/engine share three engines.
"""
FIRST: Final = (
    "fault/test_api_faults",
    "cluster/chart/test_install",
    "cluster/isolation/test_restart_writes",
    "cluster/isolation/test_releases",
    "cluster/isolation/test_size",
    "cluster/operator/test_life",
)
"""The longest files start first, so that no worker is left with one of them at the end."""
LAST: Final = (
    "engine/test_fault.py",
    "test_hostile_client",
    "engine/test_tracing.py",
    "engine/test_drain.py",
)
"""Tests after which a shared engine is not as it was before, or has ended."""


@pytest.fixture
def without_collections() -> Iterator[None]:
    """No collection of garbage: its time depends on the objects of all tests, not on what is measured."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of the lanes: slices, quarantine, durations, processor seconds."""
    plugin.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the lanes, and the control plane's fixtures for every folder."""
    ports.LOWEST, ports.HIGHEST = share_of_ports(os.environ)
    config.pluginmanager.register(plugin.Lanes(config), "lanes")
    config.pluginmanager.register(plane_fixtures, "plane_fixtures")


def _stage(nodeid: str) -> str:
    return nodeid.split("/")[1] if nodeid.startswith("tests/") else ""


def _rank(item: pytest.Item) -> tuple[int, int]:
    stage = _stage(item.nodeid)
    place = next((rank for rank, name in enumerate(FIRST) if name in item.nodeid), len(FIRST))
    place += next((rank for rank, name in enumerate(LAST, start=1) if name in item.nodeid), 0)
    return STAGES.index(stage) if stage in STAGES else len(STAGES), place


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the stages; within a file the order stays as written."""
    items.sort(key=_rank)


class Scopes(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
    """A file is one worker's, and so is a row."""

    def _split_scope(self, nodeid: str) -> str:
        stage = _stage(nodeid)
        return stage if stage in ROWS else nodeid.split("::", 1)[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    """With `-n` the tests are shared out as `Scopes` says, in the order collected."""
    config.option.loadscopereorder = False
    return Scopes(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how long the tests of each stage took, summed over the workers."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[_stage(report.nodeid)] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("seconds by stage, summed over the workers")
        for stage, took_s in sorted(seconds.items()):
            terminalreporter.write_line(f"{stage:10} {took_s:7.0f}")

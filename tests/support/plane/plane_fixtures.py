"""A pytest plugin: a real control plane, started at most once per session, on free ports.

`tests/conftest.py` registers it, so that tests/cluster and tests/fault share one control plane.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator

import pytest

from fleetkeeper_local.control_plane.access import KubectlError
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.operator_process import end_forks
from tests.support.plane.plane_state import MENDED, mend, state_of

PLANE = pytest.StashKey[ControlPlane]()
PROBE = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "probe", "namespace": "default"},
    "spec": {
        "replicas": 1,
        "selector": {"matchLabels": {"app": "probe"}},
        "template": {
            "metadata": {"labels": {"app": "probe"}},
            "spec": {"containers": [{"name": "probe", "image": "example.invalid/probe:1"}]},
        },
    },
}


@pytest.fixture(scope="session")
def control_plane(pytestconfig: pytest.Config) -> Iterator[ControlPlane]:
    """etcd, kube-apiserver, kube-controller-manager, kube-scheduler, and kwok with a node.

    Shared by the whole session: a test works in a namespace of its own and asks for its own nodes.
    """
    plane = ControlPlane().start()
    try:
        try:
            _prove(plane)
        except KubectlError as problem:
            MENDED.append(f"made anew: {problem}\n{state_of(plane)}")
            plane.stop()
            plane = ControlPlane().start()
            _prove(plane)
        pytestconfig.stash[PLANE] = plane
        yield plane
        del pytestconfig.stash[PLANE]
    finally:
        plane.stop()
        end_forks()


def _prove(plane: ControlPlane) -> None:
    """A Deployment gets a pod, the pod a node, and the node plays it.

    Raises:
        KubectlError: one of them did not.
    """
    plane.ensure_nodes(1)
    plane.kubectl("create", "-f", "-", input=json.dumps(PROBE))
    plane.kubectl("rollout", "status", "deployment/probe", "--timeout=300s")
    plane.kubectl("delete", "deployment", "probe", "--wait=false")


@pytest.fixture(autouse=True)
def whole(pytestconfig: pytest.Config) -> None:
    """What ended of the control plane since the last test is started again."""
    plane = pytestconfig.stash.get(PLANE, None)
    if plane is not None:
        mend(plane)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed says how its cluster stood."""
    report = yield
    plane = item.config.stash.get(PLANE, None)
    if report.failed and plane is not None:
        report.sections.append(("control plane at that time", state_of(plane)))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands over what it mended."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["mended"] = MENDED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Takes it."""
    MENDED.extend(getattr(node, "workeroutput", {}).get("mended", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tells it."""
    for state in MENDED:
        terminalreporter.section("a part of a control plane had ended; it was started again")
        terminalreporter.write_line(state)

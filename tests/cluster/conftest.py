"""A real control plane for the tests of this folder: started once a session, on free ports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleetkeeper_local.controlplane import ControlPlane


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """etcd, kube-apiserver, kube-controller-manager and kube-scheduler; kwok with the first node.

    Shared by the whole session: a test works in a namespace of its own and asks for its own nodes.
    """
    with ControlPlane() as plane:
        yield plane

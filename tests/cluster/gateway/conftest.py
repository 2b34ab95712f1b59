"""A gateway's namespaces and rights for each test."""

from __future__ import annotations

import pytest

from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.gateway.gateway_world import GatewayWorld, new_world


@pytest.fixture
def world(control_plane: ControlPlane) -> GatewayWorld:
    return new_world(control_plane)

"""What breaks under a fleet, and what the fleet and its operator make of it."""

from __future__ import annotations

import pytest

from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.inject import freeze_engine
from service_world import complete, steady

pytestmark = [pytest.mark.timeout(1500), pytest.mark.usefixtures("calm_operator")]


def test_a_hung_engine_is_replaced_and_told_apart(fleet: Fleet) -> None:
    """A core that stopped with its port open: not ready soon, restarted, and the reason is known."""
    (pod,) = fleet.engines()
    with steady(fleet, 1.0, seed=12) as traffic:
        fleet.until(lambda: len(traffic.samples) >= 3, "some answers")
        freeze_engine(pod)
        fleet.until(lambda: not fleet.engines()[0].ready, "the frozen pod is not ready")
        fleet.until(
            lambda: (
                fleet.condition("Ready").get("reason") == "EngineHung"
                or fleet.condition("Degraded").get("reason") == "EngineHung"
            ),
            "the reason",
        )
        fleet.until(lambda: fleet.engines()[0].identity != pod.identity, "a new engine")
    fleet.await_ready(1)
    assert complete(fleet.base_url(), "tiny", tokens=3)["usage"]["completion_tokens"] == 3

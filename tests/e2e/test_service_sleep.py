"""A service that sleeps on a real node: without requests no pod is left, and the next request gets its answer."""

from __future__ import annotations

import json

import pytest

from fleetkeeper_contract.sleep import WakeMark, parse_mark
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_local.demo import asleep
from fleetkeeper_local.demo.front_door import FrontDoor
from fleetkeeper_local.demo.installation import Installation
from tests.support.node.service_world import says, service_fleet, simulated

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("calm_operator")]
MARKS = "fleetkeeper-wake-marks"


def test_a_request_wakes_a_service_whose_last_replica_is_gone(
    product: Installation, door: FrontDoor
) -> None:
    """The chapter of the demo: it waits until no engine pod is left, and sends one request."""
    manifest = simulated(access="Gateway", networkPolicy={"preset": "Gateway"})
    with service_fleet(product, manifest) as fleet:
        fleet.await_ready(1)
        lines = asleep.chapter(door, fleet, print)
        assert "Ready is True (Asleep)." in lines
        text = product.cluster.kubectl(
            *("-n", product.namespace, "get", "configmap", MARKS, "-o", "jsonpath={.data}")
        )
        marks = json.loads(text)
        fleet.until(lambda: "state" not in fleet.status()["sleep"], "awake in its status")
        sleep = fleet.status()["sleep"]
        assert parse_mark(marks[fleet.live()["metadata"]["uid"]]) == WakeMark(1, Tier.STANDARD)
        assert (sleep["number"], len(sleep["startSeconds"])) == (1, 1)
        assert says(fleet, "releases its replicas", "Asleep")
        assert says(fleet, "starts its replicas", "Waking")

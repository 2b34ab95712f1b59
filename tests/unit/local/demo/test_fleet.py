"""What a wait for a fleet shows."""

from __future__ import annotations

from typing import Any, cast

import pytest

from fleetkeeper_local.demo.cluster import Cluster
from fleetkeeper_local.demo.fleet import ENGINE, Fleet

pytestmark = pytest.mark.exhaustive

POD = {
    "metadata": {"name": "chat-0", "uid": "1"},
    "spec": {"containers": [{"image": "engine"}]},
    "status": {},
}


class Leaving:
    """A cluster whose service is gone, and whose last pod ends after the second question."""

    def __init__(self) -> None:
        self.asked = 0

    def inference_service(self, namespace: str, name: str) -> None:
        del namespace, name

    def pods(self, namespace: str, selector: str) -> list[Any]:
        del namespace, selector
        self.asked += 1
        return [POD] if self.asked <= 2 else []


def test_a_wait_for_the_pods_of_a_deleted_service_ends_with_them() -> None:
    """Its summary has no condition to show."""
    fleet = Fleet(cast("Cluster", Leaving()), "team", "chat")
    shown: list[str] = []
    fleet.said = shown.append
    fleet.until(lambda: not fleet.pods(ENGINE), "all pods are gone")
    assert shown == ["no InferenceService [chat-0 not ready]"]

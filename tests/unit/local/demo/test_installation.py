"""Installing again always works: over nothing, over a release, over one that was interrupted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.demo.cluster import Cluster, CommandError
from fleetkeeper_local.demo.fleet import Fleet, pod_facts
from fleetkeeper_local.demo.inject import freeze_engine, processes_of
from fleetkeeper_local.demo.installation import (
    ImageNames,
    Installation,
    desired_values,
    product_values,
)
from fleetkeeper_local.demo.stage import desired_seed
from fleetkeeper_local.node.node import Node
from fleetkeeper_local.node.settings import NodeSettings

pytestmark = pytest.mark.exhaustive


class FakeCluster(Cluster):
    """Remembers Helm's commands; the release has the given state."""

    def __init__(self, state: str | None, live: dict[str, Any] | None = None) -> None:
        self.state = state
        self.ran: list[str] = []
        self.values: Mapping[str, Any] | None = None
        self.live = live

    @override
    def helm(
        self, *args: str, values: Mapping[str, Any] | None = None, timeout_s: float = 0.0
    ) -> str:
        if args[0] == "status":
            if self.state is None:
                raise CommandError("release: not found")
            return json.dumps({"info": {"status": self.state}})
        self.ran.append(args[0])
        self.values = values
        return ""

    @override
    def inference_service(self, namespace: str, name: str) -> dict[str, Any] | None:
        return self.live

    @override
    def pods(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        return []


@pytest.mark.parametrize(
    ("state", "commands"),
    [
        (None, ["upgrade"]),
        ("deployed", ["upgrade"]),
        ("failed", ["upgrade"]),
        ("pending-install", ["uninstall", "upgrade"]),
        ("pending-upgrade", ["rollback", "upgrade"]),
        ("pending-rollback", ["rollback", "upgrade"]),
    ],
)
def test_what_an_interrupted_helm_left_is_taken_back_first(
    state: str | None, commands: list[str]
) -> None:
    """Helm itself would refuse: "another operation is in progress"."""
    cluster = FakeCluster(state)
    Installation(cluster).install({"replicas": 1})
    assert cluster.ran == commands
    assert cluster.values == {"replicas": 1}


def test_the_values_name_the_nodes_own_images_and_prometheus(tmp_path: Path) -> None:
    """A registry's port is no tag."""
    names = ImageNames("localhost:5000/a/operator:1", "localhost:5000/a/engine:2", "r:3")
    values = desired_values(names, Node(NodeSettings(directory=tmp_path)))
    assert values["image"] == {"repository": "localhost:5000/a/operator", "tag": "1"}
    assert values["engineProfiles"] == {"cpu-0.32.0-1": {"image": "localhost:5000/a/engine:2"}}
    assert "simulatedEngines" not in values
    assert values["prometheus"]["url"] == "http://10.244.0.1:9090"


def test_simulated_engines_are_on_with_their_image() -> None:
    values = product_values(ImageNames("o:1", "e:2", "r:3", simulated="s:4"))
    assert values["simulatedEngines"] is True
    assert values["engineProfiles"] == {
        "cpu-0.32.0-1": {"image": "e:2"},
        "simulated-0.32.0-1": {"image": "s:4"},
    }


def test_waiting_ends_when_nothing_moves_and_says_what_it_saw() -> None:
    """By progress, not by the clock alone; the fleet's own words are in the error."""
    ready = {"type": "Ready", "status": "False", "reason": "ImagePull", "message": "no such image"}
    live = {"metadata": {"generation": 1}, "status": {"conditions": [ready]}}
    fleet = Fleet(FakeCluster(None, live), "a", "tiny")
    with pytest.raises(LocalError, match="ImagePull: no such image"):
        fleet.until(lambda: False, "never", no_progress_s=0.0)
    assert fleet.until(lambda: 7, "at once") == 7


def test_a_service_that_is_not_there_is_named() -> None:
    """Not a KeyError from somewhere."""
    with pytest.raises(LocalError, match="a/tiny"):
        Fleet(FakeCluster(None), "a", "tiny").live()


def test_processes_are_found_by_their_pod_alone() -> None:
    """A pod that is not here has none, and nothing can be frozen in it."""
    uid = "00000000-dead-beef-0000-000000000000"
    assert processes_of(uid, lambda _command: True) == []
    live = {
        "metadata": {"name": "gone", "uid": uid},
        "spec": {"containers": [{"image": "i"}]},
        "status": {},
    }

    with pytest.raises(LocalError, match="gone has 0 engine cores"):
        freeze_engine(pod_facts(live))


def test_the_model_can_be_made_within_a_cluster() -> None:
    """A hardened job with the engine's image writes it into the claim that the example names."""
    claim, script, job = desired_seed("engine:1", "print()")
    (container,) = job["spec"]["template"]["spec"]["containers"]  # type: ignore[index]
    assert container["image"] == "engine:1"
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert claim["metadata"] == {"name": "models"}
    assert script["data"] == {"tiny_model.py": "print()"}

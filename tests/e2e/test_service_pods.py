"""Pods that are replaced: by a new revision, and by what breaks under them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.inject import freeze_engine
from fleetkeeper_local.node.node import Node
from tests.support.model_image import push_model_image
from tests.support.service_world import complete, failures, in_container, says, steady

EAT_MEMORY = """
from pathlib import Path
# The supervisor shall be the kernel's choice, as when it is the one that grows.
Path("/proc/1/oom_score_adj").write_text("1000")
held = []
while True:
    held.append(bytearray(b"x") * (64 << 20))
"""

pytestmark = pytest.mark.usefixtures("calm_operator")


def test_a_changed_spec_rolls_without_a_lost_request(fleet: Fleet) -> None:
    """A new pod comes before the old one goes, and the old one ends what it has."""
    (old,) = fleet.engines()
    with steady(fleet, 2.0, seed=9) as traffic:
        fleet.change({"engine": {"maxModelLength": 1024}})
        fleet.until(
            lambda: fleet.is_ready(1) and old.uid not in [pod.uid for pod in fleet.engines()],
            "the new revision",
        )
        seen = len(traffic.samples)
        fleet.until(lambda: len(traffic.samples) >= seen + 5, "load on the new pod")
    assert failures(traffic.samples) == []


@pytest.fixture
def claim_again(fleet: Fleet) -> Iterator[None]:
    """Restore the model in the claim: the release before this one, which a later test installs, takes no image."""
    before = fleet.live()["spec"]["model"]
    yield
    fleet.change({"model": before})
    fleet.await_ready(1)


@pytest.mark.usefixtures("claim_again")
def test_a_model_from_an_image_takes_over_from_one_in_a_claim(
    fleet: Fleet, node: Node, tmp_path: Path
) -> None:
    """The kubelet pulls it by its digest and mounts it read-only; no request is lost meanwhile."""
    (old,) = fleet.engines()
    source = push_model_image(node, tmp_path)
    with steady(fleet, 2.0, seed=16) as traffic:
        fleet.change({"model": {"source": source}})
        fleet.until(
            lambda: fleet.is_ready(1) and old.uid not in [pod.uid for pod in fleet.engines()],
            "the new revision",
        )
    assert failures(traffic.samples) == []
    assert complete(fleet.base_url(), "tiny", tokens=3)["usage"]["completion_tokens"] == 3
    (pod,) = fleet.engines()
    written = f"touch /images/{source.partition('@sha256:')[2]}/new 2>&1 || true"
    assert "Read-only" in fleet.kubectl("exec", pod.name, "--", "sh", "-c", written)


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


def test_a_pod_that_ran_out_of_its_memory_is_told_apart(fleet: Fleet) -> None:
    """The kernel ends the container: OOMKilled is known from the pod, with what to do, and it serves again."""
    (pod,) = fleet.engines()
    with in_container(fleet, pod, EAT_MEMORY) as eater:
        fleet.until(lambda: fleet.engines()[0].restarts > pod.restarts, "the kernel acts")
        eater.kill()
    assert fleet.engines()[0].ended == "OOMKilled"
    ready = fleet.until(
        lambda: (c := fleet.condition("Ready")).get("reason") == "HostOutOfMemory" and c,
        "the reason",
    )
    assert ready["status"] == "False"
    for word in (f"Pod {pod.name}", "OOM-killed", "spec.resources.memory"):
        assert word in ready["message"]
    fleet.until(lambda: says(fleet, "OOM-killed", "HostOutOfMemory"), "the event")
    fleet.await_ready(1)
    assert complete(fleet.base_url(), "tiny", tokens=3)["usage"]["completion_tokens"] == 3

"""A fleet whose pods stay as they are, whatever is done around them, always under somebody's load."""

from __future__ import annotations

import json
import random
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest

from fleetkeeper.reconcile.manifests.control_config import POLICY_FILE
from fleetkeeper.reconcile.manifests.engine_document import KEYS_DIR
from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.inject import kill_operators
from fleetkeeper_local.demo.installation import SIMULATED_PROFILE, Installation
from tests.support.lanes import keep_first
from tests.support.node.service_world import (
    await_leader,
    await_operators,
    complete,
    failures,
    steady,
)

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("calm_operator")]

KILLS, MORE_KILLS = 4, 20
AT_ONCE = 44
"""Of examples/tiny.yaml at most 32 run, with a few looked ahead to."""


def test_the_same_manifest_applied_again_changes_nothing(fleet: Fleet) -> None:
    """As GitOps tools do, every few seconds: no write, no roll-out, the same generation."""
    before = fleet.live()
    children = (
        *("get", "deployments,services,poddisruptionbudgets,networkpolicies,configmaps"),
        *("-o", "jsonpath={range .items[*]}{.metadata.uid} {.metadata.generation};{end}"),
    )
    seen = fleet.kubectl(*children)
    manifest = fleet.kubectl(
        *("get", "inferenceservices.fleetkeeper.io", fleet.name, "-o"),
        r"jsonpath={.metadata.annotations.kubectl\.kubernetes\.io/last-applied-configuration}",
    )
    for _ in range(5):
        assert "unchanged" in fleet.kubectl("apply", "-f", "-", given=manifest)
    after = fleet.live()
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert fleet.kubectl(*children) == seen


def test_a_changed_queue_limit_reaches_the_running_engine(fleet: Fleet) -> None:
    """Through the kubelet, which renews mounted ConfigMaps, on this node every ten seconds; the pod stays."""
    before = [pod.identity for pod in fleet.engines()]
    (engine,) = fleet.engines()

    def mounted() -> int:
        read = ("exec", engine.name, "-c", "engine", "--", "cat", f"{KEYS_DIR}/{POLICY_FILE}")
        limit: int = json.loads(fleet.kubectl(*read))["tiers"]["batch"]["queueLimit"]
        return limit

    kept = mounted()
    assert kept > AT_ONCE
    fleet.change({"tiers": {"batch": {"queueLimit": 1}}})
    fleet.until(lambda: mounted() == 1, "the file in the pod")
    fleet.until(lambda: 1 in refused_for_full_queues(fleet, "batch"), "429 at a queue of one")
    fleet.change({"tiers": {"batch": {"queueLimit": kept}}})
    assert [pod.identity for pod in fleet.engines()] == before


def refused_for_full_queues(fleet: Fleet, tier: str) -> set[int]:
    """The queue limits that refusals tell, of more requests at once than the engine has places."""
    url = fleet.base_url()

    def limit() -> int | None:
        try:
            complete(url, fleet.name, tokens=48, logprobs=None, **{"X-Inference-Tier": tier})
        except urllib.error.HTTPError as refused:
            error = json.load(refused)["error"]
            return error["limit"] if error["code"] == "queue_full" else None
        return None

    with ThreadPoolExecutor(AT_ONCE) as crowd:
        asked = [crowd.submit(limit) for _ in range(AT_ONCE)]
        return {found for one in asked if (found := one.result()) is not None}


@pytest.mark.promise("operator-outage")
@pytest.mark.parametrize("kills", keep_first(1, (KILLS, MORE_KILLS), pytest.mark.exhaustive))
def test_operators_killed_at_random_moments_under_load_cost_nothing(
    fleet: Fleet, product: Installation, kills: int
) -> None:
    """kill -9 of both, several times, at work and while they start: nothing fails, restarts or moves."""
    moments = random.Random(7)
    before = [pod.identity for pod in [*fleet.engines(), *fleet.pods("router")]]
    with steady(fleet, 3.0, seed=6) as traffic:
        for kill in range(kills):
            if kill % 2 == 0:  # every other one while somebody leads; in between they start
                await_leader(product)
            time.sleep(moments.uniform(0.0, 2.0))  # the moment is the point: nothing is awaited
            fleet.until(lambda: kill_operators(product), "an operator to kill")
        await_operators(product)
        fleet.await_ready(1)
    assert failures(traffic.samples) == []
    assert [pod.identity for pod in [*fleet.engines(), *fleet.pods("router")]] == before


@pytest.mark.exhaustive
def test_an_operator_upgrade_with_a_new_engine_profile_restarts_nothing(
    fleet: Fleet, product: Installation
) -> None:
    """N to N+1 by Helm: the service stays on its profile and says that a newer one is there."""
    before = [pod.identity for pod in [*fleet.engines(), *fleet.pods("router")]]
    old = product.values
    newer = f"{SIMULATED_PROFILE.rpartition('-')[0]}-2"
    values = {
        **old,
        "podAnnotations": {"release": "next"},
        "engineProfiles": {
            **old["engineProfiles"],
            newer: {
                "accelerator": "cpu",
                "vllmVersion": "0.32.0",
                "contract": 1,
                "delivery": "baked",
                "simulated": True,
                "resources": {"cpu": "50m", "memory": "256Mi", "sharedMemory": "64Mi"},
                **old["engineProfiles"][SIMULATED_PROFILE],
            },
        },
        "engineAliases": {"simulated": newer},
    }
    with steady(fleet, 3.0, seed=8) as traffic:
        product.install(values)
        fleet.until(
            lambda: fleet.status()["engine"].get("updateAvailable") == newer, "the newer profile"
        )
        product.install(old)
        fleet.until(
            lambda: not fleet.status()["engine"].get("updateAvailable"), "the older chart again"
        )
    assert failures(traffic.samples) == []
    assert [pod.identity for pod in [*fleet.engines(), *fleet.pods("router")]] == before
    assert fleet.status()["engine"]["profile"] == SIMULATED_PROFILE

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
from fleetkeeper_local.demo.installation import PROFILE, Installation
from tests.support.lanes import keep_first
from tests.support.service_world import (
    await_leader,
    await_measured,
    await_operators,
    complete,
    failures,
    says,
    steady,
)

pytestmark = pytest.mark.usefixtures("calm_operator")

KILLS, MORE_KILLS = 4, 20
AT_ONCE = 44
"""Of examples/tiny.yaml at most 32 run, with a few looked ahead to."""


def test_an_applied_service_turns_ready_and_answers_by_its_name(fleet: Fleet) -> None:
    """Apply, Ready, an answer through the router; the model has the service's name, and no other."""
    answer = complete(fleet.base_url(), "tiny", tokens=5)
    assert answer["model"] == "tiny"
    assert answer["usage"]["completion_tokens"] == 5
    with pytest.raises(OSError, match="404"):
        complete(fleet.base_url(), "another-model")
    status = fleet.status()
    assert status["url"] == f"http://tiny.{fleet.namespace}.svc:80/v1"
    assert status["summary"]["ready"] == "1/1"
    assert status["engine"]["profile"] == PROFILE
    router = fleet.pods("router")
    assert [pod.ready for pod in router] == [True]


def test_a_request_for_logprobs_is_answered_and_harms_no_engine(fleet: Fleet) -> None:
    """vLLM compiles their ranking; the image for CPU has no compiler, and EngineCore ended for it."""
    before = [pod.identity for pod in fleet.engines()]
    answer = complete(fleet.base_url(), "tiny", tokens=3, logprobs=1)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 3
    assert complete(fleet.base_url(), "tiny", tokens=3)["usage"]["completion_tokens"] == 3
    assert [pod.identity for pod in fleet.engines()] == before


def test_the_same_manifest_applied_again_changes_nothing(fleet: Fleet) -> None:
    """As GitOps tools do, every few seconds: no write, no roll-out, the same generation."""
    before = fleet.live()
    children = (
        *("get", "deployments,services,poddisruptionbudgets,networkpolicies,configmaps"),
        *("-o", "jsonpath={range .items[*]}{.metadata.uid} {.metadata.generation};{end}"),
    )
    seen = fleet.kubectl(*children)
    manifest = fleet.kubectl(
        *("get", "inferenceservices.fleetkeeper.io", "tiny", "-o"),
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
            complete(url, "tiny", tokens=48, logprobs=None, **{"X-Inference-Tier": tier})
        except urllib.error.HTTPError as refused:
            error = json.load(refused)["error"]
            return error["limit"] if error["code"] == "queue_full" else None
        return None

    with ThreadPoolExecutor(AT_ONCE) as crowd:
        asked = [crowd.submit(limit) for _ in range(AT_ONCE)]
        return {found for one in asked if (found := one.result()) is not None}


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
    newer = f"{PROFILE.rpartition('-')[0]}-2"
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
                "image": old["engineProfiles"][PROFILE]["image"],
                "resources": {"cpu": "4", "memory": "16Gi", "sharedMemory": "1Gi"},
            },
        },
        "engineAliases": {"cpu": newer},
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
    assert fleet.status()["engine"]["profile"] == PROFILE


def test_memory_stays_within_the_cap_and_the_peak_is_reported(fleet: Fleet) -> None:
    """At most 80% of the pod's memory, under a batch as large as it gets, and status says how much."""
    with steady(fleet, 12.0, seed=2) as traffic:
        fleet.until(lambda: len(traffic.samples) > 60, "sixty answers")
        memory = fleet.until(lambda: fleet.status().get("memory") or {}, "status.memory")
    peak = fleet.until(lambda: (fleet.status()["memory"] or {}).get("peakPercent"), "a peak")
    assert memory["capPercent"] == 80
    assert 20 < peak <= 80
    assert fleet.condition("MemoryWithinCap")["status"] == "True"


def test_a_bad_roll_out_leaves_the_old_pods_serving_and_says_why(fleet: Fleet) -> None:
    """A model that is not there: the old pod answers on, the reason is told, and it is taken back."""
    await_measured(fleet)  # and so good: Ready for a minute
    before = [pod.identity for pod in fleet.engines()]
    with steady(fleet, 2.0, seed=10) as traffic:
        fleet.change({"model": {"source": "pvc://models/no-such-model"}})
        stalled = fleet.until(
            lambda: (c := fleet.condition("Stalled")).get("status") == "True" and c, "Stalled"
        )
        assert stalled["reason"] == "RolledBack"
        assert "ModelNotFound" in stalled["message"]
        assert "/no-such-model" in stalled["message"]
        assert fleet.condition("Available")["status"] == "True"
        fleet.until(
            lambda: [pod.identity for pod in fleet.engines()] == before, "only the old pod is left"
        )
        fleet.until(lambda: says(fleet, "/no-such-model", "RolledBack"), "the event")
    assert failures(traffic.samples) == []
    fleet.change({"model": {"source": "pvc://models/tiny"}})
    fleet.await_ready(1)
    assert not fleet.condition("Stalled")
    assert [pod.identity for pod in fleet.engines()] == before

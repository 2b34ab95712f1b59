"""One fleet from its first apply to its last change, always under somebody's load.

The tests share a fleet and leave it as they found it: one replica, Ready.
"""

from __future__ import annotations

import random
import time

import pytest

from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.inject import kill_operators
from fleetkeeper_local.demo.installation import PROFILE, Installation
from service_world import (
    await_restarted,
    complete,
    failures,
    operator_restarts,
    requests_served,
    steady,
    tracebacks,
)

pytestmark = [pytest.mark.timeout(1500), pytest.mark.usefixtures("calm_operator")]


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


def test_memory_stays_within_the_cap_and_the_peak_is_reported(fleet: Fleet) -> None:
    """At most 80% of the pod's memory, under a batch as large as it gets, and status says how much."""
    with steady(fleet, 12.0, seed=2) as traffic:
        fleet.until(lambda: len(traffic.samples) > 60, "sixty answers")
        memory = fleet.until(lambda: fleet.status().get("memory") or {}, "status.memory")
    peak = fleet.until(lambda: (fleet.status()["memory"] or {}).get("peakPercent"), "a peak")
    assert memory["capPercent"] == 80
    assert 20 < peak <= 80
    assert fleet.condition("MemoryWithinCap")["status"] == "True"


def test_replicas_follow_the_order_and_no_request_is_lost(fleet: Fleet) -> None:
    """One to two and back under load: nobody notices; sessions stick to their replica."""
    with steady(fleet, 3.0, seed=4) as traffic:
        fleet.kubectl("scale", "inferenceservices.fleetkeeper.io/tiny", "--replicas=2")
        fleet.await_ready(2)
        assert fleet.live()["status"]["readyReplicas"] == 2
    assert failures(traffic.samples) == []
    _assert_sessions_stick(fleet)
    with steady(fleet, 3.0, seed=5) as traffic:
        fleet.until(lambda: len(traffic.samples) >= 5, "some load")
        fleet.kubectl("scale", "inferenceservices.fleetkeeper.io/tiny", "--replicas=1")
        fleet.await_ready(1)
        seen = len(traffic.samples)
        fleet.until(lambda: len(traffic.samples) >= seen + 5, "load on what is left")
    assert failures(traffic.samples) == []


def _assert_sessions_stick(fleet: Fleet) -> None:
    """Each session's requests all reach one replica, and sessions spread over both."""
    homes = set()
    url = fleet.base_url()
    for session in range(8):
        before = requests_served(fleet)
        for _ in range(4):
            complete(url, "tiny", tokens=2, **{"X-Session-ID": f"session-{session}"})
        after = requests_served(fleet)
        gained = {name: after[name] - before[name] for name in after if after[name] > before[name]}
        assert list(gained.values()) == [4], (session, gained)
        homes |= set(gained)
    assert len(homes) == 2


def test_operators_killed_under_load_cost_nothing(fleet: Fleet, product: Installation) -> None:
    """kill -9 of both operators at random moments: engines serve on, nothing restarts or moves."""
    moments = random.Random(7)
    before = [pod.identity for pod in fleet.engines()]
    with steady(fleet, 3.0, seed=6) as traffic:
        for _ in range(3):
            time.sleep(moments.uniform(0.5, 6.0))  # the moment is the point: nothing is awaited
            restarts = operator_restarts(product)
            assert kill_operators(product) == 2
            await_restarted(product, restarts)
        fleet.await_ready(1)
    assert failures(traffic.samples) == []
    assert [pod.identity for pod in fleet.engines()] == before


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


def test_the_operator_never_lost_its_temper(product: Installation) -> None:
    """The scan of the log sees tracebacks, and sees none in what was said so far."""
    assert tracebacks('{"level": "error", "event": "x"}') != []
    assert tracebacks("Traceback (most recent call last):") != []
    assert tracebacks(product.logs()) == []

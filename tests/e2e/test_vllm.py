"""What only a real vLLM can show, on a real node. All other e2e tests run on simulated engines.

Each test continues with the fleet that the one before left, so that vLLM starts as rarely as
possible; alone, each test makes its own beginning.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fleetkeeper_engine.limits import PREFILL_QUANTUM_TOKENS
from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.inject import freeze_engine, slowed_engine
from fleetkeeper_local.demo.installation import PROFILE
from fleetkeeper_local.images import oci, registry
from fleetkeeper_local.load.open_loop import Sample
from fleetkeeper_local.node.node import Node
from tests.support.node.service_world import (
    HEAVY,
    ask,
    await_measured,
    complete,
    failures,
    in_container,
    limits,
    requests_served,
    route,
    says,
    steady,
)

OVERLOADS_PER_S = (30.0, 45.0, 65.0, 100.0)
"""Of longer answers: one replica on 0.8 of a core writes 15 to 40, by the machine."""
ORDERED_S = 90.0
"""The next load follows if none of these made the loop order a replica in this time."""
EASY, HARD = {"batchTimeMilliseconds": 60_000}, {"batchTimeMilliseconds": 2}
"""Every step is within the one, none within the other."""
LIGHT_PER_S = 2.0
"""Of short answers: one replica is bored."""
SLOW_CPUS = 0.15
SLOW_AT_ONCE = 24
"""More than the 8 requests of difference below which a prefix decides, not the load."""
EAT_MEMORY = """
from pathlib import Path
# The supervisor shall be the kernel's choice, as when it is the one that grows.
Path("/proc/1/oom_score_adj").write_text("1000")
held = []
while True:
    held.append(bytearray(b"x") * (64 << 20))
"""

pytestmark = pytest.mark.usefixtures("calm_operator")


def _push_model_image(node: Node, scratch: Path) -> str:
    """Push an image with only the tiny model's files in it; return the source that names it."""
    port = node.settings.registry_port
    layer = oci.write_layer(node.directory / "models" / "tiny", "model", scratch / "layer")
    layout = oci.write_image(scratch / "image", [layer], oci.ImageConfig())
    registry.push(f"oci:{layout}:1", port, "models/tiny", "1")
    return f"oci://localhost:{port}/models/tiny@{oci.image_digest(layout)}/model"


@pytest.fixture(scope="module")
def shared_fleet(vllm_fleet: Fleet) -> Fleet:
    """A real vLLM, in place of the simulated engines of the other files."""
    return vllm_fleet


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


def test_memory_stays_within_the_cap_and_the_peak_is_reported(fleet: Fleet) -> None:
    """At most 80% of the pod's memory, under a batch as large as it gets, and status says how much."""
    with steady(fleet, 12.0, seed=2) as traffic:
        fleet.until(lambda: len(traffic.samples) > 60, "sixty answers")
        memory = fleet.until(lambda: fleet.status().get("memory") or {}, "status.memory")
    peak = fleet.until(lambda: (fleet.status()["memory"] or {}).get("peakPercent"), "a peak")
    assert memory["capPercent"] == 80
    assert 20 < peak <= 80
    assert fleet.condition("MemoryWithinCap")["status"] == "True"


@pytest.mark.promise("live-limits")
def test_batch_limits_change_in_running_engines(fleet: Fleet) -> None:
    """By signed orders under load, seen at the engine's control port: no restart, no request lost.

    An objective that no step meets takes them down. Under one that every step meets, waiting requests
    bring them up again.
    """
    await_measured(fleet)
    fleet.until(
        lambda: fleet.status()["breaker"]["control"] == "Closed", "what came before is over"
    )
    before = [pod.identity for pod in fleet.engines()]
    asked = fleet.live()["spec"]
    fleet.change({"breaker": {"mode": "Disabled"}})  # nothing but limits shall answer the load
    try:
        with steady(fleet, OVERLOADS_PER_S[0], seed=3, shape=HEAVY) as traffic:
            fleet.change({"objectives": EASY})
            floor = limits(fleet.engines()[0])["floor"]
            first = fleet.until(lambda: _moved(fleet, floor, down=False), "an order in force")
            fleet.change({"objectives": HARD})
            low = fleet.until(lambda: _lowered(fleet, first), "lower limits in force")
            fleet.change({"objectives": EASY})
            fleet.until(lambda: _moved(fleet, low, down=False), "higher limits in force")
    finally:
        fleet.change({name: asked[name] for name in ("breaker", "objectives")})
    assert failures(traffic.samples) == []
    assert [pod.identity for pod in fleet.engines()] == before


def _moved(fleet: Fleet, old: tuple[int, int], *, down: bool) -> tuple[int, int] | None:
    """The limits in force once both are at most the old ones and one is less (down), or any is more."""
    now = _in_force(fleet)
    if now is None or now == old:
        return None
    lower = all(value <= was for value, was in zip(now, old, strict=True))
    return now if lower is down else None


def _lowered(fleet: Fleet, first: tuple[int, int]) -> tuple[int, int] | None:
    """The limits in force once a third of the sequences is left: then requests wait, and ask for more."""
    now = _moved(fleet, first, down=True)
    return now if now is not None and now[0] <= first[0] // 3 else None


def _in_force(fleet: Fleet) -> tuple[int, int] | None:
    """The limits that its engine has from the operator and told in the status; None while they move.

    A step may hold more tokens than ordered: as many as what runs and one prefill need to get on.
    """
    now = limits(fleet.engines()[0])
    status = fleet.status()
    assert status["breaker"].get("reason") != "SignalsLost", "another objective is no lost engine"
    batching = status["batching"]
    told = (batching["sequences"], batching["tokens"])
    sequences, tokens = now["effective"]
    most = max(told[1], now["ceiling"][0] + PREFILL_QUANTUM_TOKENS)
    if now["wanted"] != told or sequences != told[0] or not told[1] <= tokens <= most:
        return None
    for floor, value, ceiling in zip(now["floor"], told, now["ceiling"], strict=True):
        assert floor <= value <= ceiling
    return told


def test_a_bad_roll_out_leaves_the_old_pods_serving_and_says_why(fleet: Fleet) -> None:
    """A model that is not there: the old pod answers on, the reason is told, and it is taken back."""
    await_measured(fleet)  # and so good: Ready for a minute
    before = [pod.identity for pod in fleet.engines()]
    try:
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
                lambda: [pod.identity for pod in fleet.engines()] == before,
                "only the old pod is left",
            )
            fleet.until(lambda: says(fleet, "/no-such-model", "RolledBack"), "the event")
    finally:
        fleet.change({"model": {"source": "pvc://models/tiny"}})  # the tests after this one need it
    assert failures(traffic.samples) == []
    fleet.await_ready(1)
    assert not fleet.condition("Stalled")
    assert [pod.identity for pod in fleet.engines()] == before


@pytest.mark.promise("waits-replicas")
def test_load_raises_replicas(fleet: Fleet) -> None:
    """More than one replica carries: the loop orders another, says why, and it takes its share."""
    await_measured(fleet)
    (old,) = fleet.engines()
    fleet.change({"replicas": None})
    flood: list[Sample] = []
    for rate_per_s in OVERLOADS_PER_S:
        with steady(fleet, rate_per_s, seed=4, shape=HEAVY) as traffic:
            is_ordered = _is_ordered(fleet, 2)
        flood += traffic.samples
        if is_ordered:
            break
    assert is_ordered, fleet.status()
    fleet.until(lambda: says(fleet, "Replicas 1 -> 2: "), "the event")
    # The new one starts on the cores that the flood took; until it is a minute old none is taken away.
    with steady(fleet, LIGHT_PER_S, seed=13) as traffic:
        fleet.await_ready(2)
        fleet.until(lambda: all(requests_served(fleet).values()), "requests at the new replica")
    assert failures([*flood, *traffic.samples]) == []
    assert old.identity in [pod.identity for pod in fleet.engines()]


def _is_ordered(fleet: Fleet, replicas: int) -> bool:
    """Return once the loop wants this many replicas, or when it had its time."""
    end_s = time.monotonic() + ORDERED_S
    while fleet.status()["scaling"]["desired"] != replicas:
        if time.monotonic() > end_s:
            return False
        time.sleep(1.0)
    return True


@pytest.mark.exhaustive
def test_a_slow_replica_gets_fewer_requests(pair: Fleet) -> None:
    """With a fifth of its CPU it answers later; the router counts what it has not answered."""
    asked = pair.live()["spec"]
    pair.change(
        {"breaker": {"mode": "Disabled"}}
    )  # it sheds load, and nothing but the router shall act
    route(pair, {"policy": "LeastLoaded"})
    slow, fast = pair.engines()
    try:
        with slowed_engine(slow, SLOW_CPUS):
            before = requests_served(pair)
            with ThreadPoolExecutor(SLOW_AT_ONCE) as pool:
                list(pool.map(lambda n: ask(pair, f"{n} of ninety", tokens=32), range(90)))
            after = requests_served(pair)
    finally:
        pair.change({"breaker": asked["breaker"]})
        route(pair, {"policy": asked["routing"]["policy"]})
    gained = {name: after[name] - before[name] for name in after}
    print(f"{gained[slow.name]:.0f} of 90 at the slow replica")
    assert gained[slow.name] + gained[fast.name] == 90
    assert gained[slow.name] <= gained[fast.name] / 2
    assert {pod.identity for pod in pair.engines()} == {slow.identity, fast.identity}


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


@pytest.fixture
def claim_again(fleet: Fleet) -> Iterator[None]:
    """Restore the model in the claim: the release before this one, which a later test installs, takes no image."""
    before = fleet.live()["spec"]["model"]
    yield
    fleet.change({"model": before})
    fleet.await_ready(1)


@pytest.mark.exhaustive  # two more starts of vLLM for a volume of the kubelet
@pytest.mark.usefixtures("claim_again")
def test_a_model_from_an_image_takes_over_from_one_in_a_claim(
    fleet: Fleet, node: Node, tmp_path: Path
) -> None:
    """The kubelet pulls it by its digest and mounts it read-only; no request is lost meanwhile."""
    (old,) = fleet.engines()
    source = _push_model_image(node, tmp_path)
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

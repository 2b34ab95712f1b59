"""Batches on a real node: what is killed or upgraded while they run costs no line and doubles none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from fleetkeeper_local.common.report import say
from fleetkeeper_local.demo.fleet import Fleet, PodFacts
from fleetkeeper_local.demo.inject import is_core
from fleetkeeper_local.demo.installation import Installation, desired_claim
from fleetkeeper_local.demo.waiting_work import WaitingWork
from fleetkeeper_local.node.node import Node
from tests.support.node.node_world import until
from tests.support.node.service_world import gateway_pods, kill_processes, ordered

CLAIM = "batches"
COMPONENT = "gateway-batch"
CONCURRENCY = 16
"""Lines at a time: few enough that each fault meets a batch that runs."""
END_GUARD_S = 600.0
"""For lines: seconds, unless the machine is busy."""

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("calm_operator")]


@pytest.fixture(scope="module")
def kept(product: Installation, node: Node) -> Iterator[Installation]:
    """The release with batches on a volume that outlives their pod; as before afterwards."""
    folder = node.directory / CLAIM
    if folder.exists():  # of a session that was killed
        shutil.rmtree(folder)
    folder.mkdir()
    names = (folder, node.settings.node_name, product.namespace)
    volume, claim = desired_claim(CLAIM, *names, "ReadWriteOnce")
    product.cluster.apply(volume, claim)
    before = product.values
    try:
        product.install(_with_batch(product, concurrency=CONCURRENCY))
        yield product
    finally:
        product.install(before)
        namespaced = ("-n", product.namespace, "delete", "pvc", CLAIM)
        product.cluster.kubectl(*namespaced)
        product.cluster.kubectl("delete", "pv", volume["metadata"]["name"])
        shutil.rmtree(folder)


def _with_batch(product: Installation, **changes: object) -> dict[str, object]:
    gateway = product.values["gateway"]
    store = {"persistence": {"existingClaim": CLAIM, "accessModes": ["ReadWriteOnce"]}}
    batch = {**gateway["batch"], "store": store, **changes}
    return {**product.values, "gateway": {**gateway, "batch": batch}}


def _pod(product: Installation) -> PodFacts:
    (pod,) = gateway_pods(product, COMPONENT)
    return pod


def _await_more(work: WaitingWork, count: int, what: str) -> int:
    """Return the lines done, once `count` more are; the batch must still run then."""
    done = 0

    def are_done() -> bool:
        nonlocal done
        done = work.counts()[0]
        return done >= before + count

    before = work.counts()[0]
    until(are_done, f"{count} more lines {what}", END_GUARD_S)
    say(f"batch: {done} of {work.lines} lines {what}")
    assert done < work.lines, "the batch ended before the fault"
    return done


def _assert_all_done(work: WaitingWork) -> None:
    """Wait for the end; each line must have one answer, in the order of the input."""
    report = "\n".join(work.end([]))
    assert f" {work.lines} done, 0 failed" in report, report


@pytest.mark.exhaustive
def test_an_upgrade_costs_a_running_batch_nothing(
    kept: Installation, shared_fleet: Fleet, work: WaitingWork
) -> None:
    """The old process gives back the lines that it cannot finish, and the new one runs them."""
    ordered(shared_fleet, 1)
    old = _pod(kept)
    work.submit()
    _await_more(work, 20, "before the upgrade")
    kept.install(_with_batch(kept, concurrency=2 * CONCURRENCY))
    until(
        lambda: (
            [pod.uid != old.uid and pod.ready for pod in gateway_pods(kept, COMPONENT)] == [True]
        ),
        "the new batch process alone",
    )
    _assert_all_done(work)


@pytest.mark.promise("batch-one-result")
def test_what_is_killed_costs_a_batch_no_line(
    kept: Installation, shared_fleet: Fleet, work: WaitingWork
) -> None:
    """The batch process, Redis with all it knew, and the engine: each line once, in order."""
    fleet = ordered(shared_fleet, 1)
    work.lines = 1600  # lines that are done are visible a chunk at a time
    work.submit()
    _await_more(work, 20, "before anything is killed")
    pod = _pod(kept)
    kill_processes(pod, lambda command: "fleetkeeper-gateway" in command)
    until(
        lambda: _pod(kept).restarts > pod.restarts and _pod(kept).ready,
        "the batch process serves again",
    )
    _await_more(work, 20, "after the batch process was killed")
    (redis,) = gateway_pods(kept, "gateway-redis")
    kept.cluster.kubectl(
        *("-n", kept.namespace, "delete", "pod", redis.name, "--force", "--grace-period=0")
    )
    _await_more(work, 20, "after Redis lost everything")
    (engine,) = fleet.pods("engine")
    kill_processes(engine, is_core)
    fleet.until(
        lambda: all(
            pod.uid != engine.uid or pod.restarts > engine.restarts for pod in fleet.pods("engine")
        ),
        "the engine is replaced or starts again",
    )
    _assert_all_done(work)

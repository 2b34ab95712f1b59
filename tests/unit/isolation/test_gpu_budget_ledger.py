"""What every service holds counts, whatever state the service is in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fleetkeeper.adapters.kubernetes.records import Seen
from fleetkeeper.autoscale.arbitrate import Allocation, Want
from fleetkeeper.common.budget import Allowance, Budget
from fleetkeeper.reconcile.plan import Apply
from fleetkeeper.reconcile.types import Kind, Pod, Workload
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.gpu_ledger import GpuLedger

CHAT, CODE = Key("team-a", "chat"), Key("team-a", "code")


class Cluster:
    """A cache with services, Deployments and pods, and the ledger over it."""

    def __init__(self, total: int) -> None:
        self.cache = Cache(now=lambda: 0.0, changed=lambda _key: None)
        self.ledger = GpuLedger(self.cache, Budget(total))
        self.version = 0

    def service(self, key: Key, **metadata: Any) -> None:
        self.version += 1
        meta: dict[str, Any] = {
            "namespace": key.namespace,
            "name": key.name,
            "uid": f"u-{key.name}",
        }
        meta |= {"resourceVersion": str(self.version), "generation": 1, **metadata}
        self.cache.put_service({"metadata": meta, "spec": {"model": "unreadable"}})

    def deployment(self, key: Key, replicas: int, gpus: int, owner: str | None = None) -> Seen:
        engine = Workload(
            Kind.DEPLOYMENT,
            key.name,
            f"d-{key.name}",
            "1",
            "digest",
            controller_uid=owner or f"u-{key.name}",
            desired_replicas=replicas,
            accelerators=gpus,
        )
        return self.put(key, "Deployment", engine)

    def pod(self, key: Key, name: str, gpus: int, **fields: Any) -> Seen:
        on_node: dict[str, Any] = {"scheduled": True, "phase": "Running"}
        pod = Pod(name, f"uid-{name}", key.name, "engine", "rs", "hash", 0.0, accelerators=gpus)
        return self.put(key, "Pod", replace(pod, **{**on_node, **fields}))

    def put(self, key: Key, kind: str, record: Workload | Pod) -> Seen:
        self.version += 1
        found = Seen(kind, key.namespace, record.name, self.version, key.name, record)
        self.cache.put(found)
        return found

    def left(self, key: Key = CODE) -> int | None:
        """What the other service may have."""
        return self.ledger.allowance(key).gpus


def test_an_unreadable_and_a_deleting_service_count_with_their_deployment() -> None:
    """Nothing of the spec is needed to know what runs."""
    cluster = Cluster(10)
    cluster.service(CHAT)
    cluster.deployment(CHAT, 3, 2)
    assert cluster.left() == 4
    cluster.service(CHAT, deletionTimestamp="2026-01-01T00:00:00Z")
    assert cluster.left() == 4


def test_pods_of_a_service_that_is_gone_count_until_they_have_ended() -> None:
    """A drain takes minutes; its accelerators are nobody else's until then."""
    cluster = Cluster(10)
    cluster.service(CHAT)
    deployment = cluster.deployment(CHAT, 2, 2)
    pods = [cluster.pod(CHAT, name, 2, deleting=True) for name in ("a", "b")]
    assert cluster.left() == 2, "pods that end and the replicas that may follow them"
    cluster.cache.drop_service(CHAT)
    cluster.cache.gone(replace(deployment, version=100))
    assert cluster.left() == 6
    cluster.cache.gone(replace(pods[0], version=101))
    assert cluster.left() == 8
    cluster.pod(CHAT, "b", 2, deleting=True, phase="Succeeded")
    assert cluster.left() == 10


def test_what_is_not_on_a_node_or_not_the_services_own_is_no_claim() -> None:
    """Nobody starves others with a pod that never runs, or with a Deployment beside a service."""
    cluster = Cluster(10)
    cluster.service(CHAT)
    cluster.pod(CHAT, "forged", 1_000, scheduled=False, phase="Pending")
    cluster.deployment(CHAT, 1_000_000, 8, owner="u-somebody")
    cluster.deployment(Key("team-b", "ghost"), 1_000_000, 8)
    assert cluster.left() == 10


def test_what_one_look_is_about_to_write_is_not_given_to_another() -> None:
    """Two services are created at once: the second sees the first one's reservation."""
    cluster = Cluster(4)
    spec = {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]}
    manifest = {"spec": {"replicas": 3, "template": {"spec": spec}}}
    write = Apply(Kind.DEPLOYMENT, "chat", manifest, "digest", "create", create_only=True)
    cluster.ledger.reserve(CHAT, [write])
    assert (cluster.left(CHAT), cluster.left(CODE)) == (4, 1)
    cluster.service(CHAT)
    cluster.deployment(CHAT, 3, 1)
    cluster.ledger.reserve(CHAT, [])
    assert (cluster.left(CHAT), cluster.left(CODE)) == (4, 1)
    cluster.deployment(CHAT, 1, 1)
    assert cluster.left(CODE) == 3


def test_a_limited_service_waits_for_its_order_when_an_accelerator_becomes_free() -> None:
    """Else the first look would take it, and not the most urgent service."""
    cluster = Cluster(4)
    cluster.service(CODE)
    cluster.deployment(CODE, 1, 1)
    want = Want("team-a", "code", 4, 1)
    assert cluster.ledger.limit(CODE, Allocation(2, "the budget"), want)
    assert not cluster.ledger.limit(CODE, Allocation(2, "the budget"), want)
    assert cluster.ledger.allowance(CODE) == Allowance(2, "the budget")
    assert cluster.ledger.limit(CODE, Allocation(4), want)
    assert cluster.left(CODE) == 4


WAKES = Want("team-a", "chat", 1, 0, gpus_per_replica=2, waits_since=50.0)


def test_what_a_wake_waits_for_goes_to_no_service_that_is_reconciled_first() -> None:
    """Not to one that wakes later, is new, or sleeps for it and is asked again, until the next tick."""
    cluster = Cluster(4)
    cluster.service(CODE)
    cluster.deployment(CODE, 1, 1)
    assert cluster.left(CODE) == 4
    cluster.ledger.limit(CHAT, Allocation(0, "the budget"), WAKES)
    assert cluster.left(CODE) == 2
    sleeps = Want("team-a", "code", 1, 1, goes_to_sleep=True)
    cluster.ledger.limit(CODE, Allocation(1), sleeps)
    assert cluster.left(CODE) == 2
    cluster.ledger.limit(CHAT, Allocation(1), WAKES)
    assert (cluster.left(CHAT), cluster.left(CODE)) == (3, 2), "granted, and not ordered yet"
    cluster.ledger.limit(CHAT, Allocation(1), replace(WAKES, supplied=1))
    assert cluster.left(CODE) == 4, "ordered"
    cluster.ledger.limit(CHAT, Allocation(0), replace(WAKES, replicas=0))
    assert cluster.left(CODE) == 4, "its need has ended"


def test_what_the_tick_granted_is_taken_although_a_wake_waits_for_more() -> None:
    """The tick has both before it, and knows that the free accelerators are too few for the other."""
    cluster = Cluster(3)
    cluster.service(CODE)
    cluster.deployment(CODE, 2, 1)
    cluster.ledger.limit(CHAT, Allocation(0, "the budget"), WAKES)
    cluster.ledger.limit(CODE, Allocation(3), Want("team-a", "code", 3, 2))
    assert cluster.left(CODE) == 3
    cluster.ledger.forget(CODE)
    assert cluster.left(CODE) == 1
    cluster.ledger.forget(CHAT)
    assert cluster.left(CODE) == 3


def test_growth_that_waits_reserves_nothing() -> None:
    cluster = Cluster(4)
    cluster.ledger.limit(CHAT, Allocation(1, "the budget"), Want("team-a", "chat", 3, 1))
    assert cluster.left(CODE) == 4

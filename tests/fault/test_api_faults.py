"""The API server misbehaves in one way after another; the services are none the worse for it.

The short form runs in `make test`. `make test-fault` runs the long form, with longer faults and
several rounds of each.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import pytest
import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import CHILDREN, INFERENCE_SERVICE, LEASE
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_kube.resource import Resource
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.guards import GUARD_S
from tests.support.operators.operator_process import OperatorProcess
from tests.support.operators.operator_world import (
    Live,
    World,
    condition,
    is_ready,
    operator_world,
    service,
)
from tests.support.plane.fault_proxy import Fault, FaultProxy

LONG: Final = os.environ.get("FLEETKEEPER_CAMPAIGN") == "long"
SEED: Final = int(os.environ.get("FLEETKEEPER_TEST_SEED", "20261123"))
ROUNDS: Final = 5 if LONG else 1
FAULT_S: Final = 6.0 if LONG else 1.0
"""Shorter than the 10 s within which a leader must renew, so that no fault may cost the lease."""
PATIENT_LEASE: Final = {
    "FLEETKEEPER_LEADER__DURATION_S": "60",
    "FLEETKEEPER_LEADER__RENEW_DEADLINE_S": "40",
}
"""For the short form, which shares its processors with other tests: they may starve the API server for
longer than the default deadline, without any fault."""
SERVICES: Final = 20 if LONG else 5
CHANGED: Final = SERVICES // 2
"""Services whose spec changes during each fault; the others stay as they are."""
SHORT_PAUSES: Final = {
    "fleetkeeper_kube.reflector.MAX_DENIED_PAUSE_S": 3.0,
    "runtime.namespaces.MAX_PAUSE_S": 3.0,
    "runtime.queue.MAX_RETRY_S": 3.0,
    "runtime.resync.DENIED_RETRY_S": 3.0,
    "runtime.resync.RETRY_S": 2.0,
}
"""For the short form: pauses between two attempts that fail, which a fault of 1 s does not fill."""
MAX_WRITES: Final = 12
"""Writes for one service and fault that may reach the API server, events not counted."""
MAX_WATCHES_PER_S: Final = 100
"""Requests for watches that an API server gets if it closes each at once: two namespaces with nine
kinds, and a pause after each."""
FOREIGN: Final = ("ConfigMap", "Deployment", "Service")


@dataclass
class Row:
    """What one fault did."""

    fault: Fault
    lasted_s: float
    injected: int
    recovered_s: float
    most_writes: int
    writes: int
    replaced: int


class Campaign:
    """Twenty services, the objects of somebody else, and an operator behind the proxy."""

    def __init__(self, world: World, proxy: FaultProxy, other: str) -> None:
        self.world = world
        self.proxy = proxy
        self.other = other
        self.random = Random(SEED)
        self.names = [f"svc-{number:02d}" for number in range(SERVICES)]
        self.operator: OperatorProcess = world.operator(
            kubeconfig=proxy.kubeconfig,
            waits={} if LONG else SHORT_PAUSES,
            env={
                "FLEETKEEPER_NAMESPACES": json.dumps([world.namespace, other]),
                **({} if LONG else PATIENT_LEASE),
            },
        )

    async def start(self) -> None:
        """Start the operator and wait until every service is ready."""
        for kind in FOREIGN:
            path = CHILDREN[Kind(kind)].path(self.world.namespace)
            await self.world.client.request("POST", path, body=self._foreign(kind), timeout_s=30)
        await self.operator.start().leads()
        for name in self.names:
            await self.world.create(service(name, replicas=1))
        await self._apply_other(1)
        await self.world.ready(*self.names)
        await self.until_other_observed()
        await self.world.quiet(1.0)

    def _foreign(self, kind: str) -> Live:
        """Return an object of somebody else with a name that one of ours might have."""
        labels = {"app": "foreign"}
        container = {"name": "app", "image": "example.invalid/app:1"}
        template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
        specs: dict[str, Live] = {
            "ConfigMap": {"data": {"kept": "yes"}},
            "Deployment": {
                "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
            },
            "Service": {"spec": {"selector": labels, "ports": [{"port": 80}]}},
        }
        return {
            "apiVersion": "apps/v1" if kind == "Deployment" else "v1",
            "kind": kind,
            "metadata": {"name": "svc-foreign", "namespace": self.world.namespace},
            **specs[kind],
        }

    async def _apply_other(self, replicas: int) -> None:
        await self.world.client.request(
            "PATCH",
            INFERENCE_SERVICE.path(self.other, "other") + "?fieldManager=owner",
            body=service("other", replicas=replicas),
            content_type="application/apply-patch+yaml",
            timeout_s=30,
        )

    async def until_other_observed(self) -> None:
        """Wait until the service of the other namespace is ready in its present generation."""
        async with asyncio.timeout(GUARD_S):
            while not is_ready(await self._other_live()):  # noqa: ASYNC110 - not watched here
                await asyncio.sleep(0.2)

    async def _other_live(self) -> Live:
        return await self._read(INFERENCE_SERVICE, self.other, "other")

    async def _read(self, resource: Resource, namespace: str, name: str) -> Live:
        found = await self.world.client.read(resource, namespace, name)
        assert found is not None, name
        return found

    # -- one fault --------------------------------------------------------------------------------

    async def play(self, fault: Fault) -> Row:
        """Inject one fault while specs change, and check what is left after it."""
        changed = self.random.sample(self.names, CHANGED)
        steady = [name for name in self.names if name not in changed]
        pods, foreign = self.pods(steady), await self.foreign_objects()
        leader = await self.leader()
        mark = self.world.mark()
        async with asyncio.TaskGroup() as group:
            group.create_task(
                self.change_specs(changed)
            )  # a slow machine must not extend the fault
            async with self.proxy.injected_fault(fault):
                injected_at = time.monotonic()
                await asyncio.sleep(FAULT_S)
                if fault is not Fault.NO_BOOKMARKS:  # one comes about once a minute
                    async with asyncio.timeout(GUARD_S):
                        await self.proxy.hit.wait()
                fault_s = time.monotonic() - injected_at
        began = time.monotonic()
        await self.world.until(f"all ready after: {fault}", self.is_converged)
        await self.until_other_observed()
        recovered_s = time.monotonic() - began
        await self.world.quiet(1.0)
        assert self.operator.alive
        assert await self.leader() == leader, f"the leader changed during: {fault}"
        assert await self.foreign_objects() == foreign, f"a foreign object changed during: {fault}"
        replaced = pods - self.pods(steady)
        assert not replaced, f"pods of unchanged services were replaced during: {fault}"
        counts = self.writes_by_service(mark)
        most = max(counts.values(), default=0)
        assert most <= MAX_WRITES, (fault, counts)
        return Row(
            fault,
            fault_s,
            self.proxy.injected,
            recovered_s,
            most,
            counts.total(),
            len(replaced),
        )

    async def change_specs(self, names: list[str]) -> None:
        """Change the specs of these services and of the one in the other namespace."""
        for name in names:
            await self.world.change(name, **self.change())
        await self._apply_other(self.random.randint(1, 2))

    def change(self) -> dict[str, Any]:
        """Return a random change of a spec: some roll pods out, some do not."""
        return self.random.choice(
            (
                {"replicas": self.random.randint(0, 2)},
                {"objectives": {"queueWaitMilliseconds": self.random.randint(100, 900)}},
                {"engine": {"options": {"seed": str(self.random.randint(1, 99))}}},
                {"tiers": {"batch": {"sharePercent": self.random.randint(10, 50)}}},
            )
        )

    def is_converged(self) -> bool:
        """Return whether every service has observed its spec and runs what it asks for."""
        for name in self.names:
            live = self.world.fis(name)
            deployment = self.world.get("Deployment", name)
            if live is None or deployment is None:
                return False
            replicas = live["spec"]["replicas"]
            observed = condition(live, "Ready").get("observedGeneration")
            if (
                observed != live["metadata"]["generation"]
                or not is_rolled_out(deployment, replicas)
                or (replicas and not is_ready(live))
            ):
                return False
        return True

    def pods(self, names: list[str]) -> set[str]:
        """Return the UIDs of these services' pods that are not being deleted."""
        return {
            live["metadata"]["uid"]
            for (kind, name), live in self.world.objects.items()
            if kind == "Pod"
            and "deletionTimestamp" not in live["metadata"]
            and name.startswith(tuple(f"{service}-" for service in names))
        }

    async def foreign_objects(self) -> dict[str, Live]:
        """Return each foreign object without what the cluster's own controllers write."""
        found = {}
        for kind in FOREIGN:
            resource = CHILDREN[Kind(kind)]
            live = await self._read(resource, self.world.namespace, "svc-foreign")
            live.pop("status", None)
            kept = ("uid", "labels", "ownerReferences", "deletionTimestamp")
            live["metadata"] = {key: live["metadata"].get(key) for key in kept}
            found[kind] = live
        return found

    async def leader(self) -> tuple[str, int]:
        """Return the holder of the lease and how often it changed hands."""
        listed = await self.world.client.request("GET", LEASE.path(self.world.namespace))
        spec = listed["items"][0]["spec"]
        return spec["holderIdentity"], spec.get("leaseTransitions", 0)

    def writes_by_service(self, mark: int) -> Counter[str]:
        """Return the writes that reached the API server since `mark`, by service."""
        counts: Counter[str] = Counter()
        for write in self.world.writes(mark):
            owner = next((name for name in self.names if write.name.startswith(name)), "")
            if owner:
                counts[owner] += 1
        return counts


@pytest_asyncio.fixture
async def campaign(control_plane: ControlPlane) -> AsyncIterator[Campaign]:
    async with operator_world(control_plane, "fault-api") as world:
        other = f"{world.namespace}-b"
        world.share_rights(other)
        try:
            async with FaultProxy(control_plane, world.user, seed=SEED, forbidden=other) as proxy:
                found = Campaign(world, proxy, other)
                await found.start()
                yield found
        finally:
            control_plane.kubectl("delete", "namespace", other, "--wait=false")


@pytest.mark.timeout(3600)
async def test_no_api_fault_harms_a_service(campaign: Campaign) -> None:
    print(f"seed {SEED}, {SERVICES} services, {FAULT_S:g} s per fault")
    rows = [await campaign.play(fault) for _ in range(ROUNDS) for fault in Fault]
    print(table(rows))
    # A bookmark comes about once a minute: seldom within a fault.
    assert all(row.injected for row in rows if row.fault is not Fault.NO_BOOKMARKS)
    storm = [row.injected / row.lasted_s for row in rows if row.fault is Fault.WATCH_CLOSED]
    assert max(storm) < MAX_WATCHES_PER_S, "closed watches are reopened without a pause"
    assert not campaign.operator.tracebacks()


def is_rolled_out(deployment: Live, replicas: int) -> bool:
    """Return whether the Deployment has so many pods, all of its present template."""
    status = deployment.get("status") or {}
    counts = [status.get(key, 0) for key in ("replicas", "updatedReplicas", "readyReplicas")]
    observed = status.get("observedGeneration") == deployment["metadata"]["generation"]
    return observed and {deployment["spec"]["replicas"], *counts} == {replicas}


def table(rows: list[Row]) -> str:
    """Return the campaign's figures as a Markdown table."""
    lines = [
        "| fault | lasted | requests changed | converged after | writes | most for one service | pods replaced |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.fault} | {row.lasted_s:.1f} s | {row.injected} | {row.recovered_s:.1f} s | {row.writes} "
        f"| {row.most_writes} | {row.replaced} |"
        for row in rows
    ]
    return "\n".join(lines)

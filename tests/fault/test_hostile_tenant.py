"""A tenant writes whatever the API server accepts; the services of others do not notice.

The short form runs in `make test`. `make test-fault` writes 10,000 objects and holds the reaction
times of the other services to twice what they were without the tenant.

Etcd, API server, operator and tenant share the machine, so the tenant slows the API server's own
answers, and with them every reaction. Reactions are therefore compared in units of the time that the
API server takes to answer the change itself. The report prints both in seconds too.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from statistics import median, quantiles
from typing import Final

import pytest
import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import INFERENCE_SERVICE
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_kube.resource import Resource
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.operator_world import World, operator_world, service
from tests.support.plane.hostile_objects import hostile_child, hostile_service, hostile_status

LONG: Final = os.environ.get("FLEETKEEPER_CAMPAIGN") == "long"
SEED: Final = int(os.environ.get("FLEETKEEPER_TEST_SEED", "20261123"))
OBJECTS: Final = 10_000 if LONG else 80
REACTIONS: Final = 100 if LONG else 8
"""Changes of good services that are timed, without the tenant and again beside it."""
KEPT: Final = 200
"""Hostile objects that exist at a time; the oldest go first."""
WRITERS: Final = 4
SERVICES: Final = 20 if LONG else 8
MEMORY_LIMIT_BYTES: Final = 512 * 1024**2
"""The operator's default limit in the chart's values."""


class Tenant:
    """Writes hostile objects into a namespace of its own."""

    def __init__(self, world: World, namespace: str) -> None:
        self.namespace = namespace
        self.answers: Counter[int] = Counter()
        self._world = world
        self._random = Random(SEED)
        self._kept: deque[tuple[Resource, str]] = deque()
        self._services = ["bad-0"]

    async def write(self, objects: int) -> None:
        """Write so many objects, some at a time."""
        numbers = iter(range(objects))
        async with asyncio.TaskGroup() as group:
            for _ in range(WRITERS):
                group.create_task(self._write_some(numbers))

    async def _write_some(self, numbers: object) -> None:
        for number in numbers:  # type: ignore[attr-defined] # an iterator that the writers share
            await self._write_one(number)
            while len(self._kept) > KEPT:
                resource, name = self._kept.popleft()
                await self._send("DELETE", resource.path(self.namespace, name), None)

    async def _write_one(self, number: int) -> None:
        if self._random.random() < 0.5:
            resource, name = INFERENCE_SERVICE, f"bad-{number}"
            body = hostile_service(self._random, name)
        else:
            resource, body = hostile_child(self._random, self._services)
            name = body["metadata"]["name"]
        if not await self._send("POST", resource.path(self.namespace), body):
            return
        self._kept.append((resource, name))
        if resource is INFERENCE_SERVICE:
            self._services = [*self._services[-20:], name]
            path = f"{resource.path(self.namespace, name)}/status"
            await self._send("PATCH", path, hostile_status(self._random))

    async def _send(self, method: str, path: str, body: dict[str, object] | None) -> bool:
        """Send one request and count its answer; return whether the server took it."""
        merge = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            await self._world.client.request(
                method, path, body=body, content_type=merge, timeout_s=30
            )
        except ApiError as problem:
            self.answers[problem.status] += 1
            return False
        self.answers[200] += 1
        return True


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "fault-tenant") as found:
        yield found


@pytest.mark.timeout(7200)
async def test_a_hostile_tenant_slows_and_harms_nobody(world: World) -> None:
    tenant = Tenant(world, f"{world.namespace}-bad")
    world.share_rights(tenant.namespace)
    env = {
        "FLEETKEEPER_NAMESPACES": json.dumps([world.namespace, tenant.namespace]),
        # The tenant may keep an API server of two cores busy for longer than the default deadline.
        "FLEETKEEPER_LEADER__DURATION_S": "60",
        "FLEETKEEPER_LEADER__RENEW_DEADLINE_S": "40",
    }
    operator = await world.operator(env=env).start().leads()
    try:
        names = [f"good-{number:02d}" for number in range(SERVICES)]
        for name in names:
            await world.create(service(name, replicas=1))
        await world.ready(*names)
        await world.quiet(1.0)
        alone = await reactions(world, names)
        before, mark = replica_sets(world, names), world.mark()
        writing = asyncio.create_task(tenant.write(OBJECTS))
        beside = await reactions(world, names)
        await writing
        await world.ready(*names)
        assert replica_sets(world, names) == before, "a good service was rolled out"
        deleted = [
            write
            for write in world.writes(mark)
            if write.verb == "delete" and write.namespace == world.namespace
        ]
        assert not deleted, "the operator deleted something of a good service"
        assert operator.alive, operator.log.read_text()[-3000:]
        peak = operator.peak_bytes()
        report(tenant, {"alone": alone, "beside": beside}, peak)
        assert not operator.tracebacks(), "\n".join(operator.tracebacks())
        assert peak < MEMORY_LIMIT_BYTES
        if LONG:
            assert beside.in_answers() <= 2 * alone.in_answers()
    finally:
        world.plane.kubectl("delete", "namespace", tenant.namespace, "--wait=false")


@dataclass
class Reactions:
    """Seconds that each change of a good service took, and seconds of its own request in them."""

    seconds: list[float] = field(default_factory=list)
    answers_s: list[float] = field(default_factory=list)

    def in_answers(self) -> float:
        """Return the 95th percentile in units of the API server's median answer."""
        return p95(self.seconds) / median(self.answers_s)

    def __str__(self) -> str:
        return (
            f"median {median(self.seconds):.3f} s, p95 {p95(self.seconds):.3f} s; the change itself is "
            f"answered in {median(self.answers_s):.3f} s; p95 is {self.in_answers():.1f} such answers"
        )


async def reactions(world: World, names: list[str]) -> Reactions:
    """Change replicas and wait for the Deployment to follow, service after service."""
    found = Reactions()
    for number in range(REACTIONS):
        name = names[number % len(names)]
        live = world.fis(name) or {}
        replicas = 3 - live["spec"]["replicas"]  # 1 to 2, and back
        began = time.monotonic()
        await world.patch(INFERENCE_SERVICE, name, {"spec": {"replicas": replicas}})
        found.answers_s.append(time.monotonic() - began)
        await world.until(f"{name} follows", partial(runs, world, name, replicas))
        found.seconds.append(time.monotonic() - began)
    return found


def runs(world: World, name: str, replicas: int) -> bool:
    """Return whether the service's Deployment asks for so many replicas."""
    return bool((world.get("Deployment", name) or {})["spec"]["replicas"] == replicas)


def replica_sets(world: World, services: list[str]) -> set[str]:
    """Return the UIDs of the services' ReplicaSets: a roll-out makes a new one."""
    return {
        live["metadata"]["uid"]
        for (kind, name), live in world.objects.items()
        if kind == "ReplicaSet" and name.rpartition("-")[0] in services
    }


def p95(seconds: list[float]) -> float:
    """Return the 95th percentile."""
    return quantiles(seconds, n=20)[-1]


def report(tenant: Tenant, phases: dict[str, Reactions], peak: int) -> None:
    """Print what was written and what it did to the others."""
    answers = ", ".join(f"{code}: {count}" for code, count in sorted(tenant.answers.items()))
    print(f"seed {SEED}; answers to the tenant by status: {answers}")
    for phase, found in phases.items():
        print(f"reactions, {phase}: {found}")
    print(f"peak RSS of the operator: {peak / 1024**2:.0f} MiB")

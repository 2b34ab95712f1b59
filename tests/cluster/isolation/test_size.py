"""The largest objects that tenants can make, in as many namespaces, leave the operator its memory."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest_asyncio
import yaml

from fleetkeeper.adapters.kubernetes.resources import CHILDREN, INFERENCE_SERVICE, REPLICA_SET
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_kube.errors import NotTaken
from fleetkeeper_kube.resource import Resource
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.guards import GUARD_S
from tests.support.operators.operator_world import World, is_ready, operator_world, service

ROOT = Path(__file__).parents[3]
NAMESPACES = 20 if os.environ.get("FLEETKEEPER_CAMPAIGN") == "long" else 1
"""`make test-fault` fills twenty; each has two hundred objects, more than a page of a list."""
OURS = {"app.kubernetes.io/managed-by": "fleetkeeper", "fleetkeeper.io/service": "chat"}
MANY_LABELS = 20_000
"""With the fields that the API server notes down for them 0.6 MB of JSON that takes most memory of
all once it is decoded. The API server needs a second for one such object, so one in ten is made so."""
EXPANDING = "<" * 210_000
"""The API server writes each as six characters: 1.3 MB of JSON, made fast."""
Live = dict[str, Any]


def tenant_quota() -> Live:
    """The quota in docs/operations.md."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/operations.md").read_text(), re.DOTALL)
    return next(
        quota for quota in map(yaml.safe_load, blocks) if quota.get("kind") == "ResourceQuota"
    )


def memory_limit_mib() -> int:
    """The operator's limit in the chart's defaults."""
    values = yaml.safe_load((ROOT / "charts/fleetkeeper/values.yaml").read_text())
    limit = str(values["resources"]["limits"]["memory"])
    return int(limit.removesuffix("Mi"))


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "size") as found:
        yield found


def labels(count: int) -> dict[str, str]:
    """Our labels among as many others."""
    return {**OURS, **{f"l{number:06}": "" for number in range(count)}}


def large_service(number: int) -> Live:
    """A paused service with a spec near its bound, and with as many labels or annotations as fit."""
    terms = [
        {
            "topologyKey": "z",
            "labelSelector": {
                "matchExpressions": [{"key": "a", "operator": "Exists"} for _ in range(32)]
            },
        }
        for _ in range(16)
    ]
    live = service(f"large-{number}", paused=True)
    if number % 10:
        # Less than fits: a status is written to each, and the API server decodes it all for that.
        live["metadata"]["annotations"] = {"a": EXPANDING[:50_000]}
    else:
        live["metadata"]["labels"] = labels(MANY_LABELS)
    live["spec"]["placement"] = {
        "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    }
    return live


def config_map(number: int) -> Live:
    """A ConfigMap with many labels, with data near the bound of what is read, or with more of it."""
    metadata = {"name": f"large-{number}", "labels": labels(0 if number else MANY_LABELS)}
    data = {"x": EXPANDING * (2 if number % 10 == 5 else 1)}
    live = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    return {**live, "data": data} if number else live


def replica_set(number: int) -> Live:
    """A ReplicaSet whose record is as large as a record can be."""
    name = f"chat-{number:03}-".ljust(200, "x")
    selected = {"app": f"a{number}"}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": name, "labels": {**OURS, **selected}},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": selected},
            "template": {
                "metadata": {
                    "labels": selected,
                    "annotations": {"fleetkeeper.io/template-hash": "y" * 10_000},
                },
                "spec": {"containers": [{"name": "c", "image": "example.invalid/c:1"}]},
            },
        },
    }


FILLED = (
    ("count/inferenceservices.fleetkeeper.io", INFERENCE_SERVICE, large_service),
    ("count/configmaps", CHILDREN[Kind.CONFIG_MAP], config_map),
    ("count/replicasets.apps", REPLICA_SET, replica_set),
)


async def fill(world: World, spaces: list[str], hard: dict[str, int]) -> dict[str, int]:
    """Fills the quota in all namespaces; how many of each there are, and their bytes as sent."""
    filled: dict[str, int] = {"bytes": 0}

    def bodies() -> Iterator[tuple[Resource, str, Live]]:
        for counted, resource, make in FILLED:
            # The namespace's own ConfigMap of certificates counts too.
            count = hard[counted] - (resource.kind == "ConfigMap")
            filled[counted] = count * len(spaces)
            for number in range(count):
                body = make(number)
                filled["bytes"] += len(json.dumps(body)) * len(spaces)
                for space in spaces:
                    yield resource, space, body

    waiting = bodies()

    async def work() -> None:
        for resource, space, body in waiting:
            with suppress(NotTaken):  # an object that is too large is there all the same
                await world.client.request("POST", resource.path(space), body=body)

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(work())
    return filled


async def test_a_full_quota_of_the_largest_objects_in_many_namespaces_fits_the_memory_limit(
    world: World,
) -> None:
    """Read at a start, changed while it runs, and read again; another's service is served throughout."""
    quota = tenant_quota()
    hard = {key: int(value) for key, value in quota["spec"]["hard"].items()}
    spaces = [f"{world.namespace}-{number}" for number in range(NAMESPACES)]
    try:
        for space in spaces:
            world.plane.kubectl("create", "namespace", space)
        began = time.monotonic()
        filled = await fill(world, spaces, hard)
        print(f"filled in {time.monotonic() - began:.0f} s")
        # It counts now; it is made last because its controller takes minutes to learn of a new CRD.
        world.plane.kubectl("-n", spaces[0], "create", "-f", "-", input=json.dumps(quota))
        everywhere = {
            "FLEETKEEPER_NAMESPACES": "[]",
            "FLEETKEEPER_CONTROL_ENABLED": "true",
            # An API server of two cores answers slowly with such objects; this is about memory.
            "FLEETKEEPER_LEADER__ENABLED": "false",
        }
        with world.cluster_rights():
            operator = await world.operator(env=everywhere).start().leads()
            await world.create(service(replicas=1))
            await world.until("ready", lambda: is_ready(world.fis()), GUARD_S)
            services = filled["count/inferenceservices.fleetkeeper.io"]
            async with asyncio.timeout(240):
                while (await operator.metric("fleetkeeper_services") or 0) < services + 1:
                    assert operator.alive, operator.log.read_text()[-3000:]
                    await asyncio.sleep(0.5)
            change = {"metadata": {"annotations": {"touched": "yes"}}}
            for space in spaces:
                for resource in (CHILDREN[Kind.CONFIG_MAP], INFERENCE_SERVICE):
                    await world.client.request(
                        "PATCH",
                        resource.path(space, "large-1"),
                        body=change,
                        content_type="application/merge-patch+json",
                    )
            await world.change(replicas=2)
            await world.until("ready", lambda: is_ready(world.fis()), GUARD_S)
            peak = operator.peak_bytes() / 1024**2
            print(f"quota {hard}, filled {filled}, {NAMESPACES} namespaces: peak {peak:.0f} MiB")
            assert operator.alive
            assert not operator.tracebacks()
            assert peak < memory_limit_mib()
    finally:
        world.plane.kubectl("delete", "namespace", *spaces, "--ignore-not-found", "--wait=false")

"""Two releases in one cluster, and a rollback, on a real API server."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio

from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.chart.helm_chart import CHART, helm, only, rendered
from tests.support.operators.operator_process import OperatorProcess
from tests.support.operators.operator_world import World, operator_world, service

SHOWN = {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
Install = Callable[..., OperatorProcess]


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "releases-served") as found:
        found.plane.kubectl("-n", found.namespace, "delete", "rolebinding", "test-operator")
        yield found


@pytest.fixture
def install(world: World) -> Iterator[Install]:
    """Makes the chart's account, rights and markers of a release; the process is not started.

    The release's own namespace is made for it; everything goes with the test.
    """
    made: list[tuple[str, str]] = []

    def installed(*namespaces: str) -> OperatorProcess:
        # Of two in one second, the first name is the older one.
        space = f"release-{len(made)}-{secrets.token_hex(3)}"
        world.plane.kubectl("create", "namespace", space)
        objects = rendered({"namespaces": list(namespaces)}, release=space, namespace=space)
        name = f"{space}-fleetkeeper"
        kept = [
            item
            for item in objects
            if (item["kind"] in SHOWN or item["metadata"]["name"] == "fleetkeeper-release")
            and "helm.sh/hook" not in item["metadata"].get("annotations", {})
        ]
        objects_text = json.dumps({"apiVersion": "v1", "kind": "List", "items": kept})
        made.append((space, objects_text))
        world.plane.kubectl("create", "-f", "-", input=objects_text)
        return world.operator(
            space,
            kubeconfig=world.plane.service_account_kubeconfig(space, name),
            env={
                "FLEETKEEPER_NAMESPACES": json.dumps(namespaces),
                "FLEETKEEPER_OPERATOR_NAMESPACE": space,
                "FLEETKEEPER_LEADER__LEASE_NAME": name,
            },
        )

    yield installed
    for space, objects_text in made:
        world.plane.kubectl("delete", "--ignore-not-found", "-f", "-", input=objects_text)
        world.plane.kubectl("delete", "namespace", space, "--wait=false")


async def _refuses(operator: OperatorProcess, *words: str) -> None:
    assert await operator.start().ended() == 2
    (line,) = [
        line for line in operator.log.read_text().splitlines() if '"namespaces refused"' in line
    ]
    for word in (*words, "Uninstall one of them"):
        assert word in line, line


@pytest.mark.promise("one-release")
async def test_the_second_of_two_namespaced_releases_refuses_and_the_first_works_on(
    world: World, install: Install
) -> None:
    first = await install(world.namespace).start().leads()
    await _refuses(install(world.namespace), f"namespace {world.namespace}", first.name)
    await world.create(service(replicas=1))
    await world.ready()
    standby = world.operator("standby", kubeconfig=first.kubeconfig, env=first.env).start()
    first.kill()
    await standby.leads()


async def test_the_second_of_a_cluster_wide_and_a_namespaced_release_refuses(
    world: World, install: Install
) -> None:
    """Either may come first; what comes second sees it with the rights that it has anyway."""
    cluster = install()
    await cluster.start().leads()
    await _refuses(install(world.namespace), "the cluster-wide release", cluster.name)
    await cluster.stop()
    await cluster.start().leads()  # an upgrade of the first is not taken for a second


@pytest.mark.promise("one-release")
async def test_a_cluster_wide_release_that_comes_second_refuses(
    world: World, install: Install
) -> None:
    namespaced = install(world.namespace)
    await namespaced.start().leads()
    await _refuses(install(), f"namespace {world.namespace}", namespaced.name)
    assert namespaced.alive


async def test_namespaced_releases_side_by_side_both_work(world: World, install: Install) -> None:
    """And of two namespaces the one that is taken is left, not the other."""
    other = f"{world.namespace}-b"
    world.plane.kubectl("create", "namespace", other)
    try:
        await install(world.namespace).start().leads()
        both = install(world.namespace, other)
        await both.start().leads()
        assert f"namespace {world.namespace} is served by" in both.log.read_text()
        mark = world.mark()
        await world.create(service(replicas=1))
        await world.ready()
        assert both.alive
        world.user = f"system:serviceaccount:{both.name}:{both.name}-fleetkeeper"
        assert world.writes(mark) == []
    finally:
        world.plane.kubectl("delete", "namespace", other, "--wait=false")


async def test_a_rollback_asks_whether_a_profile_is_in_use(
    world: World, request: pytest.FixtureRequest
) -> None:
    """The job that asks runs before the rollback changes anything, as before an upgrade."""
    space = f"rollback-{secrets.token_hex(3)}"
    world.plane.kubectl("create", "namespace", space)
    request.addfinalizer(lambda: world.plane.kubectl("delete", "namespace", space, "--wait=false"))
    values: dict[str, Any] = {
        "namespaces": [world.namespace],
        "crds": {"enabled": False},
        "controlKeys": {"create": False, "secretName": "given"},
        "replicas": 1,
    }
    where = (f"--namespace={space}", f"--kubeconfig={world.plane.kubeconfig}")
    helm("install", "fleet", str(CHART), *where, values=values)
    helm("upgrade", "fleet", str(CHART), *where, values={**values, "workers": 8})
    mark = world.mark()
    helm("rollback", "fleet", "1", *where)
    with world.plane.audit_log.open("rb") as lines:
        lines.seek(mark)
        told = [json.loads(line) for line in lines.read().splitlines() if b'"create"' in line]
    created = [
        (event["objectRef"]["resource"], event["objectRef"].get("name", ""))
        for event in told
        if (event.get("objectRef") or {}).get("namespace") == space
    ]
    job = only(
        rendered(values, release="fleet", namespace=space), "Job", "fleet-fleetkeeper-profiles"
    )
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-upgrade,pre-rollback"
    assert ("jobs", job["metadata"]["name"]) in created, created
    helm("uninstall", "fleet", *where)

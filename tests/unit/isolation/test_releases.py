"""Two releases of Fleetkeeper never serve one namespace: the younger refuses, with words."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from aiohttp import web

from fleetkeeper.runtime.releases import NamespacesTaken, refuse_taken
from fleetkeeper_kube.errors import ApiError
from tests.support.plane.loopback_api import served

OLD, NEW = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"
MINE, OTHER = "ops/fleetkeeper", "elsewhere/keeper"


def marker(release: str, since: str, namespace: str = "kube-public") -> dict[str, Any]:
    """An object that shows a release."""
    return {
        "metadata": {
            "namespace": namespace,
            "creationTimestamp": since,
            "annotations": {"fleetkeeper.io/release": release},
        }
    }


async def refusal(
    namespaces: tuple[str, ...],
    *bindings: dict[str, Any],
    cluster: dict[str, Any] | None = None,
    unreadable: str = "",
) -> dict[str, str]:
    """What `refuse_taken` says of the release MINE: {namespace: who serves it}."""

    async def handler(request: web.Request) -> web.StreamResponse:
        place, plural = request.path.split("/")[-2:]
        if request.path.endswith("/configmaps/fleetkeeper-release"):
            return web.json_response(cluster or {}, status=200 if cluster else 403)
        assert plural == "rolebindings"
        assert request.query["labelSelector"] == "fleetkeeper.io/component=operator"
        if place == unreadable:
            return web.json_response({}, status=403)
        is_all = "namespaces" not in request.path
        found = [b for b in bindings if is_all or b["metadata"]["namespace"] == place]
        return web.json_response({"metadata": {}, "items": found})

    async with served(handler) as client:
        with contextlib.suppress(NamespacesTaken):
            await refuse_taken(client, MINE, namespaces)
            return {}
        with pytest.raises(NamespacesTaken, match="Uninstall one of them") as problem:
            await refuse_taken(client, MINE, namespaces)
    taken = problem.value.by_namespace
    assert all(release in str(problem.value) for release in taken.values())
    return taken


async def test_a_release_alone_is_not_refused() -> None:
    """Nor are its own standby replicas, nor the pods of its own upgrade: they are one release."""
    assert await refusal(()) == {}
    assert await refusal((), cluster=marker(MINE, OLD)) == {}
    assert await refusal(("a", "b"), marker(MINE, OLD, "a"), marker(MINE, NEW, "b")) == {}


async def test_a_second_cluster_wide_release_is_refused() -> None:
    taken = await refusal((), cluster=marker(OTHER, OLD))
    assert taken == {"": f"the cluster-wide release {OTHER} (since {OLD})"}


async def test_of_two_namespaced_releases_the_younger_refuses_the_namespace_they_share() -> None:
    mine = [marker(MINE, NEW, "a"), marker(MINE, NEW, "b")]
    taken = await refusal(("a", "b"), *mine, marker(OTHER, OLD, "b"), marker(OTHER, OLD, "c"))
    assert taken == {"b": f"the namespaced release {OTHER} (since {OLD})"}
    mine = [marker(MINE, OLD, "a"), marker(MINE, OLD, "b")]
    assert await refusal(("a", "b"), *mine, marker(OTHER, NEW, "b")) == {}


async def test_of_a_cluster_wide_and_a_namespaced_release_the_younger_refuses() -> None:
    """Each from its own side, by the same two timestamps: never both and never none."""
    other_cluster = marker(OTHER, OLD)
    assert set(await refusal(("a",), marker(MINE, NEW, "a"), cluster=other_cluster)) == {"a"}
    assert await refusal(("a",), marker(MINE, OLD, "a"), cluster=marker(OTHER, NEW)) == {}
    namespaced = marker(OTHER, OLD, "a")
    assert set(await refusal((), namespaced, cluster=marker(MINE, NEW))) == {"a"}
    assert await refusal((), marker(OTHER, NEW, "a"), cluster=marker(MINE, OLD)) == {}


async def test_of_two_that_came_in_the_same_second_one_refuses() -> None:
    """Timestamps have whole seconds: the name decides, in the same way on both sides."""
    both = [marker(MINE, OLD, "a"), marker(OTHER, OLD, "a")]
    assert set(await refusal(("a",), *both)) == {"a"}
    assert await refusal((), both[1], cluster=marker(MINE, OLD)) != {}
    assert OTHER < MINE


async def test_a_release_that_does_not_show_itself_yields() -> None:
    """Without the chart's objects (rbac.create: false) it can only be the careful one."""
    assert set(await refusal(("a",), marker(OTHER, NEW, "a"))) == {"a"}


async def test_disjoint_releases_live_side_by_side() -> None:
    assert await refusal(("a",), marker(MINE, NEW, "a"), marker(OTHER, OLD, "b")) == {}


async def test_a_marker_that_a_tenant_forges_stops_no_running_release() -> None:
    """It is younger than the release, and says nothing of namespaces that are not the tenant's."""
    forged = marker("evil/evil", NEW, "tenant")
    assert await refusal((), forged, cluster=marker(MINE, OLD)) == {}
    mine = [marker(MINE, NEW, "a"), marker(MINE, NEW, "tenant")]
    taken = await refusal(("a", "tenant"), *mine, marker("evil/evil", OLD, "tenant"))
    assert set(taken) == {"tenant"}


async def test_a_namespace_that_cannot_be_read_stops_no_other() -> None:
    assert await refusal(("a", "b"), marker(MINE, OLD, "b"), unreadable="a") == {}


async def test_an_api_server_in_trouble_is_asked_again_rather_than_taken_for_no() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=500)

    async with served(handler) as client:
        with pytest.raises(ApiError):
            await refuse_taken(client, MINE, ("a",))

"""From the release before this one to this one, and back, while services serve."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fleetkeeper.api.names import LABEL_COMPONENT, LABEL_SERVICE, router_name
from fleetkeeper.reconcile.manifests.router import COMMAND, ENVOY
from fleetkeeper_local.common.paths import REPOSITORY
from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.installation import (
    PROFILE,
    ImageNames,
    Installation,
    desired_values,
)
from fleetkeeper_local.images import builder
from fleetkeeper_local.node.node import Node
from tests.support.node.service_world import (
    FIS,
    await_measured,
    await_operators,
    await_routed,
    failures,
    identities,
    limits,
    steady,
    tiny,
)

pytestmark = [
    pytest.mark.exhaustive,  # builds a third set of images; tests/cluster/operator/test_upgrade.py keeps the promise
    pytest.mark.usefixtures("calm_operator"),
]

EARLIER_PROFILE = f"{PROFILE.rpartition('-')[0]}-0"
BEFORE_THE_FIRST = "95ee68cdb7be6b8366a1025b5764a0e21b191c25"
"""Stands for the earlier release while there is no tag; it has the API of the first release."""
Values = dict[str, Any]


@dataclass(frozen=True)
class EarlierRelease:
    """A checkout of the release before this one: its chart, and the images built from it."""

    revision: str
    root: Path

    @property
    def chart(self) -> Path:
        """The chart."""
        return self.root / "charts" / "fleetkeeper"

    def operator_image(self) -> builder.Image:
        """Build its operator."""
        recipe = builder.Recipe("earlier-operator", "operator/Containerfile", root=self.root)
        return builder.build_image(recipe)

    def router_image(self) -> builder.Image:
        """Build its router."""
        recipe = builder.Recipe(
            "earlier-router", "engine_image/Containerfile.router", root=self.root
        )
        return builder.build_image(recipe)

    def engine_image(self) -> builder.Image:
        """Build its engine with today's dependencies: a second set of them is 6 GB."""
        return builder.engine_image("earlier-engine", self.root)


def _earlier_release(directory: Path) -> EarlierRelease:
    """Extract the release before this one: the newest tag before this commit.

    A checkout without history skips the test.
    """
    described = _git("describe", "--tags", "--abbrev=0", "--match=v[0-9]*", "HEAD^")
    revision = described.stdout.decode().strip() or BEFORE_THE_FIRST
    if _git("cat-file", "-e", revision).returncode:
        pytest.skip(f"the history has no {revision}; run `git fetch --unshallow --tags`")
    archive = _git("archive", revision)
    assert archive.returncode == 0, archive.stderr.decode()
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(directory, filter="data")
    return EarlierRelease(revision, directory)


def _git(*args: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *args], cwd=REPOSITORY, capture_output=True, check=False)


@pytest.fixture(scope="module")
def shared_fleet(vllm_fleet: Fleet) -> Fleet:
    """A real vLLM: the release before this one knows no simulated engines."""
    return vllm_fleet


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> EarlierRelease:
    """The release before this one."""
    return _earlier_release(tmp_path_factory.mktemp("earlier"))


@pytest.fixture(scope="module")
def release_values(
    earlier: EarlierRelease, product: Installation, node: Node
) -> Iterator[tuple[Values, Values]]:
    """The values of the earlier release and of this one; afterwards, those of the other tests.

    Both have the profile of the earlier release's engine beside that of this one.
    """
    port = node.settings.registry_port
    engine = earlier.engine_image().push(port)
    present = product.values
    profiles = {
        **present["engineProfiles"],
        EARLIER_PROFILE: {
            "accelerator": "cpu",
            "vllmVersion": "0.32.0",
            "contract": 1,
            "delivery": "baked",
            "image": engine,
            "resources": {"cpu": "4", "memory": "16Gi", "sharedMemory": "1Gi"},
        },
    }
    router = earlier.router_image().push(port)
    names = ImageNames(earlier.operator_image().push(port), engine, router)
    known = {name: one for name, one in profiles.items() if "simulation" not in one}
    # Services of other modules may have a simulated profile, which the earlier release refuses to drop.
    before = {**desired_values(names, node), "engineProfiles": known, "dropProfilesInUse": True}
    yield before, {**present, "engineProfiles": profiles}
    product.install(present)


@pytest.fixture
def older(fleet: Fleet) -> Iterator[Fleet]:
    """A second service, which the test creates under the earlier release."""
    yield Fleet(fleet.cluster, fleet.namespace, "older")
    fleet.kubectl(
        *("delete", "inferenceservices.fleetkeeper.io/older", "--ignore-not-found", "--wait")
    )


def change_and_await(fleet: Fleet, queue_limit: int) -> None:
    """Returns when the operator that runs has reconciled a change that restarts nothing."""
    fleet.change({"tiers": {"batch": {"queueLimit": queue_limit}}})
    fleet.await_ready(1)


def test_the_release_before_this_one_is_upgraded_under_load(
    fleet: Fleet,
    older: Fleet,
    product: Installation,
    earlier: EarlierRelease,
    release_values: tuple[Values, Values],
) -> None:
    """No pod is replaced, and no request fails. What the earlier release made works on.

    The operator of this one sets limits in its engine, and its router finds a new replica. Envoy comes
    with the next rollout. Before all that, this release goes back to it, which replaces routers alone.
    """
    before, after = release_values
    limit = fleet.live()["spec"]["tiers"]["batch"]["queueLimit"]
    engines = [pod.identity for pod in fleet.engines()]
    Installation(product.cluster, before, chart=earlier.chart).install()
    await_operators(product)
    fleet.until(lambda: set(router_commands(fleet)) == {"vllm-router"}, "routers of before")
    change_and_await(fleet, limit - 1)
    assert [pod.identity for pod in fleet.engines()] == engines

    small = {"cpu": "400m"}  # two of them fit beside the other service
    manifest = tiny(engine={"profile": EARLIER_PROFILE}, routing={"replicas": 1}, resources=small)
    manifest["metadata"]["name"] = older.name
    older.kubectl("apply", "-f", "-", given=json.dumps(manifest))
    older.await_ready(1)
    kept = identities(fleet, older)
    with steady(fleet, 1.0, seed=22) as traffic, steady(older, 1.0, seed=23) as more:
        product.install(after)
        await_operators(product)
        change_and_await(fleet, limit)
        change_and_await(older, limit - 1)
    assert failures([*traffic.samples, *more.samples]) == []
    assert identities(fleet, older) == kept
    assert "router" not in older.status()
    assert fleet.status()["engine"]["profile"] == PROFILE
    assert older.status()["engine"]["profile"] == EARLIER_PROFILE

    await_measured(older)
    with steady(older, 4.0, seed=24):
        older.change({"breaker": {"mode": "Disabled"}, "objectives": {"batchTimeMilliseconds": 2}})
        (engine,) = older.engines()
        older.until(
            lambda: limits(engine)["effective"] < limits(engine)["ceiling"], "lower limits in force"
        )
    assert identities(fleet, older) == kept
    older.kubectl("scale", f"{FIS}/{older.name}", "--replicas=2")
    older.await_ready(2)
    with steady(older, 4.0, seed=25) as traffic:
        await_routed(older)
    assert failures(traffic.samples) == []
    assert set(identities(fleet, older)) > set(kept)

    with steady(older, 2.0, seed=26) as traffic, steady(fleet, 1.0, seed=27) as more:
        older.change({"routing": {"policy": "RoundRobin"}})
        fleet.change({"rollout": {"engineUpdates": "Automatic"}})
        await_envoy(older)
        await_envoy(fleet)
    assert failures([*traffic.samples, *more.samples]) == []
    (router,) = older.pods("router")  # what replaces it starts without the account
    older.kubectl("delete", "pod", router.name, "--wait=false")
    older.until(
        lambda: any(pod.ready and pod.uid != router.uid for pod in older.pods("router")),
        "another router",
    )
    fleet.change({"rollout": {"engineUpdates": "OnSpecChange"}})
    fleet.await_ready(1)


def router_commands(fleet: Fleet) -> list[str]:
    """The command of each router pod, also of those that end."""
    said = fleet.kubectl(
        *("get", "pods", "-l", f"{LABEL_SERVICE}={fleet.name},{LABEL_COMPONENT}=router"),
        *("-o", "jsonpath={.items[*].spec.containers[0].command[0]}"),
    )
    return said.split()


def await_envoy(fleet: Fleet) -> None:
    """Return when its last pod of vllm-router has ended, and nothing is left of it."""
    fleet.until(lambda: set(router_commands(fleet)) == {COMMAND}, "Envoy alone")
    fleet.until(lambda: fleet.status().get("router") == ENVOY, "Envoy in the status")
    fleet.until(lambda: not has_account(fleet), "no account")


def has_account(fleet: Fleet) -> bool:
    """Whether its routers have an account or a role."""
    kinds = "serviceaccounts,rolebindings"
    return router_name(fleet.name) in fleet.kubectl("get", kinds, "-o", "name")

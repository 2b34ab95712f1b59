"""The chart on a real API server: Helm installs it, and its rights are all that the operator needs."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from fleetkeeper.adapters.kubernetes.resources import INFERENCE_SERVICE
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_local.control_plane.access import KubectlError
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.chart.helm_chart import CHART, HelmError, helm, only, rendered
from tests.support.operators.command import Ran, run_command
from tests.support.operators.earlier_router import give_vllm_router
from tests.support.operators.operator_process import OperatorProcess
from tests.support.operators.operator_world import MARKER_PATH, World, operator_world, service

PROFILES = {"cpu-0.32.0-1": None, "cuda-0.32.0-1": None}


@dataclass(frozen=True)
class Release:
    """An installation by Helm."""

    plane: ControlPlane
    name: str
    namespace: str
    values: dict[str, Any]

    @property
    def arguments(self) -> tuple[str, ...]:
        """What every Helm command needs."""
        return (f"--namespace={self.namespace}", f"--kubeconfig={self.plane.kubeconfig}")

    def objects(self) -> list[dict[str, Any]]:
        """What the chart renders for it."""
        return rendered(self.values, release=self.name, namespace=self.namespace)

    def account(self, name: str = "") -> str:
        """A service account of the release, as the API server calls it."""
        return f"system:serviceaccount:{self.namespace}:{name or self.name}"

    def install(self) -> None:
        """Installs it and waits until its pods are ready."""
        helm(
            "install",
            self.name,
            str(CHART),
            *self.arguments,
            "--wait",
            "--timeout=300s",
            values=self.values,
        )


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "chart-served") as found:
        yield found


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A fresh namespace for a release."""
    name = f"chart-{secrets.token_hex(3)}"
    control_plane.kubectl("create", "namespace", name)
    control_plane.kubectl(
        "label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted"
    )
    yield name
    control_plane.kubectl("delete", "namespace", name, "--wait=false")


@pytest_asyncio.fixture
async def release(
    request: pytest.FixtureRequest, world: World, namespace: str
) -> AsyncIterator[Release]:
    """The chart installed: for the whole cluster, and for the world's namespace alone."""
    namespaced = request.param == "Role"
    name = f"fleetkeeper-{namespace}"
    found = Release(
        world.plane,
        name,
        namespace,
        {
            "namespaces": [world.namespace] if namespaced else [],
            "crds": {"enabled": False},
            "controlKeys": {"create": False, "secretName": "given"},
            "dropProfilesInUse": True,
        },
    )
    world.plane.kubectl("-n", namespace, "create", "secret", "generic", "given")
    # The rights that other tests use must not hide what the chart's lack.
    world.plane.kubectl("-n", world.namespace, "delete", "rolebinding", "test-operator")
    found.install()
    yield found
    helm("uninstall", name, *found.arguments)


def _operator(world: World, release: Release) -> OperatorProcess:
    """A process with the account, the rights and the settings of the release, and nothing else."""
    config = only(release.objects(), "ConfigMap", f"{release.name}-settings")["data"]
    profiles = world.directory / "profiles.yaml"
    profiles.write_text(config["profiles.yaml"])
    settings = yaml.safe_load(config["settings.yaml"])
    settings |= {"profilesFile": str(profiles), "controlJwksFile": None, "controlKeyFile": None}
    file = world.directory / "settings.yaml"
    file.write_text(yaml.safe_dump(settings))
    world.user = release.account()
    # The pods that the chart made are fake ones: they hold no lease.
    return world.operator(
        kubeconfig=release.plane.service_account_kubeconfig(release.namespace, release.name),
        env={
            "FLEETKEEPER_CONFIG": str(file),
            "FLEETKEEPER_OPERATOR_NAMESPACE": release.namespace,
        },
    )


def _forbidden(plane: ControlPlane, user: str) -> list[str]:
    found = []
    for line in plane.audit_log.read_text().splitlines():
        if f'"{user}"' not in line or '"code":403' not in line:
            continue
        event = json.loads(line)
        if event["user"].get("username") != user or event["requestURI"] == MARKER_PATH:
            continue
        if event["responseStatus"]["code"] == 403:
            found.append(f"{event['verb']} {event['requestURI']}")
    return found


@pytest.mark.promise("own-namespace", "smallest-role")
@pytest.mark.parametrize("release", ["ClusterRole", "Role"], indirect=True)
async def test_the_charts_rights_are_all_that_the_operator_needs(
    world: World, release: Release
) -> None:
    """A service with a router, with one of an earlier release, without one, scaled, repaired and deleted: nothing is forbidden."""
    operator = await _operator(world, release).start().leads()
    await world.create(service(routing={"policy": "LeastLoaded", "replicas": 2}, replicas=1))
    await world.ready()
    assert {kind for kind, name in world.children() if name.endswith("-fk-router")} == {
        "Deployment",
        "NetworkPolicy",
        "PodDisruptionBudget",
    }
    await operator.stop()
    await give_vllm_router(world, kinds=(Kind.SERVICE_ACCOUNT, Kind.DEPLOYMENT))
    await operator.start().leads()
    await world.until("its role", lambda: ("RoleBinding", "chat-fk-router") in world.children())
    binding = world.get("RoleBinding", "chat-fk-router")
    assert binding is not None
    assert binding["roleRef"]["name"] == f"{release.name}-router"
    await world.change(replicas=2, routing={"policy": "None"})
    await world.until(
        "no router", lambda: not [n for _, n in world.children() if n.endswith("-fk-router")]
    )
    await world.ready()
    await world.delete(INFERENCE_SERVICE, "chat")
    await world.until("children gone", lambda: not world.children())
    assert operator.alive
    assert _forbidden(world.plane, release.account()) == []
    assert world.writes()
    assert all(write.namespace == world.namespace for write in world.writes())


@pytest.mark.parametrize(
    "release",
    ["ClusterRole", pytest.param("Role", marks=pytest.mark.exhaustive)],
    indirect=True,
)
async def test_an_upgrade_and_a_return_leave_services_alone(world: World, release: Release) -> None:
    """The operator's own objects change; the CRD, the keys and the services do not."""
    await world.create(service())
    before = world.plane.kubectl("-n", world.namespace, "get", "fis", "chat", "-o", "json")
    newer = {**release.values, "workers": 8, "replicas": 1}
    helm(
        "upgrade",
        release.name,
        str(CHART),
        *release.arguments,
        "--wait",
        "--timeout=300s",
        values=newer,
    )
    helm("rollback", release.name, "1", *release.arguments, "--wait", "--timeout=300s")
    after = world.plane.kubectl("-n", world.namespace, "get", "fis", "chat", "-o", "json")
    assert json.loads(after)["metadata"]["uid"] == json.loads(before)["metadata"]["uid"]
    assert json.loads(after)["metadata"]["generation"] == 1
    assert "given" in release.plane.kubectl("-n", release.namespace, "get", "secrets", "-o", "name")


def test_the_key_job_makes_keys_once_with_a_right_that_reads_nothing(
    control_plane: ControlPlane, namespace: str
) -> None:
    """By the very account, role and arguments that the chart renders."""
    objects = rendered({}, release="fleetkeeper", namespace=namespace)
    name = "fleetkeeper-control-keys"
    for kind in ("ServiceAccount", "Role", "RoleBinding"):
        control_plane.kubectl("create", "-f", "-", input=json.dumps(only(objects, kind, name)))
    (container,) = only(objects, "Job", name)["spec"]["template"]["spec"]["containers"]
    account = control_plane.service_account_kubeconfig(namespace, name)

    def secret() -> dict[str, Any]:
        text = control_plane.kubectl("-n", namespace, "get", "secret", name, "-o", "json")
        found: dict[str, Any] = json.loads(text)
        return found

    first = run_command(*container["args"], kubeconfig=account)
    assert first.code == 0, first.err
    made = secret()
    assert set(made["data"]) == {"key.pem", "jwks.json"}
    second = run_command(*container["args"], kubeconfig=account)
    assert second.code == 0, second.err
    assert "already exists" in second.out
    assert secret() == made
    with pytest.raises(KubectlError, match="forbidden"):
        control_plane.kubectl("-n", namespace, "get", "secret", name, kubeconfig=account)


async def test_a_profile_in_use_is_not_dropped(world: World, tmp_path: Path) -> None:
    """The check before an upgrade names the services that would lose their engine."""
    await world.create(service())
    world.plane.kubectl(
        "-n",
        world.namespace,
        "patch",
        "fis",
        "chat",
        "--subresource=status",
        "--type=merge",
        "-p",
        json.dumps({"status": {"engine": {"profile": "cuda-0.32.0-1", "version": "0.32.0"}}}),
    )

    async def check(*names: str) -> Ran:
        objects = rendered(
            {
                "engineProfiles": {name: None for name in PROFILES if name not in names},
                "engineAliases": {
                    alias: None for alias in ("cpu", "cuda") if f"{alias}-0.32.0-1" not in names
                },
            }
        )
        file = tmp_path / "profiles.yaml"
        file.write_text(only(objects, "ConfigMap", "fleetkeeper-profiles")["data"]["profiles.yaml"])
        return await asyncio.to_thread(
            run_command,
            *("profiles-in-use", f"--profiles={file}", f"--namespace={world.namespace}"),
            kubeconfig=world.plane.kubeconfig,
        )

    kept = await check("cpu-0.32.0-1", "cuda-0.32.0-1")
    assert kept.code == 0, kept.err
    lost = await check("cpu-0.32.0-1")
    assert lost.code == 1
    assert f"{world.namespace}/chat uses the engine profile cuda-0.32.0-1" in lost.err


def test_helm_refuses_wrong_values_at_install(control_plane: ControlPlane, namespace: str) -> None:
    """Nothing half-installed stays."""
    with pytest.raises(HelmError, match="replica"):
        helm(
            "install",
            "wrong",
            str(CHART),
            f"--namespace={namespace}",
            f"--kubeconfig={control_plane.kubeconfig}",
            values={"replica": 3},
        )
    assert not control_plane.kubectl("-n", namespace, "get", "all", "-o", "name").strip()

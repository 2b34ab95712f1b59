"""`make demo CLUSTER=kind`, k3d or minikube: planned with stand-ins for the real programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.paths import REPOSITORY
from fleetkeeper_local.demo import __main__ as demo
from fleetkeeper_local.demo import dev_cluster, dev_images
from fleetkeeper_local.demo.dev_cluster import DevCluster, Tool, require_programs
from fleetkeeper_local.demo.installation import ImageNames
from fleetkeeper_local.demo.stage import GivenStage
from tests.support.node import dev_programs

pytestmark = pytest.mark.exhaustive

CONTAINERFILES = {
    "operator": "operator/Containerfile",
    "router": "router/Containerfile",
    "engine": "engine_image/Containerfile.cpu",
    "gateway": "gateway/Containerfile",
}
LOADS = {"kind": "kind load", "k3d": "k3d image import", "minikube": "minikube image load"}
CREATES = {"kind": "kind create", "k3d": "k3d cluster create", "minikube": "minikube start"}
DELETES = {"kind": "kind delete", "k3d": "k3d cluster delete", "minikube": "minikube delete"}


class Api:
    """The few reads of a cluster's API that the demo needs before it starts."""

    def __init__(self) -> None:
        """Start with one Ready node."""
        self.version = "v1.36.1"
        self.ready: list[str] = ["True"]
        """The status of the node's Ready condition in each answer; the last one stays."""
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(api.version_document() if self.path == "/version/" else api.nodes())

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self._answer({"status": {"allowed": True}, "spec": {}})

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
                pass

            def _answer(self, document: dict[str, Any]) -> None:
                body = json.dumps(document).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def version_document(self) -> dict[str, Any]:
        """Return what /version says."""
        major, minor = self.version.lstrip("v").split(".")[:2]
        known = ("gitCommit", "gitTreeState", "buildDate", "goVersion", "compiler", "platform")
        return {
            **dict.fromkeys(known, "x"),
            "major": major,
            "minor": minor,
            "gitVersion": self.version,
        }

    def nodes(self) -> dict[str, Any]:
        """Return the node."""
        status = self.ready.pop(0) if len(self.ready) > 1 else self.ready[0]
        return {"items": [{"status": {"conditions": [{"type": "Ready", "status": status}]}}]}


@pytest.fixture
def api() -> Iterator[Api]:
    """A cluster's API."""
    api = Api()
    thread = threading.Thread(target=api.server.serve_forever)
    thread.start()
    yield api
    api.server.shutdown()
    thread.join()
    api.server.server_close()


class World:
    """A machine with stand-in programs and nothing else on its PATH."""

    def __init__(self, directory: Path, api: Api) -> None:
        self.programs = directory / "bin"
        self.file = directory / "state.json"
        dev_programs.write(self.file, server=api.url)

    def has(self, *names: str) -> World:
        """Install programs."""
        dev_programs.install(self.programs, self.file, *names)
        return self

    @property
    def state(self) -> dict[str, Any]:
        """The clusters and images."""
        return dev_programs.read(self.file)

    @property
    def calls(self) -> list[str]:
        """All commands so far, in order."""
        return [call for call, _ in self.state["calls"]]

    def set(self, **changes: object) -> None:
        """Change its state."""
        dev_programs.write(self.file, **changes)

    def new_calls(self, *beginnings: str) -> list[str]:
        """Return the calls that begin like that, and forget all."""
        found = [call for call in self.calls if call.startswith(beginnings)]
        self.set(calls=[])
        return found


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: Api) -> World:
    """A machine on which no program is installed yet."""
    world = World(tmp_path, api)
    monkeypatch.setenv("PATH", str(world.programs))
    monkeypatch.setenv("FLEETKEEPER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dev_cluster, "POLL_S", 0.01)
    for name in ("DEMO_KUBECONFIG", "DOCKER_HOST", "KIND_EXPERIMENTAL_PROVIDER", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    return world


def everything(world: World, tool: Tool, engine: str = "docker") -> DevCluster:
    """Return the demo's cluster on a machine that has what it needs."""
    world.has(tool.value, engine, "kubectl", "helm")
    return DevCluster(tool, "fleetkeeper-demo", engine)


@pytest.mark.parametrize("engine", ["docker", "podman"])
@pytest.mark.parametrize("tool", list(Tool))
def test_the_cluster_is_created_then_images_are_built_loaded_and_installed(
    world: World, tool: Tool, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order: cluster, mark, each image built and tagged, each saved and loaded, Helm."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/user/1000/podman/podman.sock")
    dev = everything(world, tool, engine)
    assert require_programs(tool) == engine

    stage = dev_images.prepare(dev)

    kinds = [
        CREATES[tool],
        "kubectl --cache-dir",
        *(f"{engine} {verb}" for verb in ("build", "image inspect", "tag", "save")),
        LOADS[tool],
    ]
    seen = [kind for call in world.calls for kind in kinds if call.startswith(kind)]
    kubectl, build, inspect, tag, save = kinds[1:6]
    assert seen == [
        *(CREATES[tool], kubectl),
        *(build, inspect, tag) * len(CONTAINERFILES),
        kubectl,
        *(save, LOADS[tool]) * len(CONTAINERFILES),
    ]
    state = world.state
    assert state["clusters"]["fleetkeeper-demo"]["marked"]
    images = state["clusters"]["fleetkeeper-demo"]["images"]
    assert [image.rsplit("/")[-1].split(":")[0] for image in images] == list(CONTAINERFILES)
    assert not any(image.endswith(":latest") for image in images)
    assert not list(dev.directory.rglob("*.tar")), "the archives are removed"

    assert isinstance(stage, GivenStage)
    stage.install()
    values = world.state["values"]
    assert values["image"]["repository"] + ":" + values["image"]["tag"] == images[0]
    assert values["image"]["pullPolicy"] == "Never"
    assert values["router"]["image"] == images[1]
    assert [profile["image"] for profile in values["engineProfiles"].values()] == [images[2]]
    assert values["gateway"]["image"] == images[3]
    assert "prometheus" not in values


@pytest.mark.parametrize(("engine", "provider"), [("docker", None), ("podman", "podman")])
def test_commands_get_the_clusters_own_kubeconfig_and_kind_the_engine(
    world: World, engine: str, provider: str | None
) -> None:
    dev = everything(world, Tool.KIND, engine)
    dev_images.prepare(dev)
    for call, environment in world.state["calls"]:
        if call.startswith(("kind", engine)) and not call.endswith("info"):
            assert environment["KUBECONFIG"] == str(dev.kubeconfig), call
            assert environment.get("KIND_EXPERIMENTAL_PROVIDER") == provider, call
            assert environment["DOCKER_BUILDKIT"] == "1"


@pytest.mark.parametrize("tool", list(Tool))
def test_a_second_run_loads_only_what_changed(world: World, tool: Tool) -> None:
    dev = everything(world, tool)
    dev_images.prepare(dev)
    world.new_calls()

    dev_images.prepare(dev)
    assert world.new_calls(CREATES[tool], "docker save", LOADS[tool]) == []

    world.set(sources={CONTAINERFILES["router"]: "changed"})
    dev_images.prepare(dev)
    saved, loaded = world.new_calls("docker save", LOADS[tool])
    assert "/router:" in saved
    assert loaded.startswith(LOADS[tool])


def test_an_image_that_one_node_lacks_is_not_present() -> None:
    """Every node must report it: a pod may start on any of them."""

    class Nodes:
        def kubectl(self, *args: str) -> str:
            assert args == ("get", "nodes", "-o", "json")
            one = {"status": {"images": [{"names": ["a:1"]}, {"names": ["b:1"]}]}}
            two = {"status": {"images": [{"names": ["b:1", "b@sha256:0"]}, {"names": None}]}}
            return json.dumps({"items": [one, two]})

    assert dev_images.images_on_all_nodes(Nodes()) == {"b:1"}  # type: ignore[arg-type]


@pytest.mark.parametrize("tool", list(Tool))
def test_all_missing_programs_are_in_one_error(world: World, tool: Tool) -> None:
    world.programs.mkdir()
    with pytest.raises(LocalError) as caught:
        require_programs(tool)
    text = str(caught.value)
    for name in (tool.value, "kubectl", "helm", "docker", "podman"):
        assert f"{name} is not on the PATH" in text
    assert world.calls == []

    world.has("kubectl", "docker")
    with pytest.raises(LocalError) as caught:
        require_programs(tool)
    assert f"{tool.value} is not on the PATH" in str(caught.value)
    assert "helm is not on the PATH" in str(caught.value)
    assert "docker" not in str(caught.value)
    assert "kubectl" not in str(caught.value)


def test_an_engine_that_does_not_answer_is_not_used(world: World) -> None:
    """The docker command without its daemon is common next to podman."""
    world.has("kind", "docker", "podman", "kubectl", "helm")
    assert require_programs(Tool.KIND) == "docker"
    world.set(broken=["docker info"])
    assert require_programs(Tool.KIND) == "podman"
    world.set(broken=["docker info", "podman info"])
    with pytest.raises(LocalError, match=r"`docker info` failed: docker is broken here.*podman"):
        require_programs(Tool.KIND)


def test_k3d_with_podman_needs_its_socket(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.has("k3d", "podman", "kubectl", "helm")
    with pytest.raises(LocalError, match="DOCKER_HOST and DOCKER_SOCK"):
        require_programs(Tool.K3D)
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/podman/podman.sock")
    assert require_programs(Tool.K3D) == "podman"


@pytest.mark.parametrize("tool", list(Tool))
def test_a_cluster_that_cannot_be_created_is_removed(world: World, tool: Tool) -> None:
    """Nobody else would: without the mark, `make demo-down` leaves a cluster alone."""
    dev = everything(world, tool)
    world.set(broken=[CREATES[tool]])
    with pytest.raises(LocalError, match=rf"`{CREATES[tool]} .* failed with exit code 1"):
        dev.ensure()
    assert world.new_calls(DELETES[tool], "docker build") == [world_delete(dev)]

    world.set(broken=["kubectl"])
    with pytest.raises(LocalError, match="kubectl is broken here"):
        dev.ensure()
    assert world.state["clusters"] == {}


def world_delete(dev: DevCluster) -> str:
    """Return the command that deletes a cluster."""
    command = dev_cluster.COMMANDS[dev.tool].delete
    return command.format(name=dev.name, kubeconfig=dev.kubeconfig)


def test_a_node_that_registers_late_is_awaited(world: World, api: Api) -> None:
    api.ready = ["False", "False", "True"]
    everything(world, Tool.K3D).ensure()
    assert api.ready == ["True"]


def test_a_cluster_that_is_too_old_is_refused_before_a_build(world: World, api: Api) -> None:
    api.version = "v1.30.2"
    dev = everything(world, Tool.KIND)
    world.set(clusters={dev.name: {"marked": False, "images": []}})
    with pytest.raises(LocalError, match=r"v1\.30\.2"):
        dev_images.prepare(dev)
    assert world.state["built"] == {}
    assert dev.name in world.state["clusters"], "the user's cluster stays"


def test_an_image_that_minikube_did_not_load_is_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`minikube image load` ends with 0 even if no node took the image."""
    dev = everything(world, Tool.MINIKUBE)
    monkeypatch.setattr(DevCluster, "load", lambda _self, _archive: None)
    with pytest.raises(LocalError, match="minikube did not load localhost/fleetkeeper-demo/operat"):
        dev_images.prepare(dev)


@pytest.mark.parametrize("broken", ["docker build", "docker save", "kind load"])
def test_a_failure_names_its_command(world: World, broken: str) -> None:
    dev = everything(world, Tool.KIND)
    world.set(broken=[broken])
    with pytest.raises(LocalError, match=f"`{broken}.*` failed with exit code 1"):
        dev_images.prepare(dev)


def invoke(*arguments: str) -> str:
    """Run the demo's command and return what it says."""
    done = CliRunner().invoke(demo.app, list(arguments))
    return f"{done.exit_code} {done.output}"


@pytest.mark.parametrize("tool", list(Tool))
def test_down_deletes_the_cluster_that_the_demo_created(world: World, tool: Tool) -> None:
    dev = everything(world, tool)
    dev.ensure()
    world.new_calls()
    said = invoke("down", "--cluster", tool.value)
    assert said.startswith("0")
    assert f"removed the {tool.value} cluster fleetkeeper-demo" in said
    assert world.new_calls(DELETES[tool]) == [world_delete(dev)]
    assert world.state["clusters"] == {}
    assert not dev.directory.exists()
    assert "nothing to remove" in invoke("down", "--cluster", tool.value)


@pytest.mark.parametrize("tool", list(Tool))
def test_down_leaves_the_users_cluster_and_removes_the_demo_from_it(
    world: World, tool: Tool
) -> None:
    """Also if the demo once created a cluster of this name, which the user replaced."""
    dev = DevCluster(tool, "mine", "docker")
    everything(world, tool)
    dev.ensure()
    world.set(clusters={"mine": {"marked": False, "images": []}}, calls=[])
    said = invoke("down", "--cluster", tool.value, "--cluster-name", "mine")
    assert said.startswith("0")
    assert "the cluster mine stays, because the demo did not create it" in said
    assert list(world.state["clusters"]) == ["mine"]
    changes = [call for call in world.calls if re.search(r"delete|uninstall", call)]
    assert [re.sub(r".*--kubeconfig \S+ ", "", call) for call in changes] == [
        "delete namespace fleetkeeper-demo --ignore-not-found",
        "uninstall fleetkeeper --namespace fleetkeeper-system --wait --ignore-not-found",
        "delete namespace fleetkeeper-system --ignore-not-found",
    ]


def test_down_deletes_nothing_if_the_cluster_does_not_answer(world: World) -> None:
    dev = everything(world, Tool.KIND)
    dev.ensure()
    world.set(broken=["kubectl"])
    said = invoke("down", "--cluster", "kind")
    assert said.startswith("1")
    assert "does not say who created it" in said
    assert world_delete(dev) in said
    assert dev.name in world.state["clusters"]


def test_up_refuses_two_clusters_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    everything(world, Tool.KIND)
    monkeypatch.setenv("DEMO_KUBECONFIG", "/x")
    said = invoke("up", "--cluster", "kind")
    assert said.startswith("1")
    assert "CLUSTER and DEMO_KUBECONFIG are both set" in said
    assert world.calls == []


def test_the_chart_accepts_the_values() -> None:
    chart = REPOSITORY / "charts" / "fleetkeeper"
    names = ImageNames(
        *(f"localhost/a/{name}:1" for name in ("operator", "engine", "router", "gateway"))
    )
    values = yaml.safe_load((chart / "values.yaml").read_text())
    for key, value in dev_images.desired_values(names).items():
        for inner, leaf in value.items():
            assert inner in values[key], f"{key}.{inner}"
            old = values[key][inner]
            values[key][inner] = {**old, **leaf} if isinstance(old, dict) else leaf
    jsonschema.validate(values, json.loads((chart / "values.schema.json").read_text()))
    assert [profile["image"] for profile in values["engineProfiles"].values()][:1] == [names.engine]


@pytest.mark.parametrize(
    ("variables", "builds", "arguments"),
    [
        ([], (True, True), ""),
        (["ENGINE=simulated"], (True, False), '--engines "simulated"'),
        (["CLUSTER=k3d"], (False, False), '--cluster "k3d"'),
        (["CLUSTER=kind", "CLUSTER_NAME=a"], (False, False), '--cluster "kind" --cluster-name "a"'),
    ],
)
def test_make_builds_for_the_demo_only_what_it_needs(
    variables: list[str], builds: tuple[bool, bool], arguments: str
) -> None:
    """Neither the node's programs nor the environment of vLLM are needed in another cluster."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if "CLUSTER" not in name and name != "ENGINE"
    }
    for target, verb in (("demo", "up"), ("demo-down", "down")):
        text = subprocess.run(
            ["make", "--dry-run", target, *variables],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        given = "" if verb == "down" and "--engines" in arguments else arguments
        assert f"fleetkeeper_local.demo {verb} {given}".strip() in text
        if target == "demo":
            assert ("fleetkeeper_local build" in text, "setup.py engine" in text) == builds

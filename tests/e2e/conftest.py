"""A real node for the tests of this folder: started once a session, removed at its end."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from fleetkeeper_local.common import lock, packages
from fleetkeeper_local.common.lock import machine_owner
from fleetkeeper_local.common.paths import cache_dir
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.demo import waiting_work
from fleetkeeper_local.demo.cluster import Cluster
from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.front_door import FrontDoor
from fleetkeeper_local.demo.installation import (
    BATCH,
    GATEWAY,
    SIMULATED_PROFILE,
    ImageNames,
    Installation,
    desired_values,
    push_images,
    put_model,
)
from fleetkeeper_local.demo.waiting_work import WaitingWork
from fleetkeeper_local.images import builder
from fleetkeeper_local.node.node import Node
from fleetkeeper_local.node.settings import NodeSettings
from tests.support.node.node_world import MachineState, Pods, machine_state, until
from tests.support.node.service_world import ordered, service_fleet, simulated, tiny, tracebacks

FOLDER = Path(__file__).parent
DATA = cache_dir() / "e2e-node"
"""In the cache: the next session finds its images there."""
SIMULATED_SPEED = 0.25
"""Of one H100: as slow as the tiny model on a core, so that work lasts until a fault meets it."""
KEEP = os.environ.get("FLEETKEEPER_E2E_KEEP") == "1"
"""By hand: use a node that runs, and leave it running."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the first test of a session wait for the node and its images for as long as they take."""
    limit = pytest.mark.timeout(float(config.getini("timeout")), func_only=True)
    for item in items:
        if FOLDER in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(limit)


@pytest.fixture(scope="session")
def machine_before() -> MachineState:
    """The machine before the session's node was started on it; its packages may stay on it."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("a node needs root on Debian")
    packages.ensure_packages(packages.NODE_PACKAGES)
    if not KEEP and (DATA / lock.MARKER).exists():
        # A session that was killed left services, whose pods would take the processors of this one's.
        Node(NodeSettings(directory=DATA)).down()
    return machine_state(DATA)


@pytest.fixture(scope="session")
def node(machine_before: MachineState) -> Iterator[Node]:
    """A running node with containers, DNS and Prometheus; removed at the end without a trace."""
    owner = machine_owner()
    if owner is not None and owner != DATA.resolve():
        pytest.fail(f"a node of {owner} runs here; remove it: fleetkeeper local down --dir {owner}")
    running = Node(NodeSettings(directory=DATA))
    running.up()
    yield running
    if not KEEP:
        running.down()
        assert machine_state(DATA) == machine_before
        assert machine_owner() is None


@pytest.fixture(scope="session")
def cluster(node: Node) -> ControlPlane:
    """The node's API: kubectl, and plain GETs as the administrator."""
    return node.plane


@pytest.fixture(scope="session")
def python_image(node: Node) -> str:
    """An image with a shell and Python, in the node's registry."""
    return builder.base_image().push(node.settings.registry_port)


@pytest.fixture
def pods(cluster: ControlPlane) -> Iterator[Pods]:
    """A namespace of the test's own, in which only hardened pods are admitted."""
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    until(lambda: cluster.get(account), "the namespace's ServiceAccount")
    yield Pods(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def images_ahead(
    request: pytest.FixtureRequest, node: Node, python_image: str
) -> Iterator[Future[ImageNames] | None]:
    """The product's images, where a test will want them: built while tests of pods alone still run.

    Not sooner: tests of the node compare the machine's mounts before and after.
    """
    assert python_image  # the base of them all; two builds at a time would be in each other's way
    if not any("product" in getattr(item, "fixturenames", ()) for item in request.session.items):
        yield None
        return
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield pool.submit(push_images, node)


@pytest.fixture(scope="session")
def product(node: Node, images_ahead: Future[ImageNames]) -> Installation:
    """Fleetkeeper installed on the node by Helm: images built, chart, operator ready."""
    values = desired_values(images_ahead.result(), node)
    values["engineProfiles"][SIMULATED_PROFILE]["simulation"] = {"speed": SIMULATED_SPEED}
    installation = Installation(Cluster(node.kubeconfig), values)
    installation.install()
    return installation


@pytest.fixture(scope="session")
def shared_fleet(product: Installation) -> Iterator[Fleet]:
    """Simulated engines behind a router that keeps sessions; tests take `fleet` or `pair`."""
    with service_fleet(product, simulated()) as fleet:
        fleet.await_ready(1)
        yield fleet


@pytest.fixture(scope="session")
def vllm_fleet(product: Installation, node: Node) -> Iterator[Fleet]:
    """The tiny model on a real vLLM, for modules that take it as their `shared_fleet`.

    It may still start.
    """
    with service_fleet(product, tiny(resources={"cpu": "800m"})) as fleet:
        put_model(product.cluster, node, fleet.namespace)
        yield fleet


@pytest.fixture(scope="session")
def vllm_ahead(request: pytest.FixtureRequest) -> None:
    """Start the real vLLM beside the tests of this module, if a later one wants it."""
    if any("vllm_fleet" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("vllm_fleet")


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Fleet:
    """The shared fleet with one replica, Ready.

    Each test leaves it as it found it, but for pods that it had to replace.
    """
    return ordered(shared_fleet, 1)


@pytest.fixture
def pair(shared_fleet: Fleet) -> Fleet:
    """The shared fleet with two replicas, Ready, by an order through the scale subresource."""
    return ordered(shared_fleet, 2)


@pytest.fixture(scope="module")
def door(product: Installation) -> FrontDoor:
    """The gateway's Service, whose pods the installation awaited."""
    address = product.cluster.cluster_ip(product.namespace, GATEWAY)
    return FrontDoor(product.cluster, f"http://{address}", product.namespace)


@pytest.fixture
def work(
    product: Installation, shared_fleet: Fleet, door: FrontDoor, tmp_path: Path
) -> WaitingWork:
    """A batch for the shared fleet that is not submitted yet."""
    key = door.create_key(waiting_work.KEY, shared_fleet.namespace, "--highest-tier=batch")
    url = f"http://{product.cluster.cluster_ip(product.namespace, BATCH)}"
    names = (product.namespace, url, key, shared_fleet.name)
    return WaitingWork(product.cluster, *names, tmp_path / "batch")


@pytest.fixture
def calm_operator(product: Installation) -> Iterator[None]:
    """Afterwards the operator's log holds no error and no traceback."""
    yield
    assert tracebacks(product.logs()) == []

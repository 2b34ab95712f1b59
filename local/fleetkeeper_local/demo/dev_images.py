"""The product's images in a development cluster: built, loaded, and named in the chart's values."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Final

import yaml

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.report import say
from fleetkeeper_local.demo.cluster import Cluster
from fleetkeeper_local.demo.dev_cluster import DevCluster, Tool
from fleetkeeper_local.demo.installation import ImageNames, product_values, unused_images
from fleetkeeper_local.demo.scenario import EngineKind
from fleetkeeper_local.demo.stage import GivenStage
from fleetkeeper_local.images.builder import RECIPES

PREFIX: Final = "localhost/fleetkeeper-demo"
"""No registry: docker and podman both keep such a name as it is."""
EXPECTED: Final = {
    "operator": "about 0.3 GB, a minute or two",
    "router": "about 0.3 GB, a minute or two",
    "engine": "about 7 GB, a quarter of an hour or more, 3 GB to download",
    "simulated": "about 0.2 GB, a minute or two",
    "gateway": "about 0.3 GB, a minute or two",
}
API_SERVER_PORTS: Final = (443, 6443, 8443)
"""minikube's API server listens on the last; NetworkPolicies see the port behind the Service."""


def prepare(dev: DevCluster, engines: EngineKind = EngineKind.VLLM) -> GivenStage:
    """Return the cluster of a tool with the images of these engines in its nodes, ready for the demo.

    Raises:
        LocalError: a tool failed.
    """
    cost = {
        EngineKind.VLLM: "35 GB of disk and half an hour",
        EngineKind.SIMULATED: "about 3 GB of disk and five minutes",
    }
    say(f"building with {dev.engine} and loading takes {cost[engines]} the first time")
    cluster = dev.ensure()
    unused = unused_images([engines])
    built = {name: build(dev, name) for name in EXPECTED if name not in unused}
    present = images_on_all_nodes(cluster)
    for image in built.values():
        if image in present:
            say(f"{image} is in the cluster already")
        else:
            load(dev, image)
    values = dev.directory / "values.yaml"
    values.write_text(yaml.safe_dump(desired_values(ImageNames(**{"engine": "", **built}))))
    return GivenStage(cluster, values)


def build(dev: DevCluster, name: str) -> str:
    """Build an image (unchanged layers come from the cache); return its name, which tells its content.

    Raises:
        LocalError: the container engine failed.
    """
    say(f"building the {name} image ({EXPECTED[name]}; seconds if nothing changed)")
    draft = f"{PREFIX}/{name}:latest"
    dev.call(dev.engine, "build", "--file", RECIPES[name].containerfile, "--tag", draft, ".")
    digest = dev.call(
        *(dev.engine, "image", "inspect", "--format", "{{.Id}}", draft), capture=True
    ).strip()
    # With a tag other than latest, the kubelet does not pull an image that the node has.
    image = f"{PREFIX}/{name}:{digest.removeprefix('sha256:')[:12]}"
    dev.call(dev.engine, "tag", draft, image)
    return image


def load(dev: DevCluster, image: str) -> None:
    """Load an image into the nodes, through an archive, which every tool takes from every engine.

    Raises:
        LocalError: it could not be saved or loaded.
    """
    say(f"loading {image} into the cluster (minutes for the engine)")
    with tempfile.TemporaryDirectory(dir=dev.directory) as folder:
        archive = Path(folder) / "image.tar"
        dev.call(dev.engine, "save", "--output", archive, image)
        dev.load(archive)
    # It ends with 0 even if it loaded nothing.
    if dev.tool is Tool.MINIKUBE:
        listed = dev.call("minikube", "image", "ls", "--profile", dev.name, capture=True)
        if image not in listed.split():
            raise LocalError(
                f"minikube did not load {image}; its log (minikube logs --profile {dev.name}) says why"
            )


def images_on_all_nodes(cluster: Cluster) -> set[str]:
    """Return the images that every node reports (the largest 50); others are loaded again."""
    nodes = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    return set.intersection(
        *(
            {name for image in node["status"].get("images") or () for name in image["names"] or ()}
            for node in nodes
        )
    )


def desired_values(names: ImageNames) -> dict[str, Any]:
    """Return the chart's values for loaded images, without a Prometheus."""
    values = product_values(names)
    values["image"]["pullPolicy"] = "Never"  # no registry has it
    return {**values, "network": {"apiServer": {"tcpPorts": list(API_SERVER_PORTS)}}}
